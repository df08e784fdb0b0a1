"""Dropout is equal under every strategy: its masks are keyed by sample and site, not by who draws them."""

from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import loss_fn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as by_name
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.attention import attention_weights
from colossal_nb.parallel.dropout import KeyedDropout

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


class Named(nn.Module):
    """Every way to drop that torch has, under names of one's own, with probabilities that no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5)
        self.inside = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.alpha, self.channels = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(by_name(functional.gelu(self.up(x)), 0.3, self.training))
        x = x + attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3 if self.training else 0.0)[:, 0]
        x = x + self.inside(x, x, x)[0] + self.inside(x, x, x, need_weights=False)[0]
        x = torch.dropout(self.alpha(x), 0.2, self.training)
        x = functional.dropout1d(functional.dropout(x, 0.1, self.training, True), 0.2, self.training)
        out: Tensor = self.head(self.channels(x))
        return out

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.linspace(-1, 1, 48).view(2, 3, 8).to(self.up.weight.dtype),)


class Twice(Named):
    """One block, called twice, each time checkpointed: the backward meets the second call first."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out

    def __init__(self) -> None:
        super().__init__()
        self.block = Dropping()


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + by_name(self.down(by_name(functional.gelu(self.up(x)), 0.3, self.training)), 0.3)
        return out


def stepped(make: Any, strategy: str, by_hand: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, written by hand or not, and the weights."""
    torch.manual_seed(0)
    model: Any = make().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        inputs = torch.randn(5, 3, 8, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, (5, 3), generator=generator)
        optimizer.zero_grad()
        if by_hand:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        else:
            loss = cnb.forward_backward(model, loss_fn, inputs, targets)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@cache
def stepped_alone(ranks: Any, make: Any, by_hand: bool) -> tuple[list[float], dict[str, Tensor]]:
    (found,) = ranks(1).run(stepped, make, "", by_hand)
    return found


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (2, "tp=2"), (4, "dp=2 tp=2")])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("make", [Named, Twice])
def test_every_kind_of_dropout_in_every_loop(ranks: Any, make: Any, by_hand: bool, count: int, strategy: str) -> None:
    losses, weights = stepped_alone(ranks, make, by_hand)
    for found, ours in ranks(count).run(stepped, make, strategy, by_hand):
        assert found == pytest.approx(losses, rel=1e-10)
        for name, expected in weights.items():
            torch.testing.assert_close(ours[name], expected, rtol=1e-9, atol=1e-12)


def gradient_by_hand(checkpointed: bool) -> list[Tensor]:
    """Of one keyed forward; a checkpointed block must find its masks again."""
    torch.manual_seed(0)
    model: Any = Twice().double()
    if not checkpointed:
        model.forward = lambda x: model.head(model.block(model.block(x)))
    model = cnb.parallelize(model)
    inputs = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model(inputs).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_block_called_twice_finds_both_of_its_masks_again(ranks: Any) -> None:
    again, kept = (ranks(1).run(gradient_by_hand, checkpointed)[0] for checkpointed in (True, False))
    for one, other in zip(again, kept, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_alpha_dropout_keeps_mean_and_deviation(kind: Any) -> None:
    drop = kind(0.3)
    keyed = KeyedDropout(drop, seed=3)
    x = torch.randn(100, 200, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with keyed.running():
        keyed.begin(0, 0, 100)
        found = drop(x)
    assert abs(found.mean().item()) < 0.02
    assert abs(found.std().item() - 1) < 0.02
