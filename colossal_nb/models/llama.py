"""A Llama: rotary positions, grouped-query attention, SwiGLU, RMSNorm, a head of its own. Plain sequential torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.models.parts import (
    check_dropout,
    check_heads,
    check_length,
    check_sizes,
    example_tokens,
    start,
    start_residual,
)

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, (length, head_size / 2) each."""


class GroupedAttention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head; no biases.

    The width is read from the tensors, so a module with fewer heads runs the same lines.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.dropout = dropout
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden)."""
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            rotated(q, rotation), rotated(k, rotation), v, dropout_p=dropout, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); no biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class LlamaBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(hidden, eps=1e-5)
        self.attention = GroupedAttention(hidden, heads, kv_heads, dropout)
        self.norm_2 = nn.RMSNorm(hidden, eps=1e-5)
        self.mlp = SwiGLU(hidden, inner)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden)."""
        x = x + self.drop(self.attention(self.norm_1(x), rotation))
        result: Tensor = x + self.drop(self.mlp(self.norm_2(x)))
        return result


class Llama(nn.Module):
    """A decoder-only transformer over tokens, built as Llama 2 and 3 are.

    vocab_size, layers (blocks), hidden (width), heads (must divide hidden, into heads of an even size), kv_heads (key
    and value heads, must divide heads; by default as many), inner (width of the MLP; by default 8/3 hidden, rounded up
    to a multiple of 16), max_length (longest sequence, tokens), dropout (probability; published Llamas have none),
    base (of the rotary angles). Weights start as those of GPT.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        inner: int | None = None,
        max_length: int = 1024,
        dropout: float = 0.0,
        base: float = 10_000.0,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, max_length=max_length)
        check_heads(hidden, heads)
        check_dropout(dropout)
        kv_heads = heads if kv_heads is None else kv_heads
        _check_groups(hidden, heads, kv_heads)
        inner = -(-8 * hidden // 48) * 16 if inner is None else inner
        check_sizes(inner=inner)
        self.max_length = max_length
        self.head_size = hidden // heads
        self.base = base
        self.token = nn.Embedding(vocab_size, hidden)
        self.drop = nn.Dropout(dropout)
        blocks = [LlamaBlock(hidden, heads, kv_heads, inner, dropout) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.apply(start)
        start_residual((each for block in blocks for each in (block.attention.out, block.mlp.down)), layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, length) -> logits (batch, length, vocab_size)."""
        length = tokens.shape[1]
        check_length(length, self.max_length)
        x = self.drop(self.token(tokens))
        turn = rotation(length, self.head_size, self.base, tokens.device)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def example_inputs(self) -> tuple[Tensor]:
        """A small input of the right kind: token ids (2, 8)."""
        return (example_tokens(self.token, self.max_length),)


def rotation(length: int, head_size: int, base: float, device: torch.device) -> Rotation:
    """The angles position / base^(2i / head_size) of RoPE (Su et al. 2021, arXiv:2104.09864, equation 15).

    In float32, whatever the model's dtype: bfloat16 does not tell position 257 from 256.
    """
    rates = base ** -(torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rates
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys (batch, heads, length, head_size), features i and i + head_size / 2 turned as one pair."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _check_groups(hidden: int, heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or heads % kv_heads:
        near = [n for n in range(1, heads + 1) if heads % n == 0]
        choices = ", ".join(map(str, near[:-1])) + " or " + str(near[-1]) if len(near) > 1 else "1"
        raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}: take {choices}")
    if hidden // heads % 2:
        raise ValueError(
            f"hidden={hidden} and heads={heads} make heads of {hidden // heads} features, and rotary positions turn "
            f"pairs of them: take hidden={hidden + heads}"
        )
