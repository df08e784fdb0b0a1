"""What the README lists is what there is."""

import re
from importlib import import_module
from pathlib import Path

import colossal_nb
from colossal_nb.notebook.options import CELL, CELL_LATER, VERBS, VERBS_LATER
from colossal_nb.plan.legal import BUILT
from colossal_nb.plan.strategy import FIELDS

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_every_verb_and_every_option_is_listed_and_no_other():
    assert {verb for verb in VERBS if f"`%colossal {verb}" not in README} == set()
    assert set(re.findall(r"(?<!%)%colossal ([a-z]+)", README)) <= set(VERBS)
    assert {option for option in CELL if f"| `{option}" not in README} == set()


def test_every_public_name_is_named_and_every_name_exists():
    assert {name for name in colossal_nb.__all__ if f"cnb.{name}" not in README} == set()
    named = set(re.findall(r"cnb\.([A-Za-z_]+)", README)) - {"last_run"}  # there from %load_ext on
    assert {name for name in named if not hasattr(colossal_nb, name)} == set()


def test_what_is_not_built_is_said():
    missing = README.split("## What is not built yet")[1].split("\n## ")[0]
    assert {name for name in [*CELL_LATER, *VERBS_LATER] if f"`{name}`" not in missing} == set()
    for name, built in BUILT.items():
        assert f"`{name}`" in missing or "schedules" in missing, name
        for choice in FIELDS[name].choices:
            if name == "schedule" and choice not in built:
                assert f"`{choice}`" in missing
            if name == "schedule" and choice in built:
                assert f"`{choice}`" not in missing


def test_the_programs_that_are_compared_are_as_many_as_it_says():
    files = [path.stem for path in (Path(__file__).parents[1] / "programs").glob("[a-z]*.py")]
    count = sum(len(import_module(f"programs.{name}").PROGRAMS) for name in files if name != "transformers_models")
    assert f"holds {count} training programs" in README
