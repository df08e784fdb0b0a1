"""The magic line: forgiving in form, one clear error otherwise, help from the same tables."""
from __future__ import annotations

import pytest

from colossal_nb.notebook import help as helps
from colossal_nb.notebook.arguments import CellArguments, VerbArguments, read_cell, read_verb, words
from colossal_nb.notebook.options import CELL, CELL_LATER, VERBS, VERBS_LATER
from colossal_nb.plan.strategy import FIELDS, Strategy


@pytest.mark.parametrize("line", [
    "tp=2 pp=4", "tp=2 pp=4 # a comment", "  tp = 2   pp=4", "tp=2\u00a0pp=4", "tp=2, pp=4", "tp=2\u2003pp=4\u200b",
    "TP=2 PP=4", "\uff54\uff50\uff1d2 pp=4", "tp= 2 pp =4 # tp=3 --ranks 9",
])  # fmt: skip
def test_odd_spaces_commas_capitals_and_comments_are_forgiven(line: str) -> None:
    assert read_cell(line) == CellArguments(strategy=Strategy(tp=2, pp=4))


def test_an_empty_line_is_a_bare_cell() -> None:
    assert read_cell("") == read_cell("  # only a comment") == CellArguments()


def test_every_option_at_once() -> None:
    assert read_cell("dp=2 --out run --pull a,b --timeout 1h30m --show all --local") == CellArguments(
        Strategy(dp=2), None, "run", ("a", "b"), 5400.0, True, None, True)


@pytest.mark.parametrize("line, ranks", [
    ("--ranks 0,2", (0, 2)), ("--ranks 0, 2", (0, 2)), ("--ranks=0-2", (0, 1, 2)), ("--ranks [0,2]", (0, 2)),
    ("\u2014ranks 1", (1,)), ("--ranks 3,1,1", (1, 3)),
])  # fmt: skip
def test_ranks(line: str, ranks: tuple[int, ...]) -> None:
    assert read_cell(line).ranks == ranks


@pytest.mark.parametrize("text, seconds", [("90", 90), ("90s", 90), ("10m", 600), ("0.5h", 1800), ("250ms", 0.25),
                                           ("1m30s", 90)])
def test_times(text: str, seconds: float) -> None:
    assert read_cell(f"--timeout {text}").timeout_s == seconds


def test_show_takes_ranks() -> None:
    assert read_cell("--show 0").only == (0,) and read_cell("--show 0,2").only == (0, 2)
    assert read_cell("--show all").only is None


def test_compare_reads_every_strategy() -> None:
    assert read_cell('--compare "dp=4 ; tp=4"').compare == (Strategy(dp=4), Strategy(tp=4))
    assert read_cell("--compare \u201cdp=4 ; tp=4\u201d").compare == (Strategy(dp=4), Strategy(tp=4))


@pytest.mark.parametrize("line, said", [
    ("tp=2 --rank 0", "did you mean --ranks 0,2?"),
    ("--timout 5m", "did you mean --timeout 10m?"),
    ("--nonsense", "has no option --nonsense; its options: --ranks"),
    ("--tp 2", "a strategy is written without dashes: tp="),
    ("--ranks", "--ranks needs a value: --ranks 0,2"),
    ("--ranks --local", "--ranks needs a value: --ranks 0,2"),
    ("--ranks x", "'x' names no ranks: write 0,2 or 0-3"),
    ("--ranks 3-1", "is no range of ranks"),
    ("--ranks 0-999999", "is no range of ranks"),
    ("--ranks 0 --ranks 1", "--ranks is given twice"),
    ("tp=2 --ranks 0", "--ranks is for cells without a strategy"),
    ("--timeout soon", "'soon' is no time: write 90s, 10m or 1h30m"),
    ("--timeout 0", "no time to wait for"),
    ("--out 2x", "'2x' is no name of a variable"),
    ("--watch memory", "--watch (live views of a running cell) is not built yet"),
    ("tp=2 --on-hang wait", "--on-hang (a choice of what ends a proven hang, which ends by itself) is not built yet"),
    ("--compare", '--compare needs a value: --compare "dp=4 ; tp=4"'),
    ("--compare ;", "names no strategies"),
    ('tp=4 --compare "dp=4"', "--compare names all strategies itself"),
    ("cp=2", "did you mean sp=2?"),
    ("fsdp", "did you mean zero=3?"),
    ("microbatch=4", "did you mean microbatches=4?"),
    ("bf16", "did you mean precision=bf16?"),
    ("tp=0", "tp is a whole number from 1"),
    ("tp=two", "tp is a whole number from 1"),
    ("dp=1000", "needs 1000 engines, more than the"),
    ("tp", "tp needs a value"),
    ("hello", "there is no field 'hello'"),
    ("restart --rank 2", "restart is a verb, which has one percent sign and no cell: %colossal restart --rank 2"),
])  # fmt: skip
def test_what_is_wrong_is_said_with_the_fix(line: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_cell(line)
    assert said in str(caught.value)


def test_every_wrong_option_is_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        read_cell("--ranks x --timeout y --what")
    assert len(str(caught.value).splitlines()) == 3


def test_verbs() -> None:
    assert read_verb("") == VerbArguments("status")
    assert read_verb("start -n 4") == VerbArguments("start", (), {"-n": 4})
    assert read_verb("start -n=4 # four") == VerbArguments("start", (), {"-n": 4})
    assert read_verb("push a b").words == ("a", "b") and read_verb("push a, b").words == ("a,b",)
    assert read_verb("help --out") == VerbArguments("help", ("--out",))
    assert read_verb("pull x --rank 2") == VerbArguments("pull", ("x",), {"--rank": 2})
    assert read_verb('compare "dp=4 ; tp=4"') == VerbArguments("compare", ("dp=4 ; tp=4",))
    assert read_verb("export train.py --cells 3-5") == VerbArguments("export", ("train.py",), {"--cells": (3, 4, 5)})


@pytest.mark.parametrize("line, said", [
    ("tp=2 pp=2", "write %%colossal tp=2 pp=2 (two percent signs)"),
    ("tp = 2", "write %%colossal tp=2 (two percent signs)"),
    ("fsdp", "write %%colossal zero=3 (two percent signs)"),
    ("--ranks 0", "--ranks belongs to a cell"),
    ("stat", "did you mean %colossal status?"),
    ("statuss", "did you mean %colossal status?"),
    ("frobnicate", "the verbs are start, status"),
    ("memory --limit 40MiB", "%colossal memory (the memory view) is not built yet"),
    ("start --memory 2GiB", "--memory (a memory capacity for each engine) is not built yet"),
    ("start -n many", "'many' is no number of engines"),
    ("start -n 0", "'0' is no number of engines"),
    ("start -m 4", "did you mean -n 4?"),
    ("restart --rank x", "'x' names no ranks: write 0,2 or 0-3"),
    ("stop --rank 1", "%colossal restart --rank R replaces it"),
])  # fmt: skip
def test_wrong_verbs(line: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_verb(line)
    assert said in str(caught.value)


def test_quotes_keep_words_together() -> None:
    assert words("compare 'dp=4 ; tp = 4' x = 1") == ["compare", "dp=4 ; tp = 4", "x=1"]


def test_help_names_everything_that_works_and_nothing_else() -> None:
    text = helps.cell() + helps.line()
    assert all(name in text for name in [*FIELDS, *CELL, *VERBS])
    assert not any(f"\n    {name} " in text for name in [*CELL_LATER, *VERBS_LATER])


@pytest.mark.parametrize("word", [*VERBS, *FIELDS, *CELL])
def test_every_word_has_help_with_an_example(word: str) -> None:
    assert "Example\n    %" in helps.word(word)


def test_help_on_nonsense_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean microbatches"):
        helps.word("microbatch")
    assert "not built yet" in helps.word("memory")
