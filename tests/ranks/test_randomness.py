"""Dropout is equal under every strategy: its masks are keyed by sample and site, not by who draws them."""

from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import loss_fn
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.dropout import KeyedDropout, attention_weights

pytestmark = pytest.mark.ranks


class Hidden(nn.Module):
    """Dropout between column and row, where tensor parallel ranks hold some of the features; channels; a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = (nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 5))
        self.inner, self.channels = nn.Dropout(0.3), nn.Dropout1d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(self.inner(functional.gelu(self.up(x))))
        out: Tensor = self.head(self.channels(x))
        return out

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.linspace(-1, 1, 36).view(2, 3, 6).to(self.up.weight.dtype),)


class Checkpointed(GPT):
    """Every block runs again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.token(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(self.norm(x))
        return out


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "hidden":
        return Hidden().double()
    model = (Checkpointed if kind == "checkpointed" else GPT)(29, 4, 16, 4, max_length=8, dropout=0.3)
    return model.double()


def train(kind: str, strategy: str) -> list[float]:
    model: Any = make(kind)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        inputs = torch.randint(29, (5, 7), generator=generator)
        targets = torch.randint(5, (5, 7), generator=generator)
        if kind == "hidden":
            inputs = torch.randn(5, 7, 6, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        before = torch.get_rng_state()
        losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        assert torch.equal(torch.get_rng_state(), before)
        optimizer.step()
    return losses


@cache
def alone(ranks: Any, kind: str) -> list[float]:
    (losses,) = ranks(1).run(train, kind, "")
    return losses


@pytest.mark.parametrize(
    ("count", "strategy"),
    [(1, "microbatches=3"), (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "tp=4"), (4, "tp=2 pp=2 microbatches=4")],
)
@pytest.mark.parametrize("kind", ["gpt", "hidden", "checkpointed"])
def test_equal_under_every_strategy(ranks: Any, count: int, strategy: str, kind: str) -> None:
    if kind == "hidden" and "pp" in strategy:
        strategy, count = "dp=2 tp=2", 4
    expected = alone(ranks, kind)
    assert expected != sorted(expected, reverse=True) or len(set(expected)) == 3
    for losses in ranks(count).run(train, kind, strategy):
        assert losses == pytest.approx(expected, rel=1e-10)


def test_masks_are_dropout() -> None:
    drop = nn.Sequential(nn.Dropout(0.25))
    keyed = KeyedDropout(drop, seed=3)
    x = torch.ones(4, 10_000)
    with keyed.running():
        keyed.begin(0, 0, 4)
        first, again = drop(x), drop(x)
        keyed.begin(1, 0, 4)
        later = drop(x)
        keyed.begin(0, 2, 4)
        part = drop(x[2:])
    assert set(first.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs((first == 0).float().mean().item() - 0.25) < 0.01
    assert torch.equal(part, first[2:])
    for other in (again, later, first.flip(0)):
        assert not torch.equal(other, first)
    drop.eval()
    with keyed.running():
        assert torch.equal(drop(x), x)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_open_attention_is_torchs(mask: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 4, dtype=torch.float64) for heads in (4, 2, 2))
    seen = torch.rand(5, 5) > 0.4
    seen[3] = False
    given: dict[str, Any] = {"attn_mask": None, "is_causal": mask == "causal", "scale": None, "enable_gqa": True}
    if mask == "bool":
        given["attn_mask"] = seen
    if mask == "float":
        given["attn_mask"] = torch.where(seen, 0.5, -torch.inf).double()
    expected = functional.scaled_dot_product_attention(q, k, v, **given)
    weights = attention_weights({"query": q, "key": k, "value": v, **given})
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), expected, rtol=1e-12, atol=1e-12)
