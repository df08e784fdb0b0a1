"""The five paths in a minute: a cell, a tensor's bytes, a collective, an interrupt, a death. Two ranks, no notebook."""

import threading
from collections.abc import Iterator

import pytest

from colossal_nb import session
from colossal_nb.run import Run
from colossal_nb.session import Session

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    mine = session.current()
    mine.start(2)
    yield mine
    mine.stop()


def cell(mine: Session, source: str, strategy: str | None = None) -> Run:
    run = mine.run(source, strategy, timeout_s=60)
    return run.wait()


def test_a_cell(two):
    run = cell(two, "x = 10 * rank\nprint('I am', rank, 'of', world_size)")
    assert run.status == "ok"
    assert [run.text(rank) for rank in (0, 1)] == ["I am 0 of 2\n", "I am 1 of 2\n"]
    assert [cell(two, "print(x)").text(rank) for rank in (0, 1)] == ["0\n", "10\n"]


def test_the_bytes_of_a_tensor(two):
    """An MLP of 8 -> 16 -> 4 has (8*16 + 16) + (16*4 + 4) = 212 float32 parameters: 848 bytes on every replica."""
    source = (
        "import torch, colossal_nb as cnb\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = cnb.parallelize(model, optimizer)\n"
        "loss = cnb.forward_backward(model, torch.nn.functional.mse_loss, torch.ones(4, 8), torch.zeros(4, 4))\n"
        "optimizer.step()\n"
    )
    run = cell(two, source, "dp=2")
    assert run.status == "ok", run.errors
    memory = run.record.memory
    for rank in (0, 1):
        mine = memory[memory["rank"] == rank]
        peaks = [int(mine[name].max()) for name in ("parameter", "gradient", "optimizer")]
        assert peaks == [848, 848, 0]
        assert int(mine["parameter"][-1]) == 848


def test_a_collective(two):
    """1000 float32 numbers are 4000 bytes, whatever travels on the wire."""
    source = "import torch\nones = torch.ones(1000)\ntorch.distributed.all_reduce(ones)\nprint(ones.sum().item())"
    run = cell(two, source)
    assert run.status == "ok", run.errors
    assert [run.text(rank) for rank in (0, 1)] == ["2000.0\n", "2000.0\n"]
    slices = run.record.slices
    reduced = slices[slices["kind"] == "all_reduce"]
    assert sorted(reduced["rank"].tolist()) == [0, 1]
    assert reduced["payload_bytes"].tolist() == [4000, 4000]


def test_an_interrupt(two):
    """One rank loops in Python, the other waits for it in a collective; both come back with their variables."""
    cell(two, "kept = 7 + rank")
    source = (
        "import torch\nprint('in', flush=True)\n"
        "if rank == 0:\n    while True: pass\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
    )
    run = two.run(source, timeout_s=60)
    running, pressed = set(), False
    for message in run:
        if getattr(message, "text", "").startswith("in"):
            running.add(message.rank)
        if running == {0, 1} and not pressed:
            pressed = True
            threading.Timer(0.3, two.interrupt).start()
    assert run.status == "interrupted"
    assert {error.ename for error in run.errors.values()} <= {"KeyboardInterrupt"}
    after = cell(two, "import torch\nt = torch.tensor([kept])\ntorch.distributed.all_reduce(t)\nprint(kept, t.item())")
    assert [after.text(rank) for rank in (0, 1)] == ["7 15\n", "8 15\n"]


def test_a_death(two):
    """Rank 1 is gone in the middle of a cell: the run says so, rank 0 does not wait for it, the next cell runs."""
    source = (
        "import os, signal, torch\n"
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
    )
    run = cell(two, source)
    assert run.status == "error"
    assert run.error is not None
    assert run.error.rank == 1
    two.restart(1)
    after = cell(two, "import torch\nt = torch.ones(1)\ntorch.distributed.all_reduce(t)\nprint(t.item())")
    assert after.status == "ok", after.errors
    assert [after.text(rank) for rank in (0, 1)] == ["2.0\n", "2.0\n"]
