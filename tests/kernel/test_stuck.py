"""Ranks that do not end their cell, or are frozen: named, replaced on request, never waited for."""
from __future__ import annotations

import os
import signal
import threading

import pytest
from conftest import eventually, printed

from colossal_nb.cluster.client import ClusterLost, RankFailed
from colossal_nb.session import Session


def hold(session: Session, ranks: tuple[int, ...]) -> None:
    """Let ranks refuse to end a cell."""
    assert session.run("kept = 5").wait().status == "ok"
    run = session.run(f"import time\nif rank in {ranks}:\n    while True:\n        try: time.sleep(300)\n"
                      "        except KeyboardInterrupt: pass")
    timer = threading.Timer(0.7, session.interrupt)
    timer.start()
    run.wait()
    timer.join()
    assert {rank for rank, error in run.errors.items() if error.ename == "StillRunning"} == set(ranks)
    whom = ",".join(map(str, ranks))
    assert all(f"restart --rank {whom}`" in run.errors[rank].evalue for rank in ranks)
    with pytest.raises(RankFailed, match=f"still in an earlier cell.*--rank {whom}`"):
        session.run("1")


def test_ranks_that_are_stuck_are_named_not_waited_for(session: Session) -> None:
    hold(session, (1, 2))
    doing = session.doing()
    assert [doing[rank].free for rank in range(4)] == [True, False, False, True]
    assert [doing[rank].where for rank in range(4)] == ["", "line 4", "line 4", ""]
    assert doing[1].cell == doing[2].cell > 0
    assert sorted(session.names()) == [0, 3]
    # The first completion imports what completes.
    assert eventually(lambda: "kept" in session.complete("ke", 2).get("matches", []), 60)
    notes = session.restart(1)
    assert "rank 1 is replaced, with copies of rank 0's names" in notes[0]
    assert "rank 2 is still in an earlier cell" in notes[1] and "restart --rank 2`" in notes[1]
    notes = session.restart([2])
    assert len(notes) == 1 and "rank 2 is replaced, with copies of rank" in notes[0]
    assert printed(session.run("print(kept, rank)").wait()) == [f"5 {rank}" for rank in range(4)]


def test_a_cluster_lost_while_a_rank_is_stuck_is_lost_once(session: Session) -> None:
    session.stop()
    session.start(2)
    hold(session, (1,))
    client = session._upkeep.present
    assert client is not None
    os.kill(client.link.pid, signal.SIGKILL)
    with pytest.raises(ClusterLost, match="starts a new cluster"):
        session.run("1")
    assert session.engines == 0 and session.status().engines == 0
    with pytest.raises(ValueError, match="there is no rank 1: no engines run"):
        session.restart(1)
    assert printed(session.run("print(rank)", "dp=4").wait()) == ["0", "1", "2", "3"]


def test_one_command_mends_all_ranks_that_are_stuck(session: Session) -> None:
    hold(session, (0, 1, 2, 3))
    assert session.names() == {}
    notes = session.restart(0)
    assert "rank 0 is replaced and empty: no other rank is free" in notes[0]
    assert "restart --rank 1,2,3`" in notes[1]
    notes = session.restart([1, 2, 3])
    assert "ranks 1, 2, 3 are replaced and empty: no other rank has names" in notes[0] and len(notes) == 1
    run = session.run("if rank == 2: kept = 6\nprint(kept)").wait()
    assert [run.text(rank) for rank in (1, 2)] == ["", "6\n"]
    hold(session, (0, 1, 2, 3))
    assert session.restart([0, 1, 2, 3])[0].startswith("all ranks are new and empty")
    assert printed(session.run("print(rank)").wait()) == ["0", "1", "2", "3"]


def test_a_name_of_an_empty_rank_is_explained(session: Session) -> None:
    hold(session, (0, 1, 2, 3))
    session.restart(3)
    session.restart([0, 1, 2])
    run = session.run("if rank: kept = 1\nprint(kept)").wait()
    assert "kept is not on rank 0, which was replaced" in run.errors[0].evalue
    assert any("kept is not on rank 0" in line for line in run.errors[0].traceback)


def test_a_frozen_rank_does_not_answer_and_nobody_waits_for_it(session: Session) -> None:
    assert session.run("kept = 5").wait().status == "ok"
    pid = session.status().members[0][1]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not session.doing()[0].answers
        assert sorted(session.names()) == [1, 2, 3]
        assert eventually(lambda: "kept" in session.complete("ke", 2).get("matches", []), 60)
        notes = session.restart(3)
        assert "with copies of rank 1's names" in notes[0] and "rank 0 is still" in notes[1]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert printed(session.run("print(kept)").wait()) == ["5"] * 4


def test_deaths_that_a_cell_or_a_restart_has_told_of_are_old(session: Session) -> None:
    session.run("1").wait()
    session.run("import os\nif rank == 1: os._exit(3)").wait()
    state = session.status()
    assert [death.how for death in state.deaths[state.told:]] == ["exit code 3"]
    session.run("1").wait()
    state = session.status()
    assert state.told == len(state.deaths) > 0
    session.restart(1)
    state = session.status()
    assert state.told == len(state.deaths)
