"""A BERT with its masked-language head: attention in both directions, post-norm blocks. Plain sequential torch."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.models.parts import (
    Attention,
    check_dropout,
    check_heads,
    check_length,
    check_sizes,
    example_tokens,
    start,
)


class BERTBlock(nn.Module):
    """One layer: norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads, dropout, causal=False)
        self.norm_1 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """(batch, length, hidden) -> (batch, length, hidden). seen: bool (batch, 1, 1, length), False is padding."""
        x = self.norm_1(x + self.drop(self.attention(x, seen)))
        result: Tensor = self.norm_2(x + self.drop(self.down(functional.gelu(self.up(x)))))
        return result


class MaskedLanguageHead(nn.Module):
    """What BERT's output becomes before it meets the words: a dense layer of the same width, GELU, a norm."""

    def __init__(self, hidden: int, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> logits (..., vocab_size)."""
        logits: Tensor = self.decoder(self.norm(functional.gelu(self.dense(x))))
        return logits


class BERT(nn.Module):
    """An encoder over tokens that says which word stood at each place; the decoder reuses the token embedding.

    vocab_size, layers (blocks), hidden (width), heads (must divide hidden), max_length (longest sequence, tokens),
    types (kinds of segments), dropout (probability). Weights start normal with deviation 0.02, biases 0.
    """

    def __init__(
        self,
        vocab_size: int,
        layers: int,
        hidden: int,
        heads: int,
        max_length: int = 512,
        types: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers, max_length=max_length, types=types)
        check_heads(hidden, heads)
        check_dropout(dropout)
        self.max_length = max_length
        self.token = nn.Embedding(vocab_size, hidden)
        self.position = nn.Embedding(max_length, hidden)
        self.segment = nn.Embedding(types, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(BERTBlock(hidden, heads, dropout) for _ in range(layers))
        self.head = MaskedLanguageHead(hidden, vocab_size)
        self.apply(start)
        self.head.decoder.weight = self.token.weight

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, token_types: Tensor | None = None
    ) -> Tensor:
        """Token ids (batch, length) -> logits (batch, length, vocab_size).

        attention_mask (batch, length): 1 or True for words, 0 or False for padding, which no word looks at; all are
        words by default. token_types (batch, length): the segment of each token, 0 by default. Logits at padding mean
        nothing: give these places the target -100.
        """
        length = tokens.shape[1]
        check_length(length, self.max_length)
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        types = torch.zeros_like(tokens) if token_types is None else token_types
        positions = self.position(torch.arange(length, device=tokens.device))
        x = self.drop(self.norm(self.token(tokens) + positions + self.segment(types)))
        for block in self.blocks:
            x = block(x, seen)
        logits: Tensor = self.head(x)
        return logits

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Small inputs of the right kind, (2, 8) each: tokens, an attention mask, token types."""
        tokens = example_tokens(self.token, self.max_length)
        seen = torch.ones_like(tokens)
        seen[1, tokens.shape[1] // 2 + 1 :] = 0
        types = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens) % self.segment.num_embeddings
        return tokens, seen, types
