"""Stop, errors and hangs: every cell ends, variables stay, the next cell runs."""
from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ALL

from colossal_nb.cluster.client import RankFailed
from colossal_nb.cluster.door import Door
from colossal_nb.run import Run
from colossal_nb.session import Session

REDUCE = "World.current().whole().run('all_reduce', [ones.clone()])"
CHECK = "total = ones.clone()\nWorld.current().whole().run('all_reduce', [total])\nprint(total.item(), kept)"
LIMIT_S = 20.0                # a hang; what should take a fraction of a second may take some on a busy machine


@pytest.fixture(autouse=True)
def usable(session: Session) -> Iterator[None]:
    """Before and after each test: variables are there, a collective gives the right sum."""
    run = session.run("import time, torch\nfrom colossal_nb.parallel.world import World\n"
                      "ones = torch.ones(1)\nkept = 100 + rank").wait()
    assert run.status == "ok", run.errors
    yield
    run = session.run(CHECK).wait()
    assert run.status == "ok", run.errors
    assert [run.text(rank) for rank in ALL] == [f"4.0 {100 + rank}\n" for rank in ALL]


def stopped(session: Session, source: str, after_s: float = 0.7) -> tuple[Run, float]:
    """Run it, press Stop after a moment; returns the run and how long the end took from there."""
    run = session.run(source)
    begin = time.monotonic()
    timer = threading.Timer(after_s, session.interrupt)
    timer.start()
    run.wait()
    timer.join()
    return run, time.monotonic() - begin - after_s


@pytest.mark.parametrize("source", [
    "while True: pass",
    "time.sleep(100)",
    "import asyncio\nawait asyncio.sleep(100)",
    "a = torch.rand(200, 200)\nwhile True: a @ a",
    f"if rank != 2: {REDUCE}\ntime.sleep(100)",
    f"while True: {REDUCE}",
    "World.current().whole().run('recv', [ones.clone()], peer=(rank + 1) % 4)",
    "if rank == 0: World.current().whole().wire()\ntime.sleep(100)",
], ids=["python", "sleep", "await", "matmul", "missing", "training", "cycle", "connecting"])
def test_stop_ends_it_with_a_keyboard_interrupt_on_every_rank(session: Session, source: str) -> None:
    run, took_s = stopped(session, source)
    assert run.status == "interrupted"
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
    assert all(error.line is not None for error in run.errors.values())
    assert took_s < LIMIT_S


def test_stop_in_a_collective_that_had_worked_before(session: Session) -> None:
    for _ in range(3):
        run, _took_s = stopped(session, f"{REDUCE}\nif rank != 1: {REDUCE}\nelse: time.sleep(100)")
        assert {error.ename for error in run.errors.values()} == {"KeyboardInterrupt"}
        assert session.run(CHECK).wait().text(3) == "4.0 103\n"


def test_the_users_own_handler_runs_also_out_of_a_collective(session: Session) -> None:
    run, _took_s = stopped(session, "caught = ''\ntry:\n    if rank: " + REDUCE + "\n    time.sleep(100)\n"
                                    "except KeyboardInterrupt:\n    caught = 'yes'\nprint(caught)")
    assert run.status == "ok"
    assert [run.text(rank) for rank in ALL] == ["yes\n"] * 4


def test_sigint_in_the_main_thread_is_a_stop(session: Session) -> None:
    run = session.run("time.sleep(100)")
    timer = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run.wait()
    assert run.status == "interrupted"
    with pytest.raises(KeyboardInterrupt):             # and between cells it is what it was
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_stop_while_the_cell_is_sent_reaches_all_ranks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised half way, it would leave a cell on some ranks that nobody looks after."""
    send = Door.send

    def pressed(door: Door, *given: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return send(door, *given)

    monkeypatch.setattr(Door, "send", pressed)
    run = session.run("time.sleep(100)").wait()
    monkeypatch.undo()
    assert run.status == "interrupted"
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")


def test_a_cell_whose_run_nobody_looks_at_is_never_sent(session: Session) -> None:
    left = session.run("kept = 'by mistake'")
    assert session.run("print(kept == 100 + rank)").wait().text(2) == "True\n"
    with pytest.raises(RankFailed, match="never sent"):
        left.wait()


def test_an_interrupt_while_idle_harms_nothing(session: Session) -> None:
    session.interrupt()
    run = session.run("print('still here')").wait()
    assert run.status == "ok"
    assert [run.text(rank) for rank in ALL] == ["still here\n"] * 4


def test_a_second_press_ends_a_slow_handler(session: Session) -> None:
    run = session.run("try:\n    time.sleep(100)\nfinally:\n    time.sleep(50)")
    timers = [threading.Timer(after_s, session.interrupt) for after_s in (0.5, 1.2)]
    for timer in timers:
        timer.start()
    begin = time.monotonic()
    run.wait()
    assert run.status == "interrupted"
    assert {error.ename for error in run.errors.values()} == {"KeyboardInterrupt"}
    assert time.monotonic() - begin < LIMIT_S


def test_the_prompt_comes_back_from_native_code_and_the_rank_is_waited_for(session: Session) -> None:
    native = "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(7)\nelse: time.sleep(100)"
    run, _took_s = stopped(session, native)            # PyDLL keeps the interpreter locked: nothing can land
    assert run.status == "interrupted"
    assert run.errors[1].ename == "StillRunning"
    assert "restart --rank 1" in run.errors[1].evalue
    assert {run.errors[rank].ename for rank in (0, 2, 3)} == {"KeyboardInterrupt"}
    with pytest.raises(RankFailed, match="rank 1 is still in an earlier cell"):
        session.run("1")
    deadline = time.monotonic() + 30
    while True:
        try:
            assert session.run("print('back')").wait().text(1) == "back\n"
            break
        except RankFailed:
            assert time.monotonic() < deadline


def test_a_time_limit(session: Session) -> None:
    run = session.run(f"if rank: {REDUCE}\ntime.sleep(100)", timeout_s=0.8).wait()
    assert run.status == "error"
    assert {error.ename for error in run.errors.values()} == {"TimeoutError"}
    assert "0.8 s" in run.errors[0].evalue


def test_those_who_wait_for_a_rank_that_failed_are_released(session: Session) -> None:
    run = session.run(f"if rank == 1: raise ValueError('first')\n{REDUCE}").wait()
    assert run.status == "error"
    error = run.error
    assert error is not None
    assert (error.rank, error.ename, error.consequence) == (1, "ValueError", False)
    others = {rank: (each.ename, each.consequence) for rank, each in run.errors.items() if rank != 1}
    assert others == dict.fromkeys((0, 2, 3), ("Released", True))
    assert "rank 1 raised ValueError: first" in run.errors[0].evalue
    assert all(each.line == 2 for rank, each in run.errors.items() if rank != 1)


def test_ranks_that_compute_run_on_after_an_error(session: Session) -> None:
    run = session.run("if rank == 1: raise ValueError('first')\ntime.sleep(2.5)\ndone = 'yes'\nprint(done)").wait()
    assert sorted(run.errors) == [1]
    assert [run.text(rank) for rank in ALL] == ["yes\n", "", "yes\n", "yes\n"]


def test_a_proven_hang_ends_itself_and_says_who_waits_for_whom(session: Session) -> None:
    run = session.run(f"if rank != 3: {REDUCE}").wait()
    assert run.status == "error"
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys((0, 1, 2), "Deadlock")
    assert "ranks 0, 1, 2 wait in all_reduce #" in run.errors[0].evalue
    assert "(cell line 1)" in run.errors[0].evalue
    assert "rank 3 finished the cell" in run.errors[0].evalue
    assert run.seconds >= 10


# What a transport does that loses a message: all ranks have come, and the operation never ends.
LOSING = """
class Lost:
    def is_completed(self): return False
    def wait(self):
        while True:
            World.current()._epoch.check()
            time.sleep(0.01)
wire = World.current().whole().wire()
wire.barrier = Lost
World.current().whole().run('barrier', [])
"""


def test_an_operation_to_which_all_have_come_and_that_never_ends_is_ended(
        session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossal_nb.session.loop.LOST_AFTER_S", 2.0)
    run = session.run(LOSING).wait()
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "Deadlock")
    assert "ranks 0, 1, 2, 3 wait in barrier #" in run.errors[0].evalue
    assert "so the connection has lost it: run the cell again" in run.errors[0].evalue


DIFFERENT = (
    "World.current().whole().run(['all_reduce', 'broadcast', 'all_reduce', 'barrier'][rank],"
    " [] if rank == 3 else [torch.ones([1, 5, 4000, 1][rank])])\ntime.sleep(100)"
)
MODEL = """import colossal_nb as cnb
torch.manual_seed(0)
model = cnb.models.MLP(features=8, hidden=16, classes=4, layers=4)
model, optimizer = cnb.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
x, y = torch.randn(8, 8), torch.arange(8) % 4
def step(): return cnb.forward_backward(model, torch.nn.functional.cross_entropy, x, y)
step()
"""


@pytest.mark.parametrize("before", ["", f"{REDUCE}\nWorld.current().whole().run('barrier', [])\n"], ids=["new", "used"])
def test_different_collectives_end_the_cell_by_themselves(session: Session, before: str) -> None:
    session.run("1 / 0").wait()                        # new groups
    run = session.run(before + DIFFERENT).wait()
    assert run.status == "error"
    assert sorted(run.errors) == [0, 1, 2, 3]
    assert run.error is not None
    assert run.error.ename == "Mismatch"
    assert "the ranks of a group call different operations: rank 0 " in run.error.evalue
    assert not run.error.consequence


@pytest.mark.parametrize("strategy", ["dp=4", "tp=4", "tp=2 pp=2"])
@pytest.mark.parametrize("odd", [
    "if rank == 1:\n    with torch.no_grad(): model(x)\nfor _ in range(3): step()",
    "if rank == 1: step()\nwith torch.no_grad(): model(x)\nstep()",
    "if rank != 2: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nstep()\nstep()",
    "if rank == 0: print(len(model.state_dict()))\nstep()",
], ids=["one-evaluates", "one-trains", "one-does-not-clip", "one-saves"])
def test_ranks_that_part_inside_a_parallel_model_lose_nothing(
        session: Session, monkeypatch: pytest.MonkeyPatch, strategy: str, odd: str) -> None:
    monkeypatch.setattr("colossal_nb.session.loop.DEADLOCK_AFTER_S", 3.0)
    pids = [pid for _, pid, _ in session.status().members]
    assert session.run(MODEL, strategy).wait().status == "ok"
    run = session.run(odd, timeout_s=100).wait()       # ends by itself: a mismatch at once, a circle after a while
    whole_everywhere = strategy == "dp=4" and "state_dict" in odd        # nobody is asked for anything
    assert run.status == ("ok" if whole_everywhere else "error")
    assert {error.ename for error in run.errors.values()} <= {"Mismatch", "Released", "Deadlock", "ValueError"}
    assert [pid for _, pid, _ in session.status().members] == pids
    run = session.run("loss = step().item()\nprint(loss)").wait()
    assert run.status == "ok", run.errors
    assert len({run.text(rank) for rank in ALL}) == 1


def test_a_wait_for_one_who_computes_is_never_ended(session: Session) -> None:
    run = session.run(f"if rank == 0: time.sleep(3)\n{REDUCE}\nprint('together')").wait()
    assert run.status == "ok"
    assert [run.text(rank) for rank in ALL] == ["together\n"] * 4


def test_hang_interrupt_sum_again_and_again(session: Session) -> None:
    for turn in range(5):
        run, _took_s = stopped(session, f"if rank != {turn % 4}: {REDUCE}\ntime.sleep(100)", after_s=0.3)
        assert run.status == "interrupted"
        assert [session.run(CHECK).wait().text(rank) for rank in ALL] == [f"4.0 {100 + rank}\n" for rank in ALL]


def test_stop_while_groups_are_made_leaves_nobody_waiting_for_the_groups_before(session: Session) -> None:
    """The connections of the user's group are made in the background, by a thread that outlives the cell."""
    for turn in range(12):
        source = "if rank: torch.distributed.barrier()\ntime.sleep(100)"
        run, _took_s = stopped(session, source, after_s=0.05 + turn / 40)
        assert run.status == "interrupted"
        run = session.run(CHECK, timeout_s=LIMIT_S).wait()
        assert [run.text(rank) for rank in ALL] == [f"4.0 {100 + rank}\n" for rank in ALL], run.errors
