"""The promise: under every strategy a program prints what it prints on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from equivalence import Batch, Outcome, check, train
from torch import nn

from colossal_nb.models import GPT, MLP

pytestmark = pytest.mark.ranks
STEPS = 5


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


def program(*args: Any) -> Outcome:
    """`train`, as a function of this module: it goes to the ranks together with the models above."""
    return train(*args)


@cache
def sequential(
    make: Callable[[], nn.Module], samples: int, padded: bool, dtype: torch.dtype, clip: float | None
) -> Outcome:
    return train(make, data(make, samples, padded, dtype), dtype, None, clip)


def data(make: Callable[[], nn.Module], samples: int, padded: bool, dtype: torch.dtype) -> list[Batch]:
    return points(samples, dtype) if make is mlp else tokens(samples, padded)


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
    outcomes = ranks(count).run(program, make, batches, dtype, strategy, clip)
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
