"""pyproject.toml, constraints.txt, environment.yml and the Makefile say the same."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def pins() -> dict[str, Version]:
    """Canonical name -> the one version of constraints.txt."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (only,) = requirement.specifier
            assert only.operator == "==", f"{line}: a constraint pins one version"
            found[canonicalize_name(requirement.name)] = Version(only.version)
    return found


def requirements(*extras: str) -> list[Requirement]:
    """What pyproject.toml asks for, with the given extras."""
    texts = [*PROJECT["dependencies"]]
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def conda() -> tuple[list[str], list[str]]:
    """The conda part and the pip part of environment.yml."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip_part,) = [entry["pip"] for entry in entries if isinstance(entry, dict)]
    return [entry for entry in entries if isinstance(entry, str)], pip_part


def test_every_requirement_is_pinned_inside_its_range():
    pinned = pins()
    for requirement in requirements("test", "lab"):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{name} is asked for and not pinned"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} excludes the pin {pinned[name]}"


def test_everything_that_the_requirements_bring_is_pinned():
    """Walks the installed metadata from our requirements down; CUDA packages of torch pin themselves."""
    pinned, seen = pins(), set()
    todo = [(requirement, ("",)) for requirement in requirements("test", "lab")]
    while todo:
        requirement, extras = todo.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add(key)
        assert name in pinned, f"{name} is installed with us and not pinned"
        inner = importlib.metadata.requires(name) or []
        todo += [(Requirement(text), ("", *requirement.extras)) for text in inner]
    assert len(seen) > 50


def test_extras_exist_by_the_names_that_the_readme_uses():
    assert set(PROJECT["optional-dependencies"]) == {"gpu", "hf", "test", "lab"}
    assert [Requirement(text).name for text in PROJECT["optional-dependencies"]["gpu"]] == ["triton"]
    assert [Requirement(text).name for text in PROJECT["optional-dependencies"]["hf"]] == ["transformers"]


def test_make_and_conda_install_the_same():
    torch = f"torch=={pins()['torch']}"
    conda_part, pip_part = conda()
    assert f"TORCH := {torch}\n" in MAKEFILE
    assert pip_part == ["--constraint constraints.txt", torch, "--editable .[test,lab]"]
    assert "-c constraints.txt -e '.[test,lab]'" in MAKEFILE
    assert f"python{PROJECT['requires-python']}" in conda_part


def test_the_readme_names_the_pinned_torch_and_every_make_target():
    readme = (ROOT / "README.md").read_text()
    assert f"torch {pins()['torch']}" in readme
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert [target for target in phony.split() if f"make {target}" not in readme] == []


def test_the_build_backend_is_pinned_too():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_make_runs_every_tier():
    (tiers,) = re.findall(r"^TIERS := \$\(addprefix tests/,(.*)\)$", MAKEFILE, re.MULTILINE)
    there = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(tiers.split()) == there - {"gpu"}
