"""The promise: under every strategy a program prints what it prints on one device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import loss_fn
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT, MLP

pytestmark = pytest.mark.ranks
STEPS = 5
LR = 1e-3
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
# Adam divides by the size of a gradient plus eps. The gradient of a key's bias is zero in exact arithmetic; in float32
# its rounding, 1e-10 and less, against the usual eps of 1e-8 moves a weight further than RTOL allows as soon as the
# sequential program itself adds its samples in another order.
EPS = {torch.float64: 1e-8, torch.float32: 1e-5}
Batch = tuple[Tensor, Tensor]


@dataclass
class Outcome:
    """What a program shows: numbers per step, whole weights and whole gradients at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def gpt() -> GPT:
    return GPT(vocab_size=37, layers=4, hidden=16, heads=4, max_length=16)


def tied_gpt() -> GPT:
    return GPT(vocab_size=37, layers=4, hidden=16, heads=4, max_length=16, tied=True)


def mlp() -> MLP:
    return MLP(features=6, hidden=16, classes=5, layers=4)


def tokens(samples: int, padded: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(STEPS):
        text = torch.randint(37, (samples, 9), generator=generator)
        targets = text[:, 1:].clone()
        if padded:
            lengths = torch.randint(0, 8, (samples, 1), generator=generator)
            lengths[0] = 8
            targets[torch.arange(8) >= lengths] = -100
        found.append((text[:, :-1], targets))
    return found


def points(samples: int, dtype: torch.dtype) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype),
         torch.randint(5, (samples,), generator=generator))
        for _ in range(STEPS)
    ]  # fmt: skip


def train(
    make: Callable[[], nn.Module], batches: list[Batch], dtype: torch.dtype, strategy: str | None, clip: float | None
) -> Outcome:
    """The example program of the project, written once for one device and for all strategies."""
    torch.manual_seed(0)
    model = make().to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)  # no weight stays at 0 or 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS[dtype])
    if strategy is not None:
        model, optimizer = cnb.parallelize(model, optimizer, strategy)
    losses, norms = [], []
    for inputs, targets in batches:
        optimizer.zero_grad()
        if strategy is None:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        else:
            loss = cnb.forward_backward(model, loss_fn, inputs, targets)
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: cnb.full_grad(p) for name, p in model.named_parameters()}
    return Outcome(losses, norms, weights, {name: g for name, g in gradients.items() if g is not None})


@cache
def sequential(
    make: Callable[[], nn.Module], samples: int, padded: bool, dtype: torch.dtype, clip: float | None
) -> Outcome:
    return train(make, data(make, samples, padded, dtype), dtype, None, clip)


def data(make: Callable[[], nn.Module], samples: int, padded: bool, dtype: torch.dtype) -> list[Batch]:
    return points(samples, dtype) if make is mlp else tokens(samples, padded)


def _equal(found: Tensor, expected: Tensor, rtol: float) -> None:
    """Rule L: the difference against the largest entry, or against how far the optimizer can have walked."""
    assert found.shape == expected.shape
    floor = max(expected.abs().max().item(), LR * STEPS)
    assert (found - expected).abs().max().item() <= rtol * floor


def check(outcomes: list[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    rtol = RTOL[dtype]
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        assert outcome.norms == outcomes[0].norms
        _equal(torch.tensor(outcome.losses).double(), torch.tensor(expected.losses).double(), rtol)
        if expected.norms:
            _equal(torch.tensor(outcome.norms).double(), torch.tensor(expected.norms).double(), rtol)
        assert list(outcome.weights) == list(expected.weights)
        assert list(outcome.gradients) == list(expected.gradients)
        for name, value in expected.weights.items():
            _equal(outcome.weights[name], value, rtol)
        for name, value in expected.gradients.items():
            _equal(outcome.gradients[name], value, rtol)


STRATEGIES = {
    2: ["dp=2", "tp=2", "pp=2", "pp=2 schedule=gpipe", "dp=2 microbatches=3"],
    4: ["dp=4", "tp=4", "pp=4", "pp=4 schedule=gpipe microbatches=6", "tp=2 pp=2", "dp=2 tp=2", "dp=2 pp=2"],
    8: ["dp=2 tp=2 pp=2"],
}
CASES = [(count, strategy) for count, strategies in STRATEGIES.items() for strategy in strategies]


def run(
    ranks: Any, count: int, strategy: str, make: Callable[[], nn.Module], samples: int, padded: bool,
    dtype: torch.dtype, clip: float | None = None,
) -> None:  # fmt: skip
    batches = data(make, samples, padded, dtype)
    outcomes = ranks(count).run(train, make, batches, dtype, strategy, clip)
    check(outcomes, sequential(make, samples, padded, dtype, clip), dtype)


@pytest.mark.parametrize(("count", "strategy"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [gpt, mlp])
def test_equal_to_sequential(
    ranks: Any, count: int, strategy: str, make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    run(ranks, count, strategy, make, samples=8, padded=False, dtype=dtype)


@pytest.mark.parametrize(("count", "strategy"), CASES)
def test_padded_targets_and_odd_batches(ranks: Any, count: int, strategy: str) -> None:
    run(ranks, count, strategy, gpt, samples=7, padded=True, dtype=torch.float64, clip=0.5)
