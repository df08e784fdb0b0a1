"""One trunk - embedding, four blocks, head - in the many ways in which people write its forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, LENGTH = 8, 12, 6


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
