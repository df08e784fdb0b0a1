"""The folder that the user deletes, the kernel that ends before its cluster has begun, a thread that meddles."""
from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Notebook, eventually, printed
from test_processes import alive, directory_of, family

from colossal_nb.session import Session

BORN = """
import os, signal, sys, time
from colossal_nb.session import Session
session = Session()
session.warm()
time.sleep(float(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("after_s", [0.1, 0.4, 0.8])
def test_nothing_is_left_of_a_cluster_whose_kernel_ends_at_once(after_s: float, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", BORN, str(after_s)], env={**os.environ, "TMPDIR": str(tmp_path)}, check=False)

    def left() -> list[str]:
        return [command for each in Path("/proc").glob("[0-9]*/cmdline")
                if str(tmp_path) in (command := _read(each)) and alive({int(each.parent.name)})]

    assert eventually(lambda: not left(), 10.0), left()
    assert eventually(lambda: not list(tmp_path.glob("colossal_nb-*")))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_a_fork_server_whose_supervisor_is_killed_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                  ) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    session = Session()
    session.warm()
    client = session._upkeep.client()
    pids, directory = family(client.link.pid), client.link.directory
    os.kill(client.link.pid, signal.SIGKILL)           # the fork server imports torch now
    assert eventually(lambda: not alive(pids), 10.0)
    assert eventually(lambda: not directory.exists())
    session.stop()


def test_a_cluster_outlives_the_folder_in_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "beside.py").write_text("value = 7\n")
    monkeypatch.chdir(folder)
    session = Session()
    try:
        session.start(2)
        run = session.run("import os, beside\nprint(os.getcwd(), beside.value)").wait()
        assert printed(run) == [f"{folder} 7"] * 2, run.errors
        pids = family(os.getpid())
        servers = [pid for pid in pids if "engine.fork_server" in _read(Path(f"/proc/{pid}/cmdline"))]
        folders = {os.readlink(f"/proc/{pid}/cwd") for pid in servers}
        assert str(directory_of(session)) in folders
        shutil.rmtree(folder)
        run = session.run("import torch._dynamo\nprint(beside.value)").wait()
        assert printed(run) == ["7"] * 2, run.errors
        assert run.notes == [f"the folder of the ranks has been deleted; they are in {Path.home()} now"]
        with pytest.raises(FileNotFoundError, match=f"the folder {folder} no longer exists: %cd somewhere first"):
            session.start(3)
        session.stop()
        with pytest.raises(FileNotFoundError, match="no longer exists: %cd somewhere first"):
            session.start(2)
        monkeypatch.chdir(tmp_path)
        assert printed(session.run("import os\nprint(os.getcwd())", "dp=2").wait()) == [str(tmp_path)] * 2
    finally:
        monkeypatch.chdir("/")
        session.stop()


def test_a_thread_that_meddles_while_a_cell_runs_is_refused(notebook: Notebook) -> None:
    notebook.ok("%%colossal dp=2\nkept = 5")
    notebook.ok("import threading, time\nthread = threading.Thread(target=lambda: (time.sleep(1), "
                "get_ipython().run_line_magic('colossal', 'stop')))\nthread.start()")
    reply = notebook.ok("%%colossal\nimport time\ntime.sleep(3)\nprint('done', kept)")
    assert "done 5" in reply.stream()
    assert reply.size < 2000
    notebook.ok("thread.join()")
    assert "5" in notebook.ok("%%colossal\nprint(kept)").stream()


def test_a_press_while_a_verb_works_speaks_of_no_cell(notebook: Notebook) -> None:
    notebook.ok("%%colossal dp=2\nkept = 5")
    notebook.ok("import os, signal, threading\nthreading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()")
    reply = notebook.run("%colossal restart")
    assert (reply.ename, reply.evalue) == ("KeyboardInterrupt", "stopped")
    notebook.ok("%%colossal dp=2\nprint('next')")
