"""A save that is written while training goes on: what it holds, what can go wrong, who waits for whom."""

import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setup import save_trained, setup
from small_gpt import INPUTS, TARGETS, close, gpt, loss_fn, train

import colossal_nb as cnb
from colossal_nb.parallel.saving.background import Saving
from colossal_nb.parallel.saving.shards import Job
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Nothing is written before the event is set."""
    go, pause = threading.Event(), Saving._pause
    Saving._pause = lambda self: go.wait() and None  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        Saving._pause = pause  # type: ignore[method-assign]


def losses_after(steps: int) -> list[float]:
    """Of a run on one device that nobody saves, after the one step of `setup`."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(1 + steps):
        optimizer.zero_grad()
        loss = loss_fn(model(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[1:]


def trained_meanwhile(path: Path, strategy: str) -> tuple[list[float], bool, list[str], list[float]]:
    model, optimizer = setup(strategy)
    scale = torch.ones(2)
    with held_back() as go:
        saving = cnb.save(path, model, optimizer, wait=False, scale=scale)
        assert saving is not None
        scale.zero_()
        losses = train(model, optimizer, 2)
        done = saving.done
        go.set()
        saving.wait()
    assert saving.done
    saving.wait()
    files = sorted(each.name for each in (path / next(path.glob("data-*")).name).iterdir())
    assert cnb.load(path, model, optimizer)["scale"].tolist() == [1, 1]
    return losses, done, files, train(model, optimizer, 2)


@pytest.mark.parametrize(("count", "strategy"), [(1, "dp=1"), (2, "tp=2"), (4, "dp=2 pp=2 microbatches=2")])
def test_what_is_saved_is_what_was_there(ranks: Any, tmp_path: Path, count: int, strategy: str) -> None:
    for losses, done, files, again in ranks(count).run(trained_meanwhile, tmp_path / "run", strategy):
        close(losses, losses_after(2))
        assert again == losses
        assert not done
        assert [name for name in files if not name.endswith(".distcp")] == [".lock", ".metadata"]
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cnb.load(tmp_path / "run", model, optimizer)  # in one plain process
    close([train_plain(model, optimizer) for _ in range(2)], losses_after(2))


def train_plain(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = loss_fn(model(INPUTS), TARGETS)
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    ranks(2).run(save_trained, tmp_path / "run")
    return tmp_path / "run"


def full_disk(path: Path, odd: int, waits: bool) -> tuple[str, list[str]]:
    model, optimizer = setup("tp=2")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if World.current().rank == odd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    text = ""
    try:
        saving = cnb.save(path, model, optimizer, wait=False, step=2)
        assert saving is not None
        if waits:
            with pytest.raises(OSError) as caught:
                saving.wait()
            text = str(caught.value)
        else:
            saving.join()
            World.current().notes.append(saving.trouble())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return text, World.current().notes


@pytest.mark.parametrize("odd", [0, 1])
def test_a_full_disk_is_told_by_wait_and_leaves_the_old_one(ranks: Any, saved: Path, odd: int) -> None:
    (first, _), (second, _) = ranks(2).run(full_disk, saved, odd, True)
    assert first == second
    assert f"nothing was saved to {saved}: " in first
    assert "File too large" in first
    assert f"rank {odd}" in first
    assert cnb.load(saved, gpt()) == {"step": 1}
    assert len(list(saved.iterdir())) == 2


def test_without_wait_it_is_told_in_passing(ranks: Any, saved: Path) -> None:
    for _, notes in ranks(2).run(full_disk, saved, 1, False):
        assert "failed on rank" in notes[-1] and "what was there before is there still" in notes[-1]
    assert cnb.load(saved, gpt()) == {"step": 1}


def one_after_another(path: Path) -> tuple[bool, dict[str, Any]]:
    model, optimizer = setup("dp=2")
    with held_back() as go:
        first = cnb.save(path, model, optimizer, wait=False, number=1)
        threading.Timer(0.1, go.set).start()
        second = cnb.save(path, model, optimizer, wait=False, number=2)
        assert first is not None and second is not None
        ended = first.done
        extra = cnb.load(path, model, optimizer)
        assert second.done
    return ended, extra


def test_saves_and_loads_wait_for_the_save_before(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(one_after_another, tmp_path / "run") == [(True, {"number": 2})] * 2
    assert len(list((tmp_path / "run").iterdir())) == 2


def stopped(path: Path, odd: int) -> list[str]:
    """Stop lands on one rank when its copy is made; the other has begun to write."""
    model, optimizer = setup("tp=2")
    world, copy = World.current(), Job.copy

    def stop(job: Job) -> None:
        raise KeyboardInterrupt

    saving = None
    if world.rank == odd:
        Job.copy = stop  # type: ignore[method-assign]
    try:
        saving = cnb.save(path, model, optimizer, wait=False, step=2)
    except KeyboardInterrupt:
        world.abort("stopped")
    except RuntimeError:
        assert world.rank != odd
    finally:
        Job.copy = copy  # type: ignore[method-assign]
    assert saving is None
    world.regroup(world.epoch + 1, world.ranks)
    cnb.save(path, model, optimizer, step=3)
    return world.notes


@pytest.mark.parametrize("odd", [0, 1])
def test_a_stop_while_it_begins(ranks: Any, saved: Path, odd: int) -> None:
    ranks(2).run(stopped, saved, odd)
    assert cnb.load(saved, gpt()) == {"step": 3}
    assert len(list(saved.iterdir())) == 2


def left_alone(path: Path) -> str:
    """A rank that leaves when the other has begun: what that one says."""
    model, optimizer = setup("tp=2")
    world, start = World.current(), Saving.start
    if world.rank == 1:

        def stop(saving: Saving) -> None:
            raise KeyboardInterrupt

        Saving.start = stop  # type: ignore[method-assign]
    try:
        saving = cnb.save(path, model, optimizer, wait=False, step=2)
        assert saving is not None
        saving.join()
        return saving.trouble()
    except KeyboardInterrupt:
        return ""
    finally:
        Saving.start = start  # type: ignore[method-assign]


def test_a_rank_that_leaves_ends_the_others_save(ranks: Any, saved: Path) -> None:
    said = ranks(2).run(left_alone, saved)[0]
    assert "rank 1 could not write its part: it was stopped" in said
    assert cnb.load(saved, gpt()) == {"step": 1}
    assert len(list(saved.iterdir())) == 2


def test_a_process_that_ends_writes_it_to_the_end(tmp_path: Path) -> None:
    program = (
        "import torch, colossal_nb as cnb\n"
        f"print(cnb.save({str(tmp_path / 'run')!r}, torch.nn.Linear(4, 4), wait=False, step=7))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert cnb.load(tmp_path / "run", torch.nn.Linear(4, 4)) == {"step": 7}
