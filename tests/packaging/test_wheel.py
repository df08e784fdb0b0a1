"""The built wheel is complete: installed alone, it runs a cell from another folder through a real kernel."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.packaging
ROOT = Path(__file__).parents[2]
# A PYTHONPATH of ours would let the checkout in by a side door.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
SOURCES = ("colossal_nb", "pyproject.toml", "README.md", "LICENSE")


def ran(*command: object, cwd: Path) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources alone, so that nothing else of the checkout can slip in."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    ran(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, ".", cwd=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel, which sees the dependencies of this one but not our checkout."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    # A path line adds the folder without reading the .pth files in it, so an editable install of ours stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    ask = [python, "-c", "import torch, zmq, colossal_nb"]
    missing = subprocess.run(ask, cwd=home, env=CLEAN, capture_output=True, text=True, timeout=120, check=False)
    assert "No module named 'colossal_nb'" in missing.stderr, "the environment is not empty"
    ran(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    return python


def test_wheel_has_all_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "colossal_nb").rglob("*.py")}
    assert names == ours | {"colossal_nb/py.typed"}
    assert len(licenses) == 1


def test_metadata_says_what_pyproject_says(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "colossal_nb"
    assert set(metadata.get_all("Provides-Extra")) == {"gpu", "hf", "lab", "test"}
    assert any(line.startswith(("torch<", "torch>")) for line in metadata.get_all("Requires-Dist"))
    assert metadata.get_payload().startswith("# colossal_nb")


def test_a_cell_runs_from_another_folder(installed, tmp_path):
    argv = [str(installed), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "wheel", "language": "python"}
    (tmp_path / "kernels" / "wheel").mkdir(parents=True)
    (tmp_path / "kernels" / "wheel" / "kernel.json").write_text(json.dumps(spec))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    manager = KernelManager(
        kernel_name="wheel", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(tmp_path / "kernels")])
    )
    manager.start_kernel(cwd=str(elsewhere), env=CLEAN)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        shown: list[str] = []

        def keep(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] in ("display_data", "execute_result", "error"):
                shown.append(str(content))

        def cell(source: str) -> str:
            shown.clear()
            reply = client.execute_interactive(source, output_hook=keep, timeout=120, allow_stdin=False)
            assert reply["content"]["status"] == "ok", "".join(shown)
            return "".join(shown)

        cell("%load_ext colossal_nb")
        shown_by_ranks = cell(
            "%%colossal tp=2\nimport os, torch, colossal_nb\nx = torch.ones(1)\ntorch.distributed.all_reduce(x)\n"
            "print('sum', x.item())\nprint('from', colossal_nb.__file__)\nprint('in', os.getcwd())"
        )
        assert "sum 2.0" in shown_by_ranks
        assert f"from {installed.parents[1]}" in shown_by_ranks
        assert f"in {elsewhere}" in shown_by_ranks
        cell("%colossal stop")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
