"""Errors: the first cause first, each once, consequences as one line, nothing of this package's own code."""
from __future__ import annotations

import pytest

from colossal_nb.notebook.errors import MOST_FRAMES, CellError, fail, fail_for, report, shortened
from colossal_nb.run import RankError, Run

CELL = "Cell In[7], line 3\n----> 3 step()"
OURS = "File /x/site-packages/colossal_nb/parallel/step.py:3, in forward_backward()"
MODEL = "File /x/site-packages/colossal_nb/models/gpt.py:3, in forward()"
LIBRARY = "File /x/site-packages/torch/nn/modules/linear.py:{}, in forward()"


def failed(*errors: RankError, ranks: int = 4, status: str = "error") -> Run:
    run = Run("", None, tuple(range(ranks)))
    run.errors = {error.rank: error for error in errors}
    run.status, run.cell = status, 7
    return run


def error(rank: int, name: str = "ValueError", value: str = "no", line: int = 3, time_s: float = 0.0,
          consequence: bool = False) -> RankError:
    return RankError(rank, name, value, [CELL, f"{name}: {value}"], line, time_s, consequence)


def test_the_same_error_of_all_ranks_is_shown_once() -> None:
    assert report(failed(*(error(rank, value=f"no <object at 0x7f{rank}0123456>") for rank in range(4)))) == [
        "\x1b[0;31mall ranks (0-3) raised this\x1b[0m:", CELL, "ValueError: no <object at 0x7f00123456>"]


def test_notes_of_an_error_are_shown_below_it() -> None:
    header = "ValueError      Traceback (most recent call last)"
    run = failed(RankError(0, "ValueError", "no", [header, CELL, OURS, "ValueError: no", "a note"], 3), ranks=1)
    assert report(run) == [header, CELL, "ValueError: no", "a note"]


def test_texts_that_differ_are_each_said() -> None:
    run = failed(*(error(rank, value=f"rank {max(rank, 1)} is bad", time_s=float(rank != 1)) for rank in range(4)))
    assert report(run) == [
        "\x1b[0;31mall ranks (0-3) raised this with other numbers; this is rank 1's\x1b[0m:", CELL,
        "ValueError: rank 1 is bad", "rank 2: ValueError: rank 2 is bad (line 3)",
        "rank 3: ValueError: rank 3 is bad (line 3)"]
    with pytest.raises(CellError) as caught:
        fail_for(run, {})
    assert str(caught.value) == "rank 1 is bad (ranks 0,1, line 3; ranks 2,3 with other numbers)"


def test_the_first_cause_comes_first() -> None:
    run = failed(error(0, "KeyError", "k", 9, time_s=2.0), error(2, time_s=1.0),
                 error(3, "Released", "", 5, time_s=0.5, consequence=True), error(1, line=8, time_s=1.5))
    assert report(run) == [
        "\x1b[0;31mrank 2 raised this first\x1b[0m:", CELL, "ValueError: no", "rank 0: KeyError: k (line 9)",
        "rank 1: the same (line 8)", "rank 3: stopped because of that (line 5)"]


def test_what_is_raised_has_the_users_name_ranks_and_line() -> None:
    with pytest.raises(CellError) as caught:
        fail_for(failed(error(1), error(2)), {7: 12})
    assert type(caught.value).__name__ == "ValueError"
    assert str(caught.value) == "no (ranks 1,2, line 3)"
    assert "In[12], line 3" in caught.value._render_traceback_()[1]


def test_a_death_has_no_traceback() -> None:
    died = RankError(1, "RankDied", "rank 1 was lost: SIGKILL")
    assert report(failed(died)) == ["\x1b[0;31mRankDied\x1b[0m: rank 1 was lost: SIGKILL"]


def test_a_verdict_replaces_how_the_rank_was_stopped() -> None:
    stopped = RankError(1, "TimeoutError", "too long", ["KeyboardInterrupt  Traceback", CELL, "KeyboardInterrupt: "], 3)
    assert report(failed(stopped, ranks=2))[1:] == [CELL, "\x1b[0;31mTimeoutError\x1b[0m: too long"]


def test_an_interrupt_is_a_keyboard_interrupt_with_the_lines() -> None:
    stopped = [error(rank, "KeyboardInterrupt", "", 5 if rank == 1 else 3) for rank in range(4)]
    run = failed(*stopped, status="interrupted")
    with pytest.raises(CellError) as caught:
        fail_for(run, {})
    assert type(caught.value).__name__ == "KeyboardInterrupt"
    assert caught.value.lines[0].endswith("stopped on ranks 0-3, lines 3, 5; variables are kept")


def test_tracebacks_are_short() -> None:
    library = [LIBRARY.format(i) for i in range(5)]
    assert shortened([CELL, OURS, MODEL, *library, "ValueError: no"]) == [
        CELL, MODEL, "    ... 3 frames in libraries ...", *library[3:], "ValueError: no"]
    assert len(shortened([CELL] * 3000)) == MOST_FRAMES + 1
    assert len(shortened(["ValueError: " + "x" * 500_000])[0]) < 3_000


def test_an_error_raised_again_is_shown_once() -> None:
    link = "\nThe above exception was the direct cause of the following exception:\n"
    assert shortened([CELL, "Mismatch: a", link, CELL, "Mismatch: a"]) == [CELL, "Mismatch: a"]
    both = [CELL, "KeyError: a", link, CELL, "Mismatch: b"]
    assert shortened(both) == both


def test_one_sentence_for_what_was_typed_wrong() -> None:
    with pytest.raises(CellError) as caught:
        fail("ValueError", "there is no field 'zz'")
    assert caught.value.lines == ["\x1b[0;31mValueError\x1b[0m: there is no field 'zz'"]


def test_other_errors_whose_texts_differ_are_each_said() -> None:
    run = failed(error(0), *(error(rank, "KeyError", f"{rank}", 9, time_s=1.0) for rank in (1, 2)),
                 error(3, "KeyError", "2", 9, time_s=1.0))
    assert report(run)[-2:] == ["rank 1: KeyError: 1 (line 9)", "ranks 2,3: KeyError: 2 (line 9)"]


def test_only_the_ranks_that_were_stopped_are_called_stopped() -> None:
    run = failed(error(0, "KeyboardInterrupt", ""), error(1, "StillRunning", "rank 1 is still in the cell", 9),
                 status="interrupted")
    with pytest.raises(CellError) as caught:
        fail_for(run, {})
    runs_on = "rank 1 still runs: %colossal restart --rank 1 ends it (its variables are lost, the others keep theirs)"
    assert str(caught.value) == f"stopped on rank 0, line 3; {runs_on}"
    assert [line.partition(": ")[2] for line in caught.value.lines] == [
        f"stopped on rank 0, line 3; {runs_on}", "StillRunning: rank 1 is still in the cell (line 9)"]
    run = failed(*(error(rank, "StillRunning", "still in the cell") for rank in (0, 1)), ranks=2, status="interrupted")
    with pytest.raises(CellError) as caught:
        fail_for(run, {})
    assert str(caught.value) == ("no rank has stopped; ranks 0,1 still run: %colossal restart --rank 0,1 ends them "
                                 "(their variables are lost)")
