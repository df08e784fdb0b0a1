"""What the transformers here have in common: attention over all heads at once, a pre-norm block, how weights start."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.validation import as_whole, real_number, shown


class Attention(nn.Module):
    """Self-attention. The width is read from the tensors, so a module with fewer heads runs the same lines."""

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden).

        seen: which positions may be looked at, bool, broadcast to (batch, heads, length, length); not with `causal`.
        """
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, seen, dropout_p=dropout, is_causal=self.causal)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout, causal)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden)."""
        x = x + self.drop(self.attention(self.norm_1(x)))
        result: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))
        return result


def check_sizes(**sizes: int) -> None:
    """Raises ValueError that names every size that is none."""
    wrong = [f"{name}={shown(size)}" for name, size in sizes.items() if as_whole(size) is None or size < 1]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: each must be a whole number, at least 1")


def check_dropout(p: float) -> None:
    """Raises ValueError for what is no probability."""
    if real_number("dropout", p, 0, "a probability") > 1:
        raise ValueError(f"dropout={p}: a probability, 0 to 1")


def check_heads(hidden: int, heads: int) -> None:
    """Raises ValueError, with numbers that work, unless every head gets equally many features."""
    check_sizes(hidden=hidden, heads=heads)
    if hidden % heads:
        near = max(n for n in range(1, heads + 1) if hidden % n == 0)
        wide = -(-hidden // heads) * heads
        raise ValueError(f"heads={heads} does not divide hidden={hidden}: take heads={near} or hidden={wide}")


def check_length(length: int, max_length: int) -> None:
    """Raises ValueError if there are more tokens than the model has positions for."""
    if length > max_length:
        raise ValueError(f"{length} tokens are longer than max_length={max_length}")


def start(module: nn.Module) -> None:
    """Weights as in GPT-2: normal with deviation 0.02, biases 0. For `model.apply`."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def start_residual(projections: Iterable[nn.Linear], layers: int) -> None:
    """Divide what ends in the residual stream by sqrt(2 layers), so that the stream does not grow with depth."""
    with torch.no_grad():
        for projection in projections:
            projection.weight /= math.sqrt(2 * layers)


def example_tokens(embedding: nn.Embedding, max_length: int) -> Tensor:
    """A small input of the right kind: token ids (2, 8)."""
    length = min(8, max_length)
    return torch.arange(2 * length, device=embedding.weight.device).view(2, -1) % embedding.num_embeddings
