"""What is typed around our magics: odd spaces are forgiven, other people's cells are left alone."""
from __future__ import annotations

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from colossal_nb.notebook.typed import ask_help, forgive


def transformed(text: str) -> str:
    manager = TransformerManager()
    manager.cleanup_transforms.insert(0, forgive)
    manager.cleanup_transforms.append(ask_help)
    return manager.transform_cell(text).strip()


@pytest.mark.parametrize("space", ["\u00a0", "\u202f", "\u3000", "\t", "\u200b", "\u2060\u00a0", "  "])
@pytest.mark.parametrize("before", ["", "\u00a0", "\ufeff", "\n\u00a0\n", "  "])
def test_any_space_ends_the_name(before: str, space: str) -> None:
    assert transformed(f"{before}%%colossal{space}tp=2\nx = 1") == (
        "get_ipython().run_cell_magic('colossal', 'tp=2', 'x = 1\\n')")
    assert transformed(f"{before}%colossal{space}status") == "get_ipython().run_line_magic('colossal', 'status')"


def test_in_a_block_and_without_a_space() -> None:
    block = transformed("if x:\n    %colossal\u00a0stop\n")
    assert block == "if x:\n    get_ipython().run_line_magic('colossal', 'stop')"
    assert transformed("%%colossal# tp later\npass").startswith("get_ipython().run_cell_magic('colossal', '# tp later'")


@pytest.mark.parametrize("text", [
    "%%writefile notes.txt\n%colossal\u00a0status\n", "%%colossal\nprint('''\n%colossal\u00a0x''')\n",
    "%colossal_other\u00a0x\n", "text = '%colossal\u00a0x'\n"])
def test_what_is_not_ours_stays(text: str) -> None:
    assert forgive(text.splitlines(keepends=True))[-1] == text.splitlines(keepends=True)[-1]


@pytest.mark.parametrize("text", ["%%colossal?", "%%colossal", "%colossal", ""])
def test_help_and_bare_magics_are_what_they_were(text: str) -> None:
    assert transformed(text) == TransformerManager().transform_cell(text).strip()


@pytest.mark.parametrize("text", ["%%colossal??", "??%%colossal", "?%%colossal", "%%colossal ??", "%%colossal\u00a0?"])
def test_two_question_marks_ask_for_the_help_and_not_for_the_source(text: str) -> None:
    assert transformed(text) == transformed("%%colossal?")
    assert transformed("x = 1\n%colossal??") == "x = 1\n" + transformed("%colossal?")


def test_help_on_a_verb() -> None:
    assert transformed("x = 1\n%colossal push??").endswith("run_line_magic('colossal', 'help push')")
    assert transformed("%colossal\u00a0push?") == "get_ipython().run_line_magic('colossal', 'help push')"
