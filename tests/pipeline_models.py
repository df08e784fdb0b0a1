"""Small models of many shapes, none of them written with a pipeline in mind. Each maker gives (model, one batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trunk_models as trunk
from torch import Tensor, nn
from trunk_models import LENGTH, VOCABULARY, WIDTH

from colossal_nb.models import GPT, MLP
from colossal_nb.parallel.structure import leaves

Batch = tuple[tuple[Any, ...], dict[str, Any]]


class UNet(nn.Module):
    """Skips from the way down to the way up, batch norm, in-place activations."""

    def __init__(self) -> None:
        super().__init__()

        def double(i: int, o: int) -> nn.Module:
            return nn.Sequential(nn.Conv1d(i, o, 3, padding=1), nn.BatchNorm1d(o), nn.ReLU(inplace=True))

        self.first = double(2, 4)
        self.down = nn.ModuleList([double(4, 8), double(8, 16)])
        self.pool = nn.MaxPool1d(2)
        self.up = nn.ModuleList([nn.ConvTranspose1d(16, 8, 2, 2), nn.ConvTranspose1d(8, 4, 2, 2)])
        self.joined = nn.ModuleList([double(16, 8), double(8, 4)])
        self.last = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for up, block in zip(self.up, self.joined, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


class InPlace(nn.Sequential):
    """Linear layers with activations that write into what they get."""

    def __init__(self) -> None:
        super().__init__(*[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))])


class Recurrent(nn.Module):
    """A recurrent layer keeps its parameters in a list of its own beside their names, and computes with that."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.second = kind((self.first.proj_size or WIDTH) * (1 + self.first.bidirectional), WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.embedding(tokens))[0])[0])


class Encoder(nn.Module):
    """Torch's own encoder, which in eval mode without gradients would go to one fused kernel per layer."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def tokens(samples: int) -> Batch:
    return (torch.randint(VOCABULARY, (samples, LENGTH)),), {}


def gpt(tied: bool = False) -> nn.Module:
    return GPT(vocab_size=VOCABULARY, layers=4, hidden=WIDTH, heads=2, max_length=LENGTH, tied=tied)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt": (gpt, tokens),
    "tied gpt": (lambda: gpt(tied=True), tokens),
    "mlp": (lambda: MLP(WIDTH, 16, 4, layers=4), lambda n: ((torch.randn(n, WIDTH, dtype=torch.float64),), {})),
    "parameter in glue": (trunk.Trunk, tokens),
    "loop, shared norm, in place": (trunk.Looped, tokens),
    "one block four times": (trunk.Shared, tokens),
    "tuples": (trunk.Pairs, tokens),
    "keywords, dict, functional head": (
        trunk.Keywords,
        lambda n: (tokens(n)[0], {"damp": torch.rand(n, dtype=torch.float64) + 0.5}),
    ),
    "branch on a value": (trunk.Branch, tokens),
    "checkpoint": (trunk.Recomputed, tokens),
    "reentrant checkpoint": (trunk.RecomputedReentrant, tokens),
    "u-net": (UNet, lambda n: ((torch.randn(n, 2, 8, dtype=torch.float64),), {})),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=3, num_layers=2), tokens),
    "gru": (lambda: Recurrent(nn.GRU), tokens),
    "rnn": (lambda: Recurrent(nn.RNN), tokens),
    "parameters kept elsewhere": (trunk.References, tokens),
    "torch encoder": (Encoder, tokens),
    "two heads": (trunk.Heads, tokens),
    "in place": (InPlace, lambda n: ((torch.randn(n, WIDTH, dtype=torch.float64),), {})),
}


def build(name: str) -> nn.Module:
    """The model in float64, no weight at a neutral value: zeros and ones hide faults."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(name: str, samples: int, seed: int = 1) -> Batch:
    torch.manual_seed(seed)
    return MODELS[name][1](samples)


def loss_of(output: Any, number: int) -> tuple[Tensor, float]:
    """A weight of its own for every element, so that no gradient is zero by symmetry."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves(output):
        total = total + (leaf * torch.linspace(-3, 4, leaf.numel(), dtype=leaf.dtype).view_as(leaf).sin()).sum()
    return total * (1 + number), total.item()
