"""A GPT that trains in milliseconds, its batches and its loss, and what one device makes of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.models import GPT

PAD = -100
TEXT = torch.randint(29, (6, 7), generator=torch.Generator().manual_seed(1))
INPUTS, TARGETS = TEXT[:, :-1], TEXT[:, 1:]


def gpt(tied: bool = False) -> GPT:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=2, hidden=16, heads=4, max_length=8, tied=tied).double()


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and padded targets; the first sample has the most."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(29, (samples, 7), generator=generator)
    targets = text[:, 1:].clone()
    lengths = torch.randint(1, 6, (samples, 1), generator=generator)
    lengths[0] = 6
    targets[torch.arange(6) >= lengths] = PAD
    return text[:, :-1], targets


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy; the classes are the last dimension."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, INPUTS, TARGETS).item())
        optimizer.step()
    return losses


def sequential(
    make: Callable[[], nn.Module], inputs: Any, targets: Any, loss: Callable[..., Tensor] = loss_fn
) -> tuple[float, list[Any]]:
    model = make()
    value = loss(model(inputs), targets)
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def same_gradients(model: nn.Module, expected: list[Tensor | None], times: float = 1) -> None:
    for p, whole in zip(model.parameters(), expected, strict=True):
        found = cnb.full_grad(p)
        if whole is None:
            assert found is None
        else:
            assert found is not None
            close(found, whole * times)
