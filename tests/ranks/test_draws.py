"""Random numbers are those of one device where they go by sample; where a model draws others, a line names them."""

from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import loss_fn
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import colossal_nb as cnb
from colossal_nb.parallel.dropout import KeyedDropout
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
STRATEGIES = ("dp=2", "tp=2", "pp=2 microbatches=2")


class Block(nn.Module):
    """A linear, what is asked for, and a linear."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(8, 12), nn.Linear(12, 8)
        self.act = nn.RReLU() if kind == "rrelu" else nn.Tanh()
        recurrent = {"lstm": nn.LSTM, "packed": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
        if kind in recurrent:
            self.rnn = recurrent[kind](8, 8, num_layers=2, dropout=0.4, batch_first=kind != "gru")

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(x))
        if self.kind == "own" and self.training:
            y = y + torch.randn_like(y)
        y = functional.rrelu(self.down(y), training=self.training) if self.kind == "rrelu" else self.down(y)
        if self.kind in ("lstm", "rnn"):
            y = self.rnn(y)[0]
        if self.kind == "gru":
            y = self.rnn(y.transpose(0, 1))[0].transpose(0, 1)
        if self.kind == "packed":
            packed = pack_padded_sequence(y, [y.shape[1]] * len(y), batch_first=True)
            y = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return x + y


class Trunk(nn.Module):
    """One dropout for all blocks: under pp several stages drop with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 5)
        if kind == "time first":
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3) for _ in range(2)])
        else:
            self.blocks = nn.ModuleList([Block(kind) for _ in range(2)])
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.kind == "time first":
            x = x.transpose(0, 1)
            for block in self.blocks:
                x = block(x)
            x = x.transpose(0, 1)
        else:
            for block in self.blocks:
                x = self.drop(block(x))
        out: Tensor = self.head(x)
        return out

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.linspace(-1, 1, 48).view(2, 3, 8).to(self.head.weight.dtype),)


def train(kind: str, strategy: str) -> tuple[list[float], list[str]]:
    """Losses of three steps, and the lines that speak of random numbers."""
    torch.manual_seed(0)
    model: Any = Trunk(kind).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        inputs = torch.randn(4, 3, 8, generator=generator, dtype=torch.float64)
        targets = torch.randint(5, (4, 3), generator=generator)
        optimizer.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        optimizer.step()
    return losses, [note for note in World.current().notes if "draw" in note or "drop" in note]


@cache
def alone(ranks: Any, kind: str) -> list[float]:
    ((losses, notes),) = ranks(1).run(train, kind, "")
    assert not notes
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["shared", "rrelu", "lstm", "gru", "rnn", "time first"])
def test_what_goes_by_sample_is_equal_everywhere(ranks: Any, kind: str, strategy: str) -> None:
    for losses, notes in ranks(2).run(train, kind, strategy):
        assert losses == pytest.approx(alone(ranks, kind), rel=1e-10)
        assert not notes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_models_own_draws_are_named_beside_keyed_dropout(ranks: Any, strategy: str) -> None:
    for losses, notes in ranks(2).run(train, "own", strategy):
        assert losses != pytest.approx(alone(ranks, "own"), rel=1e-10)
        (note,) = notes
        assert "draws random numbers of its own" in note
        assert "randn_like in blocks.0 (Block, forward, line " in note
        assert "randn_like in blocks.1 (Block, forward, line " in note
        assert ("cut under tp" in note) == (strategy == "tp=2")


def test_packed_sequences_are_named(ranks: Any) -> None:
    for _, (note,) in ranks(2).run(train, "packed", "dp=2"):
        assert "bernoulli_ in blocks.0.rnn (LSTM), bernoulli_ in blocks.1.rnn (LSTM)" in note


class Late(nn.Module):
    """Drops with the length in dim 0, and draws only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(8, 5), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.bernoulli(torch.full((len(x), 1, 1), 0.5))
        out: Tensor = self.up(self.drop(x.transpose(0, 1)).transpose(0, 1))
        return out


def _late() -> list[list[str]]:
    """Lines after a call in evaluation mode, one in training and one more."""
    model = cnb.parallelize(Late(), strategy="dp=2")
    found = []
    for mode in (False, True, True):
        model.train(mode)
        World.current().notes.clear()
        cnb.forward_backward(model, loss_fn, torch.ones(4, 3, 8), torch.ones(4, 3, dtype=torch.long))
        found.append(list(World.current().notes))
    return found


def test_another_mode_is_looked_at_again_and_said_once(ranks: Any) -> None:
    for before, during, after in ranks(2).run(_late):
        assert not before
        assert not after
        own, batch = during
        assert "bernoulli in Late (forward, line " in own
        assert batch.startswith("what is dropped in drop does not begin with one row, or some, for each sample")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", [{}, {"batch_first": True, "bias": False}, {"bidirectional": True}, {"proj_size": 2}])
def test_layer_by_layer_is_torchs(kind: Any, more: dict[str, Any]) -> None:
    """With a probability so small that nothing is dropped."""
    if "proj_size" in more and kind is not nn.LSTM:
        more = {"nonlinearity": "relu"} if kind is nn.RNN else {}
    torch.manual_seed(0)
    module = kind(4, 6, num_layers=3, dropout=1e-9, **more).double()
    keyed, x = KeyedDropout(module, seed=3), torch.randn(5, 3, 4, dtype=torch.float64)
    expected = module.eval()(x)
    module.train()
    with keyed.running():
        keyed.begin(0, 0, 5 if more.get("batch_first") else 3)
        found = module(x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_slopes_are_those_of_rrelu() -> None:
    act = nn.RReLU(0.1, 0.3)
    keyed = KeyedDropout(act, seed=3)
    x = torch.randn(8, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with keyed.running():
        keyed.begin(0, 0, 8)
        found = act(x)
        keyed.begin(0, 3, 8)
        part = functional.rrelu_(x[3:].clone(), 0.1, 0.3, training=True)
    slopes = (found / x)[x < 0]
    assert torch.equal(found[x > 0], x[x > 0])
    assert torch.equal(part, found[3:])
    assert 0.1 <= slopes.min() < 0.11
    assert 0.29 < slopes.max() <= 0.3
