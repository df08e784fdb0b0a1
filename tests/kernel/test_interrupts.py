"""One Stop ends the cell wherever it lands, and only the user's own handler may go on after it."""
from __future__ import annotations

import threading
import time

import pytest
from conftest import ALL, printed
from test_stop import LIMIT_S, stopped

from colossal_nb.run import Run
from colossal_nb.session import Session

BUSY = "end = time.perf_counter() + 0.02\n    while time.perf_counter() < end: pass"
SWALLOWERS = {
    "weakref": f"def gone(_):\n    {BUSY}\nwhile True:\n    it = Thing(); r = weakref.ref(it, gone); del it",
    "finalizer": f"def gone():\n    {BUSY}\nwhile True:\n    it = Thing(); weakref.finalize(it, gone); del it",
    "del": f"def gone(self):\n    {BUSY}\nThing.__del__ = gone\nwhile True:\n    it = Thing(); del it",
    "gc": f"def called(phase, info):\n    {BUSY}\ngc.callbacks.append(called)\n"
          "try:\n    while True: gc.collect(0)\nfinally: gc.callbacks.remove(called)",
    "library": "library = {}\n"
               "exec(compile('def quiet(f):\\n  try: f()\\n  except: pass', threading.__file__, 'exec'), library)\n"
               "library['quiet'](lambda: time.sleep(100))\nwhile True: pass",
}
IMPORTS = "import contextlib, gc, io, sys, threading, time, weakref\nclass Thing: pass\n"


def pressed(session: Session, source: str, *after_s: float) -> Run:
    """Run it with a press at each of these times."""
    run = session.run(IMPORTS + source)
    timers = [threading.Timer(each, session.interrupt) for each in after_s]
    for timer in timers:
        timer.start()
    run.wait()
    for timer in timers:
        timer.join()
    return run


@pytest.mark.parametrize("where", SWALLOWERS)
def test_one_press_is_enough_where_python_or_a_library_swallows_it(session: Session, where: str) -> None:
    for _ in range(3):
        run, took_s = stopped(session, IMPORTS + SWALLOWERS[where])
        assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
        assert took_s < LIMIT_S
        assert run.text(name="stderr") == ""           # no "Exception ignored in"


def test_the_users_own_handler_may_go_on(session: Session) -> None:
    run = pressed(session, "try:\n    time.sleep(100)\nexcept KeyboardInterrupt: pass\n"
                           "for _ in range(15): time.sleep(0.1)\nprint('went on')", 0.7)
    assert run.status == "ok", run.errors
    assert printed(run) == ["went on"] * 4


def test_a_handler_around_a_library_is_the_users_too(session: Session) -> None:
    run = pressed(session, "with contextlib.suppress(KeyboardInterrupt):\n    threading.Event().wait(100)\n"
                           "for _ in range(15): time.sleep(0.1)\nprint('went on')", 0.7)
    assert run.status == "ok", run.errors
    assert printed(run) == ["went on"] * 4


def test_a_double_press_is_one_and_does_not_break_the_clean_up(session: Session) -> None:
    run = pressed(session, "try:\n    time.sleep(100)\nfinally:\n    time.sleep(1)\n    print('cleaned')", 0.7, 0.76)
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
    assert printed(run) == ["cleaned"] * 4


@pytest.mark.parametrize("gap_s", [0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.35])
def test_nothing_lands_while_the_first_is_reported(session: Session, gap_s: float) -> None:
    for source in ("while True: pass", "def deep(n): return deep(n - 1) if n else time.sleep(100)\ndeep(500)"):
        run = pressed(session, source, 0.5, 0.5 + gap_s)
        assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
        assert run.text() + run.text(name="stderr") == ""
        assert session.run("print(rank)").wait().status == "ok"


def test_a_stream_that_was_redirected_is_what_it_was(session: Session) -> None:
    source = IMPORTS + "while True:\n    with contextlib.redirect_stdout(io.StringIO()): pass"
    for _ in range(4):
        run, _took_s = stopped(session, source, after_s=0.3)
        assert run.status == "interrupted"
        assert printed(session.run("print('heard')").wait()) == ["heard"] * 4


def test_what_the_cell_has_started_hears_a_stop(session: Session) -> None:
    run, _took_s = stopped(session, "import subprocess\nsubprocess.run('sleep 987; true', shell=True)")
    assert run.status == "interrupted"
    time.sleep(0.5)
    run = session.run("print(subprocess.run(['pgrep', '-s', '0', '-x', 'sleep'], capture_output=True, text=True)"
                      ".stdout)").wait()
    assert printed(run) == [""] * 4, run.errors


def test_an_interrupt_that_the_cell_sends_to_itself(session: Session) -> None:
    run = session.run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(100)").wait()
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")


def test_cells_that_are_stopped_one_right_after_the_other(session: Session) -> None:
    for _ in range(6):
        run, _took_s = stopped(session, "while True: pass", after_s=0.05)
        assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")


def test_a_question_to_the_supervisor_is_never_left_half_asked(session: Session) -> None:
    """A message half sent would spoil the next one, whose answer would never come."""
    source = "from colossal_nb.parallel.world import World\nstore = World.current().store\n"
    for turn in range(4):
        run, took_s = stopped(session, f"{source}while True: store.check(['k'])", after_s=0.3 + turn / 100)
        assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
        assert took_s < LIMIT_S
        asked = f"{source}store.set(f'{{rank}}', 'v')\nprint(store.get(f'{{rank}}'))"
        run = session.run(asked, timeout_s=LIMIT_S).wait()
        assert printed(run) == ["b'v'"] * 4, run.errors
