"""A vocabulary that no number of ranks divides: nothing is padded, so that nothing needs to stay zero."""

from functools import cache
from typing import Any

import pytest
import torch
from equivalence import LR, RTOL
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT

pytestmark = pytest.mark.ranks
VOCABULARY, STEPS = 50_257, 3
Found = tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor], dict[str, list[int]]]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def train(tied: bool, dtype: torch.dtype, strategy: str | None) -> Found:
    """Losses, gradient norms, whole weights and gradients; this rank's rows of weight, momentum, gradient."""
    torch.manual_seed(0)
    model: Any = GPT(VOCABULARY, layers=1, hidden=8, heads=8, max_length=8, tied=tied).to(dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, weight_decay=0.1)
    if strategy is not None:
        model, optimizer = cnb.parallelize(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(5)
    losses, norms = [], []
    for _ in range(STEPS):
        text = torch.randint(VOCABULARY, (3, 6), generator=generator)
        text[0, :2] = torch.tensor([VOCABULARY - 1, 0])
        optimizer.zero_grad()
        if strategy is None:
            loss = loss_fn(model(text[:, :-1]), text[:, 1:])
            loss.backward()
        else:
            loss = cnb.forward_backward(model, loss_fn, text[:, :-1], text[:, 1:])
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
    names = dict(model.named_parameters())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() if strategy is None else cnb.full_grad(p) for name, p in names.items()}
    rows = {name: [p.shape[0], optimizer.state[p]["exp_avg"].shape[0], p.grad.shape[0]] for name, p in names.items()}
    return losses, norms, weights, gradients, rows


@cache
def alone(tied: bool, dtype: torch.dtype) -> Found:
    return train(tied, dtype, None)


def close(found: Tensor, expected: Tensor, rtol: float) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= rtol * max(expected.abs().max().item(), LR * STEPS)


@pytest.mark.parametrize(
    ("count", "strategy", "tied", "dtype"),
    [
        (2, "tp=2", True, torch.float64),
        (2, "tp=2", False, torch.float32),
        (4, "tp=4", False, torch.float64),
        (4, "dp=2 tp=2", True, torch.float64),
        (8, "tp=8", True, torch.float64),
    ],
)
def test_trains_equal_and_holds_every_row_once(
    ranks: Any, count: int, strategy: str, tied: bool, dtype: torch.dtype
) -> None:
    losses, norms, weights, gradients, _ = alone(tied, dtype)
    results = ranks(count).run(train, tied, dtype, strategy)
    rtol = RTOL[dtype]
    for found in results:
        assert found[0] == results[0][0] and found[1] == results[0][1]
        close(torch.tensor(found[0]).double(), torch.tensor(losses).double(), rtol)
        close(torch.tensor(found[1]).double(), torch.tensor(norms).double(), rtol)
        for expected, ours in ((weights, found[2]), (gradients, found[3])):
            assert {name: value.shape for name, value in ours.items()} == {n: v.shape for n, v in expected.items()}
            if dtype == torch.float64:  # in float32 some weights of so small a model are ill-conditioned
                for name, value in expected.items():
                    close(ours[name], value, rtol)
    tp = count // 2 if "dp" in strategy else count
    for name in ("token.weight",) if tied else ("token.weight", "head.weight"):
        assert weights[name].shape[0] == VOCABULARY
        held = [found[4][name] for found in results[:tp]]
        assert all(len(set(row)) == 1 for row in held)
        assert sum(row[0] for row in held) == VOCABULARY
        assert max(row[0] for row in held) - min(row[0] for row in held) <= 1
