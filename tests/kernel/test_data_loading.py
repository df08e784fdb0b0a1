"""Data in a notebook's ranks: DataLoader workers come and go, and nothing of them is left."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from conftest import ALL, eventually

from colossal_nb.run import Run
from colossal_nb.session import Session

SETUP = """
import os, time, torch, colossal_nb as cnb
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __init__(self, slow_s=0, bad=-1):
        self.slow_s, self.bad = slow_s, bad
    def __len__(self): return 16
    def __getitem__(self, index):
        time.sleep(self.slow_s)
        if index == self.bad:
            raise LookupError(f"no number {index}")
        return torch.tensor([float(index)]), torch.rand(1)
"""


@pytest.fixture(autouse=True)
def usable(session: Session) -> Iterator[None]:
    """Before and after each test: no process but the ranks' own; a cell runs."""
    ok(session, SETUP)
    before = started()
    yield
    assert eventually(lambda: started() <= before), [psutil.Process(each).cmdline() for each in started() - before]
    assert [run.strip() for run in texts(ok(session, "print(rank)"))] == [str(rank) for rank in ALL]


def started() -> set[int]:
    """Processes below this one, but torch's one helper per rank, which outlives the workers that it has started."""
    children = psutil.Process().children(recursive=True)
    return {each.pid for each in children if "multiprocessing" not in " ".join(_command(each))}


def _command(process: psutil.Process) -> list[str]:
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:
        found = []
    return found


def ok(session: Session, source: str, strategy: str | None = None) -> Run:
    run = session.run(source, strategy).wait()
    assert run.status == "ok", {rank: (error.ename, error.evalue) for rank, error in run.errors.items()}
    return run


def texts(run: Run) -> list[str]:
    return [run.text(rank) for rank in ALL]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_plain_loaders_give_all_ranks_the_same(session: Session, context: str) -> None:
    data = "Numbers()"
    if context == "spawn":                             # a new process cannot find what a cell defines
        data = "torch.utils.data.TensorDataset(torch.arange(16.)[:, None], torch.arange(16.)[:, None] / 2)"
    run = ok(session, f"""
seeds = []
def remember(worker): torch.manual_seed(torch.initial_seed() % 1000)
loader = DataLoader({data}, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True,
                    worker_init_fn=remember if {context == "fork"} else None, multiprocessing_context={context!r})
for epoch in range(2):
    for x, y in loader: print(x.flatten().tolist(), [round(v, 6) for v in y.flatten().tolist()])
del loader
""")
    assert len(set(texts(run))) == 1
    lines = run.text(0).splitlines()
    assert len(lines) == 8
    assert lines[:4] != lines[4:]


def test_ours_reads_ahead_with_workers(session: Session) -> None:
    run = ok(session, """
torch.manual_seed(0)
model, loss_fn = torch.nn.Linear(1, 1), torch.nn.functional.mse_loss
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = cnb.parallelize(model, optimizer)
loader = cnb.loader(Numbers(), 4, shuffle=True, num_workers=2)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        print(cnb.forward_backward(model, loss_fn, x, y).item())
        optimizer.step()
""", "dp=4")
    assert len(set(texts(run))) == 1
    assert len(run.text(0).splitlines()) == 8


@pytest.mark.parametrize("made", ["DataLoader(Numbers(bad=9), batch_size=4, num_workers=2)",
                                  "cnb.loader(Numbers(bad=9), 4, num_workers=2)"])
def test_an_error_in_the_dataset_shows_where_it_is(session: Session, made: str) -> None:
    run = session.run(f"for x, y in {made}: x.sum()").wait()
    assert run.status == "error"
    assert {error.ename for error in run.errors.values()} == {"LookupError"}
    text = "\n".join([run.errors[0].evalue, *run.errors[0].traceback])
    assert "no number 9" in text
    assert "in __getitem__" in text


@pytest.mark.parametrize("made", ["DataLoader(Numbers(slow_s=0.1), num_workers=2, persistent_workers=True)",
                                  "cnb.loader(Numbers(slow_s=0.1), 1, num_workers=2)"])
def test_stop_while_workers_read(session: Session, made: str) -> None:
    run = session.run(f"loader = {made}\nwhile True:\n    for x, y in loader: print('batch', end=' ')")

    def press() -> None:
        eventually(lambda: "batch" in run.text(0), 30)
        time.sleep(0.2)
        session.interrupt()

    presser = threading.Thread(target=press)
    presser.start()
    run.wait()
    presser.join()
    assert run.status == "interrupted"
    assert {error.ename for error in run.errors.values()} == {"KeyboardInterrupt"}
    assert "Traceback" not in run.text(0, "stderr")
    ok(session, "del loader\nimport gc; gc.collect()")
