"""A save in the background of a notebook's ranks: told where it fails, stopped, ended with the ranks."""
from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import torch
from conftest import eventually

import colossal_nb as cnb
from colossal_nb.notebook.files import written_together
from colossal_nb.run import Run
from colossal_nb.session import Session

SETUP = """
import resource, threading, torch, colossal_nb as cnb
from colossal_nb.parallel.saving.background import Saving
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
model = cnb.parallelize(model)
go, pause = threading.Event(), Saving._pause
"""


def ok(session: Session, source: str, strategy: str | None = None, ranks: tuple[int, ...] | None = None) -> Run:
    run = session.run(source, strategy, ranks=ranks).wait()
    assert run.status == "ok", {rank: (error.ename, error.evalue) for rank, error in run.errors.items()}
    return run


def load(path: Path) -> object:
    return cnb.load(path, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))


def test_a_save_in_the_background(tmp_path: Path) -> None:
    path, session = tmp_path / "run", Session()
    others = psutil.Process().children(recursive=True)  # of other tests
    session.start(2)
    try:
        ok(session, SETUP, "dp=2")
        run = ok(session, f"path = {str(path)!r}\ncnb.save(path, model, step=1)\ncnb.load(path, model);")
        assert written_together(run) == ""             # of the lock that both ranks take, the user knows nothing
        run = ok(session, "cnb.save(path, model, step=1)\nopen(path + '.lock', 'w').close()")
        assert "ranks 0,1 wrote the same file run.lock:" in written_together(run)
        run = ok(session, "limits = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
                          "if rank == 0: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))\n"
                          "saving = cnb.save(path, model, wait=False, step=2)")
        told = [*run.notes]                            # of the cell in which it failed
        told += ok(session, "saving.join(); resource.setrlimit(resource.RLIMIT_FSIZE, limits)").notes
        assert any("failed on rank 0" in note for note in told), told
        assert load(path) == {"step": 1}

        ok(session, "Saving._pause = lambda self: go.wait() and None\n"
                    "saving = cnb.save(path, model, wait=False, step=3)")
        run = session.run("saving.wait()")
        timer = threading.Timer(0.5, session.interrupt)
        timer.start()
        run.wait()
        timer.join()
        assert {error.ename for error in run.errors.values()} == {"KeyboardInterrupt"}
        ok(session, "go.set(); saving.wait()")         # the press was for the wait, not for the save
        assert load(path) == {"step": 3}

        ok(session, "go.clear()\nsaving = cnb.save(path, model, wait=False, step=4)")
        started = [each for each in psutil.Process().children(recursive=True) if each not in others]
        assert started
    finally:
        session.stop()
    begin = time.monotonic()
    assert eventually(lambda: not any(each.is_running() for each in started)), started
    assert time.monotonic() - begin < 10
    assert load(path) == {"step": 3}


def test_who_waits_for_a_save_is_freed_when_a_rank_is_lost(tmp_path: Path) -> None:
    path, session = tmp_path / "run", Session()
    session.start(2)
    try:
        ok(session, SETUP, "dp=2")
        ok(session, f"path = {str(path)!r}\ncnb.save(path, model, step=1)")
        begin = time.monotonic()
        run = session.run("import os\nif rank == 1: Saving._pause = lambda self: go.wait() and None\n"
                          "saving = cnb.save(path, model, wait=False, step=2)\n"
                          "if rank == 1: os.kill(os.getpid(), 9)\nsaving.wait()").wait()
        assert {rank: error.ename for rank, error in run.errors.items()} == {0: "Released", 1: "RankDied"}
        assert time.monotonic() - begin < 20
        told = [*run.notes, *ok(session, "saving.join()", ranks=(0,)).notes]
        assert any("rank 1 was lost before its part was written" in note for note in told), told
        assert load(path) == {"step": 1}
    finally:
        session.stop()
