"""A parallel model is what the sequential program is, and `verify` says so without leaving a trace."""

import copy
import functools
import random
from typing import Any

import numpy
import pytest
import torch
from recorded import record_of
from small_gpt import INPUTS, TARGETS, loss_fn
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel import gradients
from colossal_nb.parallel.handle import find
from colossal_nb.parallel.statistics import Statistics
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
BANDS = {torch.float64: 1e-10, torch.float32: 1e-5}


def gpt(dtype: torch.dtype = torch.float32, dropout: float = 0.1, tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=4, hidden=16, heads=4, max_length=8, dropout=dropout, tied=tied).to(dtype)


def optimizer_of(model: nn.Module, kind: str) -> Any:
    if kind == "none":
        return None
    return torch.optim.AdamW(model.parameters(), lr=1e-2) if kind == "AdamW" else torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9)  # fmt: skip


def verified(strategy: str, dtype: torch.dtype, kind: str, trained: int) -> tuple[Any, ...]:
    model = gpt(dtype)
    optimizer = optimizer_of(model, kind)
    made = cnb.parallelize(model, optimizer, strategy)
    model, optimizer = (made, None) if optimizer is None else made
    for _ in range(trained):
        optimizer.zero_grad()
        cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
        optimizer.step()
    found = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    return found.ok, str(found), {what: found.worst(what).difference for what in ("loss", "gradient", "weight")}


CASES = [
    (1, "dp=1", torch.float32, "AdamW", 0),
    (2, "dp=2", torch.float32, "none", 0),
    (2, "tp=2", torch.float64, "SGD", 2),
    (2, "pp=2", torch.float32, "SGD", 0),
    (4, "dp=2 tp=2", torch.float32, "AdamW", 2),
    (4, "tp=2 pp=2", torch.float64, "AdamW", 2),
    (4, "dp=2 pp=2 microbatches=3", torch.float32, "AdamW", 0),
]


@pytest.mark.parametrize(("count", "strategy", "dtype", "kind", "trained"), CASES)
def test_strategies_are_verified(
    ranks: Any, count: int, strategy: str, dtype: torch.dtype, kind: str, trained: int
) -> None:
    for ok, text, worst in ranks(count).run(verified, strategy, dtype, kind, trained):
        assert ok, text
        assert text.startswith(f"verified: {strategy} equals the sequential program over 3")
        assert max(worst.values()) <= BANDS[dtype]


def _half(strategy: str) -> tuple[bool, str, str]:
    """A model in half precision; then with gradients of half the size."""
    model = gpt(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    held, peak = World.current().ledger.held(), World.current().ledger.peak_bytes()
    right = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    assert [each.size_bytes for each in World.current().ledger.held()] == [each.size_bytes for each in held]
    assert World.current().ledger.peak_bytes() == peak
    finish = gradients.finish
    gradients.finish = lambda parallel, active, count: finish(parallel, active, 2 * count)
    try:
        wrong = cnb.verify(model, loss_fn, INPUTS, TARGETS)
    finally:
        gradients.finish = finish
    assert not wrong
    return bool(right), str(right), wrong.cause


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2 precision=bf16"), (4, "tp=2 pp=2 precision=fp16")])
def test_half_precision_is_compared_with_one_rank_of_it(ranks: Any, count: int, strategy: str) -> None:
    for right, text, cause in ranks(count).run(_half, strategy):
        assert right, text
        assert "is 0.5 times the sequential one" in cause


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _batch_statistics(strategy: str) -> tuple[bool, str, str]:
    model = normed()
    model, _ = cnb.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    verify = functools.partial(cnb.verify, model, nn.functional.cross_entropy, inputs, torch.arange(12) % 3)
    found = verify()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statistics, "settle", lambda self, parts: None)
        wrong = verify()
    return bool(found), str(found), wrong.cause


def test_statistics_of_a_batch_are_compared_with_the_same_microbatches(ranks: Any) -> None:
    for right, text, cause in ranks(2).run(_batch_statistics, "dp=2 microbatches=2"):
        assert right, text
        assert "reference: one rank with the same 4 microbatches" in text
        assert "the statistic of 1.running_" in cause


def _left_as_it_was(strategy: str) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    optimizer.step()
    cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    parallel, world = find(model), World.current()
    assert parallel is not None
    world.recorder.drain()
    before, tensors = state(model, optimizer), world.ledger.held()
    parallels = set(world.parallels)
    assert cnb.verify(model, loss_fn, INPUTS, TARGETS, steps=2)
    after = state(model, optimizer)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name], name
    assert [(held.name, held.size_bytes) for held in tensors] == [(h.name, h.size_bytes) for h in world.ledger.held()]
    assert set(world.parallels) == parallels
    assert world.model is parallel
    assert world.recorder.enabled
    record = record_of(world.recorder.drain())
    assert not len(record.slices) + len(record.marks) + len(record.memory) + len(record.layouts)
    optimizer.step()
    scheduler.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, as values."""
    parallel = find(model)
    assert parallel is not None
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    found |= {"numpy": str(numpy.random.get_state()), "notes": list(World.current().notes)}
    found |= {name: getattr(parallel, name) for name in ("calls", "calls_in_step", "step", "loss", "accumulating")}
    found["compared"] = set(parallel.compared)
    found["opened"] = getattr(optimizer, "_opt_called", None)
    for name, p in parallel.held().items():
        found |= {name: p.detach().clone(), f"{name} grad": None if p.grad is None else p.grad.clone()}
        found |= {f"{name} version": p._version}
        found |= {f"{name} {key}": value.clone() for key, value in optimizer.state.get(p, {}).items()}
    return found


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2 microbatches=2"), (4, "tp=2 pp=2")])
def test_nothing_of_the_users_changes(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_left_as_it_was, strategy)


def _copy_drops_alike(strategy: str) -> list[Any]:
    model = cnb.parallelize(gpt(), strategy=strategy)
    twin = copy.deepcopy(model)
    losses = [cnb.forward_backward(each, loss_fn, INPUTS, TARGETS).item() for each in (model, twin)]
    for p, own in zip(twin.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (own.grad is None)
        assert p.untyped_storage().nbytes() == own.untyped_storage().nbytes()
        assert p.grad is None or torch.equal(p.grad, own.grad)
    return losses


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (4, "tp=2 pp=2")])
def test_a_copy_draws_the_same_masks(ranks: Any, count: int, strategy: str) -> None:
    """Also under functions that drop inside a module with children, whose names the hooks keep apart."""
    for first, second in ranks(count).run(_copy_drops_alike, strategy):
        assert first == second
