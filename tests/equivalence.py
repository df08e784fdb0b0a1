"""One training program for one device and for all strategies, and rule L: how equal they must be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from small_gpt import loss_fn
from torch import Tensor, nn

import colossal_nb as cnb

LR = 1e-3
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
# Adam divides by the size of a gradient plus eps. The gradient of a key's bias is zero in exact arithmetic; in float32
# its rounding, 1e-10 and less, against the usual eps of 1e-8 moves a weight further than RTOL allows as soon as the
# sequential program itself adds its samples in another order.
EPS = {torch.float64: 1e-8, torch.float32: 1e-5}
Batch = tuple[Any, Tensor]


@dataclass
class Outcome:
    """What a program shows: numbers per step, whole weights and whole gradients at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)


def train(
    make: Callable[[], nn.Module], batches: list[Batch], dtype: torch.dtype, strategy: str | None, clip: float | None
) -> Outcome:
    """The example program of the project; `strategy` None is the same without a word of ours. Inputs that are a dict
    are keywords."""
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
            loss = loss_fn(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)
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


def check(outcomes: list[Outcome], expected: Outcome, dtype: torch.dtype) -> None:
    """Bit-equal numbers on all ranks; against one device rule L."""
    rtol, walk = RTOL[dtype], LR * len(expected.losses)
    for outcome in outcomes:
        assert outcome.losses == outcomes[0].losses
        assert outcome.norms == outcomes[0].norms
        _equal(torch.tensor(outcome.losses).double(), torch.tensor(expected.losses).double(), rtol, walk)
        if expected.norms:
            _equal(torch.tensor(outcome.norms).double(), torch.tensor(expected.norms).double(), rtol, walk)
        assert list(outcome.weights) == list(expected.weights)
        assert list(outcome.gradients) == list(expected.gradients)
        for name, value in expected.weights.items():
            _equal(outcome.weights[name], value, rtol, walk)
        for name, value in expected.gradients.items():
            _equal(outcome.gradients[name], value, rtol, walk)


def _equal(found: Tensor, expected: Tensor, rtol: float, walk: float) -> None:
    """The difference against the largest entry, or against how far the optimizer can have walked."""
    assert found.shape == expected.shape
    floor = max(expected.abs().max().item(), walk)
    assert (found - expected).abs().max().item() <= rtol * floor
