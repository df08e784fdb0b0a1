"""What the user hears while a cell runs, each thing once."""
from __future__ import annotations

from fake_page import FakePage

from colossal_nb.notebook.output import CellOutput
from colossal_nb.notebook.running import Told, follow
from colossal_nb.run import Message, Output, Pause, RankError, RankState, Run


def told(*states: RankState, errors: tuple[RankError, ...] = ()) -> Told:
    run = Run("", None, (0, 1, 2))
    run.errors = {error.rank: error for error in errors}
    found = Told(run, FakePage())
    for state in states:
        found.hear(state)
    return found


def said(found: Told, *seconds: float) -> list[str]:
    for each in seconds:
        found.turn(each)
    assert isinstance(found.page, FakePage)
    return found.page.pictures


def test_a_failure_is_told_while_others_compute() -> None:
    error = RankError(2, "ValueError", "bad batch\nmore", line=4, time_s=1.0)
    states = (RankState(2, "error"), RankState(1, "waiting", "barrier"))
    assert said(told(*states, errors=(error,)), 1.5) == []
    assert said(told(*states, errors=(error,)), 2.0, 3.0, 9.0) == [
        "rank 2 raised ValueError: bad batch (line 4); rank 0 still runs: Stop ends the cell"]


def test_nothing_is_told_when_the_others_only_wait_for_the_failed_one() -> None:
    states = [RankState(rank, "waiting", "barrier") for rank in (0, 1)]
    error = RankError(2, "ValueError", "bad batch", time_s=0.0)
    assert said(told(RankState(2, "error"), *states, errors=(error,)), 5.0) == []


def test_a_wait_without_end_is_told_after_a_second() -> None:
    states = (RankState(0, "done"), *(RankState(rank, "waiting", "barrier #0", 2.0, "line 3") for rank in (1, 2)))
    assert said(told(*states), 2.9) == []
    assert said(told(*states), 3.0, 4.0) == [
        "ranks 1,2 wait in barrier #0 (line 3) for rank 0, which finished the cell: "
        "this has no end and will be stopped"]


def test_a_wait_for_a_rank_that_computes_is_not_called_endless() -> None:
    assert said(told(RankState(0, "waiting", "barrier", 0.0)), 60.0) == []
    assert said(told(RankState(0, "done"), RankState(1, "waiting", "barrier", 0.0)), 60.0) == []


def test_notes_are_told_once_and_equal_ones_of_several_ranks_together() -> None:
    found = told()
    found.run.notes += ["ranks 1, 2 are new", "connected already (rank 0 of 3)", "connected already (rank 1 of 3)"]
    assert said(found, 0.0, 1.0) == ["ranks 1, 2 are new", "connected already (rank 0 of 3)"]
    found.run.notes.append("rank 1 is replaced")
    found.run.notes.append("rank 2 is replaced")
    assert said(found, 2.0)[2:] == ["rank 1 is replaced", "rank 2 is replaced"]


def test_a_run_is_followed_to_its_end() -> None:
    messages: list[Message] = [Output(rank, "stream", 0.0, "stdout", "line\n") for rank in range(3)]
    run, page = Run("", None, (0, 1, 2)), FakePage()
    last = [Pause(0.1), RankState(0, "done"), Output(1, "stream", 0.2, "stdout", "end")]
    run.attach(iter([*messages, *last]), lambda: None)
    follow(run, CellOutput(run.ranks, page, bare=False), page)
    assert page.text() == "line\n[1] end\n"


def test_after_a_press_nobody_is_told_to_press() -> None:
    error = RankError(2, "KeyboardInterrupt", "", line=2, time_s=0.0)
    found = told(RankState(2, "error"), errors=(error,))
    found.run.interrupted = True
    assert said(found, 5.0) == []


def test_a_state_that_comes_after_the_end_is_old() -> None:
    error = RankError(2, "ValueError", "bad batch", time_s=0.0)
    found = told(RankState(2, "error"), RankState(2, "computing"), RankState(1, "done"), errors=(error,))
    assert said(found, 5.0) == ["rank 2 raised ValueError: bad batch; rank 0 still runs: Stop ends the cell"]
