"""A GPT in one sitting: embeddings, blocks of attention and MLP, a head. Plain sequential torch."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention. The width is read from the tensors, so a module with fewer heads runs the same lines."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.dropout = dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden)."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden)."""
        x = x + self.drop(self.attention(self.norm_1(x)))
        result: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))
        return result


class GPT(nn.Module):
    """A decoder-only transformer over tokens.

    vocab_size, layers (blocks), hidden (width), heads (must divide hidden), max_length (longest sequence, tokens),
    dropout (probability), tied (the head reuses the token embedding). Weights start as in GPT-2: normal with
    deviation 0.02, the two projections that end in the residual stream divided by sqrt(2 layers).
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        hidden: int,
        heads: int,
        max_length: int = 1024,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if hidden % heads:
            near = max(n for n in range(1, heads + 1) if hidden % n == 0)
            wide = -(-hidden // heads) * heads
            raise ValueError(f"heads={heads} does not divide hidden={hidden}: take heads={near} or hidden={wide}")
        self.max_length = max_length
        self.token = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.apply(_start)
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attention.out.weight /= math.sqrt(2 * layers)
                block.down.weight /= math.sqrt(2 * layers)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, length) -> logits (batch, length, vocab_size)."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(f"{length} tokens are longer than max_length={self.max_length}")
        x = self.drop(self.token(tokens) + self.position(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def example_inputs(self) -> tuple[Tensor]:
        """A small input of the right kind: token ids (2, 8)."""
        length = min(8, self.max_length)
        return (torch.arange(2 * length, device=self.token.weight.device).view(2, -1) % self.token.num_embeddings,)


def _start(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
