"""A GPT: embeddings, blocks of causal attention and MLP, a head. Plain sequential torch."""

import torch
from torch import Tensor, nn

from colossal_nb.models.parts import (
    Block,
    check_dropout,
    check_heads,
    check_length,
    check_sizes,
    example_tokens,
    start,
    start_residual,
)


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
        check_sizes(vocab_size=vocab_size, layers=layers, max_length=max_length)
        check_heads(hidden, heads)
        check_dropout(dropout)
        self.max_length = max_length
        self.token = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.drop = nn.Dropout(dropout)
        blocks = [Block(hidden, heads, dropout, causal=True) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab_size, bias=False)
        self.apply(start)
        start_residual((each for block in blocks for each in (block.attention.out, block.down)), layers)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (batch, length) -> logits (batch, length, vocab_size)."""
        length = tokens.shape[1]
        check_length(length, self.max_length)
        x = self.drop(self.token(tokens) + self.position(torch.arange(length, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def example_inputs(self) -> tuple[Tensor]:
        """A small input of the right kind: token ids (2, 8)."""
        return (example_tokens(self.token, self.max_length),)
