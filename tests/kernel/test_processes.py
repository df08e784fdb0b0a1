"""Processes: who is there, who replaces whom, and that nothing stays behind."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import eventually, printed

from colossal_nb.cluster.host import usable_cores
from colossal_nb.run import RankState
from colossal_nb.session import Session

REDUCE = "World.current().whole().run('all_reduce', [x])"
SUM = f"import torch\nfrom colossal_nb.parallel.world import World\nx = torch.ones(1)\n{REDUCE}\nprint(x.item(), rank)"


def family(pid: int) -> set[int]:
    """A process and all below it."""
    found, new = set(), {pid}
    while new:
        found |= new
        children: set[int] = set()
        for each in new:
            for task in Path(f"/proc/{each}/task").glob("*/children"):
                try:
                    children |= set(map(int, task.read_text().split()))
                except OSError:
                    continue
        new = children - found
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that are there and no zombies."""
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(pid)
    return found


def supervisor_of(session: Session) -> int:
    client = session._upkeep.present
    assert client is not None
    return client.link.pid


def directory_of(session: Session) -> Path:
    client = session._upkeep.present
    assert client is not None
    return client.link.directory


@pytest.fixture
def session() -> Iterator[Session]:
    """One for each test, and nothing started: these tests end what they start."""
    made = Session()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def shared() -> Iterator[Session]:
    made = Session()
    made.start(3)
    yield made
    made.stop()


def test_warm_returns_at_once_and_a_cell_sent_at_once_waits_for_the_start(session: Session) -> None:
    begin = time.monotonic()
    session.warm()
    assert time.monotonic() - begin < 0.5              # it starts processes in a thread; the start takes seconds
    assert session.engines == 0
    run = session.run(SUM, "dp=2").wait()
    assert printed(run) == ["2.0 0", "2.0 1"]
    assert session.engines == 2 and run.notes == []    # the first start is no news


def test_the_cluster_grows_with_copies_of_the_names_and_never_shrinks(session: Session) -> None:
    session.start(2)
    session.run("class Mine:\n    held = 5\nvalue = Mine()\nstream = (i for i in range(3))\nimport math").wait()
    run = session.run("print(rank, world_size, value.held, math.pi > 3)", "dp=4").wait()
    assert run.status == "ok", run.errors
    assert printed(run) == [f"{rank} 4 5 True" for rank in range(4)]
    assert any("ranks 2, 3 are new" in note and "stream (cannot be copied" in note for note in run.notes), run.notes
    grown = [note for note in run.notes if "has grown from 2 to 4 engines" in note]
    assert len(grown) == 1 and "for dp=4" in grown[0] and "`%colossal start -n 2` goes back" in grown[0], run.notes
    assert (" cores for" in grown[0] or " core for" in grown[0]) == (usable_cores() < 4)
    assert printed(session.run(SUM).wait()) == [f"4.0 {rank}" for rank in range(4)]
    run = session.run("print(rank)", "dp=2").wait()
    assert (run.ranks, session.engines) == ((0, 1), 4) and "grown" not in "".join(run.notes)


def test_parallel_objects_are_named_as_missing_on_a_new_rank(session: Session) -> None:
    session.start(1)
    session.run("import torch\nfrom colossal_nb.parallel.layouts import set_layout\n"
                "from colossal_nb.plan import Layout, Mesh, Replicate\nmodel = torch.nn.Linear(2, 2)\n"
                "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
                "for p in model.parameters():\n"
                "    set_layout(p, Layout(tuple(p.shape), 'float32', Mesh({}), (Replicate(),) * 4))\nplain = 3").wait()
    run = session.run("print(plain, 'model' in globals())", "dp=2").wait()
    assert printed(run) == ["3 True", "3 False"], run.errors
    assert any("model (is parallel)" in note and "optimizer (is parallel)" in note for note in run.notes), run.notes


def test_engine_ids_are_ranks_and_any_ipyparallel_client_may_look(shared: Session) -> None:
    ipyparallel = pytest.importorskip("ipyparallel")
    path = directory_of(shared) / "profile" / "security" / "ipcontroller-client.json"
    with ipyparallel.Client(str(path), timeout=30) as client:
        client.wait_for_engines(3, timeout=30, interactive=False)
        shared.run("number = rank").wait()
        assert client.ids == [0, 1, 2]
        assert [client[rank].pull("number", block=True) for rank in client.ids] == [0, 1, 2]
        assert client[1].apply_sync(os.getpid) == shared.status().members[1][1]
        client[:].execute("number += 10", block=True)
    assert [shared.pull("number", rank) for rank in range(3)] == [10, 11, 12]


@pytest.mark.parametrize(("source", "how"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    ("import os; os._exit(3)", "exit code 3")])
def test_a_death_is_named_the_others_released_the_rank_replaced(shared: Session, source: str, how: str) -> None:
    shared.run("kept = {'rank': rank}").wait()
    run = shared.run(f"print('last words', flush=True)\nif rank == 1:\n    import time; time.sleep(0.5)\n    {source}\n"
                     f"{SUM}")
    states = [message for message in run if isinstance(message, RankState)]
    assert run.status == "error"
    error = run.error
    assert error is not None
    assert (error.rank, error.ename) == (1, "RankDied")
    assert how in error.evalue
    assert "last words" in error.evalue
    assert {run.errors[rank].consequence for rank in (0, 2)} == {True}
    assert [state.rank for state in states if state.state == "dead"] == [1]
    assert any("rank 1 is replaced" in note for note in run.notes), run.notes
    assert printed(shared.run(SUM).wait()) == ["3.0 0", "3.0 1", "3.0 2"]
    assert [shared.pull("kept", rank) for rank in range(3)] == [{"rank": 0}, {"rank": 0}, {"rank": 2}]
    assert shared.status().deaths[-1].how == how


def test_a_death_between_cells_is_mended_before_the_next(shared: Session) -> None:
    shared.run("kept = 'yes'").wait()
    pid = shared.status().members[2][1]
    os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not alive({pid}) and shared.status().members[2][1:] != (pid, "ready"))
    run = shared.run(f"{SUM}\nprint(kept)").wait()
    assert run.status == "ok", run.errors
    assert printed(run) == ["3.0 0\nyes", "3.0 1\nyes", "3.0 2\nyes"]
    assert any("rank 2 is replaced" in note for note in run.notes), run.notes


def test_two_ranks_die_at_once(shared: Session) -> None:
    run = shared.run("import os\nif rank: os._exit(rank)\nimport time; time.sleep(0.2)").wait()
    assert sorted(run.errors) == [1, 2]
    assert printed(shared.run(SUM).wait()) == ["3.0 0", "3.0 1", "3.0 2"]


def test_a_rank_is_restarted_on_request(shared: Session) -> None:
    shared.run("kept = 1").wait()
    before = shared.status().members[0][1]
    notes = shared.restart(0)
    assert any("rank 0 is replaced" in note for note in notes)
    assert shared.status().members[0][1] != before
    assert printed(shared.run(SUM).wait()) == ["3.0 0", "3.0 1", "3.0 2"]
    assert shared.pull("kept", 0) == 1
    with pytest.raises(ValueError, match="there is no rank 7"):
        shared.restart(7)


def test_what_a_rank_started_ends_with_it(shared: Session) -> None:
    shared.run("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\npid = child.pid").wait()
    children = {shared.pull("pid", rank) for rank in range(3)}
    assert alive(children) == children
    shared.restart(1)
    assert eventually(lambda: len(alive(children)) == 2)


def test_the_environment_of_a_rank(shared: Session) -> None:
    cores = max(1, len(os.sched_getaffinity(0)) // 3)
    run = shared.run("import os, torch\nprint(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'],"
                     f" 1 <= torch.get_num_threads() <= {cores}, os.getsid(0) == os.getpid(),"
                     " os.umask(0o22))\nos.umask(0o22)")
    mask = os.umask(0o022)
    os.umask(mask)
    assert printed(run.wait()) == [f"{rank} {rank} 3 True True {mask}" for rank in range(3)]


def test_stop_is_silent_quick_and_complete(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    session.start(2)
    session.run("import subprocess\nchild = subprocess.Popen(['sleep', '1000'])").wait()
    supervisor, directory = supervisor_of(session), directory_of(session)
    pids = family(supervisor)
    assert len(pids) >= 7                              # supervisor, controller, fork server, two ranks and their own
    assert directory.stat().st_mode & 0o777 == 0o700
    secret = [path for path in directory.rglob("*") if path.suffix in (".json", ".log")]
    assert len(secret) >= 6                            # two connection files, four logs at least
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    session.stop()
    assert not alive({supervisor})
    assert eventually(lambda: not alive(pids)), alive(pids)
    assert not directory.exists()
    assert capfd.readouterr() == ("", "")
    assert session.status().engines == 0
    assert printed(session.run("print(rank)", "dp=2").wait()) == ["0", "1"]      # and it can start again


def test_restart_of_all(session: Session) -> None:
    session.start(2)
    session.run("gone = 1").wait()
    session.restart()
    assert session.engines == 2
    assert "gone" not in session.names()[1]


@pytest.mark.parametrize("victim", ["supervisor", "controller", "fork_server"])
def test_the_loss_of_a_process_that_all_need_is_named_and_the_next_cell_starts_anew(
        session: Session, victim: str) -> None:
    session.start(2)
    pids, directory = family(supervisor_of(session)), directory_of(session)
    run = session.run("import time; time.sleep(100)")
    next(iter(run))                                    # now it runs
    target = next(pid for pid in pids if f"colossal_nb.{'engine' if victim == 'fork_server' else 'cluster'}.{victim}"
                  in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                  and (victim != "fork_server" or pid not in {each[1] for each in session.status().members}))
    os.kill(target, signal.SIGKILL)
    run.wait()
    assert run.status == "error"
    assert {error.ename for error in run.errors.values()} <= {"ClusterLost", "RankDied", "Released"}
    said = [*run.notes, *{error.evalue for error in run.errors.values()}]
    assert len([text for text in said if "starts a new cluster" in text]) == 1, said
    assert "INFO" not in "".join(said)
    assert victim != "controller" or any("the controller ended (killed by SIGKILL)" in text for text in said)
    assert eventually(lambda: not alive(pids)), alive(pids)
    assert eventually(lambda: not directory.exists())
    assert printed(session.run("print(rank)").wait()) == ["0", "1"]      # as many as there were


def test_stop_while_the_cluster_ends_leaves_nothing_of_it() -> None:
    """Sockets left to the garbage collector would hold the kernel up for good, some cells later."""
    session = Session()
    session.start(1)
    client = session._upkeep.client()
    pids, directory = family(client.link.pid), client.link.directory
    close = client.link.close

    def pressed() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        close()

    client.link.close = pressed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.stop()
    assert client.link.context.closed and not directory.exists()
    assert eventually(lambda: not alive(pids)), alive(pids)
    assert session.status().engines == 0


OWNER = """
import os, signal, sys, time
from colossal_nb.session import Session
session = Session()
session.start(2)
client = session._upkeep.present
print(client.link.pid, client.link.directory, flush=True)
if sys.argv[1] == "running":
    for _ in session.run("import time; time.sleep(1000)"): pass
if sys.argv[1] == "exit":
    sys.exit()
time.sleep(1000)
"""


@pytest.mark.parametrize(("mode", "number"), [("idle", signal.SIGKILL), ("running", signal.SIGKILL),
                                              ("idle", signal.SIGTERM), ("exit", None)])
def test_nothing_is_left_when_the_kernel_ends(mode: str, number: int | None) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, mode], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, directory = owner.stdout.readline().split()
    pids = family(int(pid))
    if number is not None:
        time.sleep(0.5)
        owner.send_signal(number)
    owner.wait(timeout=30)
    assert eventually(lambda: not alive(pids)), alive(pids)
    assert eventually(lambda: not Path(directory).exists())


def test_two_sessions_do_not_interfere(session: Session, shared: Session) -> None:
    session.start(2)
    session.run("mine = 'a'").wait()
    shared.run("mine = 'b'").wait()
    run = shared.run("import time; time.sleep(1)\nprint(mine)")
    assert printed(session.run("print(mine)").wait()) == ["a", "a"]
    session.stop()
    assert printed(run.wait()) == ["b", "b", "b"]
    assert printed(shared.run(SUM).wait()) == ["3.0 0", "3.0 1", "3.0 2"]


def test_a_rank_that_cannot_start_is_named(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A broken site for the ranks alone: the fork server itself must come up.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'colossal_nb.engine.fork_server' in ' '.join(sys.orig_argv):\n"
        "    os.register_at_fork(after_in_child=lambda: os._exit(9))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"rank \d ended while it started \(exit code 9\)"):
        session.start(2)
