"""Output without an end: it can be stopped, it takes no memory; and output with an end arrives whole."""
from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import ALL, Notebook
from test_stop import stopped

from colossal_nb.run import MOST_TEXT
from colossal_nb.session import Session

MIB = 1 << 20
RAW = 'import os\nwhile True: os.write(1, b"raw flood\\n" * 50)'
LIMIT_S = 20.0


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def controller_of(session: Session) -> int:
    client = session._upkeep.present
    assert client is not None
    children = Path(f"/proc/{client.link.pid}/task/{client.link.pid}/children").read_text().split()
    return next(int(pid) for pid in children if "cluster.controller" in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.mark.parametrize("source", [
    RAW,
    "while True: print('flood' * 20, rank)",
    "while True: print('no line end ', end='')",
    "import subprocess\nsubprocess.run('yes', shell=True)",
    "from IPython.display import display\nwhile True: display('x' * 10_000)",
], ids=["raw", "print", "no-line-end", "child", "display"])
def test_a_flood_is_stopped(session: Session, source: str) -> None:
    run, took_s = stopped(session, source, after_s=1.5)
    assert run.status == "interrupted"
    assert {rank: error.ename for rank, error in run.errors.items()} == dict.fromkeys(ALL, "KeyboardInterrupt")
    assert took_s < LIMIT_S
    assert [session.run("print(rank)").wait().text(rank) for rank in ALL] == [f"{rank}\n" for rank in ALL]


def test_what_nobody_reads_is_not_piled_up_on_the_way(session: Session) -> None:
    session.start(4)
    pids = [controller_of(session), *(pid for _, pid, _ in session.status().members)]
    before = [resident_bytes(pid) for pid in pids]
    run = session.run(RAW)
    time.sleep(3)                                      # the kernel does something else; each rank could write 100 MB
    grown = [resident_bytes(pid) - old for pid, old in zip(pids, before, strict=True)]
    run.stop()
    run.wait()
    assert max(grown) < 40 * MIB, grown


@pytest.mark.parametrize("source", [
    "for i in range(10_000): os.write(1, f'{rank} {i} é\\n'.encode())",
    "subprocess.run(['seq', '-f', f'{rank} %g é', '0', '9999'])",
    "for i in range(10_000): print(rank, i, 'é')",
], ids=["raw", "child", "print"])
def test_a_flood_that_ends_arrives_whole_in_its_own_cell(session: Session, source: str) -> None:
    run = session.run(f"import os, subprocess\n{source}\nNone").wait()
    assert run.status == "ok", run.errors
    for rank in ALL:
        assert run.text(rank).splitlines() == [f"{rank} {i} é" for i in range(10_000)]
    assert run.left_out == {}


def test_a_run_keeps_the_beginning_and_the_end_of_a_flood(session: Session) -> None:
    lines = MOST_TEXT // 4 * 2 // 100                  # twice what is kept, on one rank
    run = session.run(f"if rank == 1:\n    for i in range({lines}): print(f'{{i:099}}')").wait()
    assert run.status == "ok", run.errors
    text = run.text(1)
    assert text.startswith(f"{0:099}\n")
    assert text.endswith(f"{lines - 1:099}\n")
    assert len(text) + run.left_out[1] == lines * 100
    assert len(text) <= MOST_TEXT // 4 * 1.3
    assert any("of rank 1 the middle is not in cnb.last_run.outputs" in note for note in run.notes)


def test_a_notebook_is_stopped_in_a_flood(notebook: Notebook) -> None:
    notebook.ok("import os, signal, threading\n"
                "def press(after_s): threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()")
    for source in (RAW, "while True: print('no line end ', end='')"):
        begin = time.monotonic()
        notebook.ok("press(3)")
        reply = notebook.run(f"%%colossal dp=4\n{source}", LIMIT_S * 2)
        assert reply.ename == "KeyboardInterrupt", reply.error
        assert "StillRunning" not in reply.error
        assert time.monotonic() - begin < LIMIT_S * 2
        assert notebook.ok("%%colossal\nprint('next')").stream().startswith("next")
