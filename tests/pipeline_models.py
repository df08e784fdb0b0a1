"""Small models of many shapes, none of them written with a pipeline in mind. Each maker gives (model, one batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from colossal_nb.models import GPT, MLP

WIDTH, VOCABULARY, LENGTH = 8, 12, 6
Batch = tuple[tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    """A residual block with a norm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        if mask is not None:
            hidden = hidden * mask
        return x + self.down(hidden)


class Trunk(nn.Module):
    """Embedding, four blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Looped(Trunk):
    """An index loop, a norm shared by all blocks, in-place arithmetic between them."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(len(self.blocks)):
            x = self.blocks[index](x)
            if index % 2:
                x = self.norm(x)
            x += 0.1 * index
        return self.head(self.norm(x) * self.scale)


class Shared(Trunk):
    """One block, called four times."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.head(self.norm(x))


class PairBlock(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = super().forward(x, mask)
        return y, y.mean(-1)


class Pairs(Trunk):
    """Blocks return tuples; the second parts are used together at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x, means = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            x, mean = block(x)
            means = means + mean
        return self.head(self.norm(x)) + means[..., None]


class Keywords(Trunk):
    """Keyword arguments, a mask from glue, a head that is `F.linear` with the embedding, a dict as output."""

    def forward(self, tokens: Tensor, *, damp: Tensor) -> dict[str, Tensor]:
        x = self.embedding(tokens)
        mask = torch.ones(2 * WIDTH, dtype=x.dtype).cumsum(0) / (2 * WIDTH) * damp.mean()
        for block in self.blocks:
            x = block(mask=mask, x=x)
        return {"logits": functional.linear(self.norm(x), self.embedding.weight), "hidden": x}


class Branch(Trunk):
    """The way through the model depends on the value of an activation."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean().item() > 1e-3:
                x = x * 0.5
        return self.head(self.norm(x))


class Recomputed(Trunk):
    """Checkpointed blocks; the reentrant kind hides its graph."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class RecomputedReentrant(Recomputed):
    reentrant = True


class StashBlock(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        self.kept = y.mean()
        return y


class Stash(Trunk):
    """Blocks leave a tensor on themselves that the model reads later: cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StashBlock() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + sum(block.kept for block in self.blocks)


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


class Elsewhere(Block):
    """Reads its parameters where it keeps them besides: in a list, a tuple, a dict, an attribute of another object."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.up.weight, (self.down.weight,)]
        self.biases = {"up": self.up.bias}
        self.__dict__["last"] = self.down.bias

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = functional.gelu(functional.linear(self.norm(x), self.weights[0], self.biases["up"]))
        return x + functional.linear(hidden, self.weights[1][0], self.__dict__["last"])


class References(Trunk):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Elsewhere() for _ in range(4))


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


class Heads(Trunk):
    """Two outputs; a loss may use one of them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), self.other(x)


class Routed(Trunk):
    """Which of two experts runs depends on the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return self.head(self.norm(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        parts = [self.experts[int(tokens[i, 0]) % 2](x[i]) for i in range(len(x))]
        return x + torch.stack(parts)


def tokens(samples: int) -> Batch:
    return (torch.randint(VOCABULARY, (samples, LENGTH)),), {}


def gpt(tied: bool = False) -> nn.Module:
    return GPT(vocab_size=VOCABULARY, layers=4, hidden=WIDTH, heads=2, max_length=LENGTH, tied=tied)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt": (gpt, tokens),
    "tied gpt": (lambda: gpt(tied=True), tokens),
    "mlp": (lambda: MLP(WIDTH, 16, 4, layers=4), lambda n: ((torch.randn(n, WIDTH, dtype=torch.float64),), {})),
    "parameter in glue": (Trunk, tokens),
    "loop, shared norm, in place": (Looped, tokens),
    "one block four times": (Shared, tokens),
    "tuples": (Pairs, tokens),
    "keywords, dict, functional head": (
        Keywords,
        lambda n: (tokens(n)[0], {"damp": torch.rand(n, dtype=torch.float64) + 0.5}),
    ),
    "branch on a value": (Branch, tokens),
    "checkpoint": (Recomputed, tokens),
    "reentrant checkpoint": (RecomputedReentrant, tokens),
    "u-net": (UNet, lambda n: ((torch.randn(n, 2, 8, dtype=torch.float64),), {})),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=3, num_layers=2), tokens),
    "gru": (lambda: Recurrent(nn.GRU), tokens),
    "rnn": (lambda: Recurrent(nn.RNN), tokens),
    "parameters kept elsewhere": (References, tokens),
    "torch encoder": (Encoder, tokens),
    "two heads": (Heads, tokens),
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
