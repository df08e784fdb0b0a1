"""Small models of the kinds that people write: each believes its width in its own way."""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class SeparateAttention(nn.Module):
    """q, k, v as three linears; the heads in an integer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(causal(q, k, v).transpose(1, 2).reshape(batch, length, -1))


class NanoAttention(nn.Module):
    """Fused c_attn, split by an integer, the width read from x.shape."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = heads, hidden
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = causal(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class InterleavedAttention(nn.Module):
    """Fused, with q, k and v of one head next to each other."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3 * self.size)).transpose(1, 2).chunk(3, -1)
        return self.o(causal(q, k, v).transpose(1, 2).flatten(2))


class GroupedAttention(nn.Module):
    """Few key/value heads (1: multi-query), query and key normalised per head with a learned scale."""

    kv_heads = 1

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.size = hidden // heads
        self.q = nn.Linear(hidden, hidden)
        self.k, self.v = (nn.Linear(hidden, self.kv_heads * self.size, bias=False) for _ in range(2))
        self.norm_q, self.norm_k = nn.RMSNorm(self.size), nn.RMSNorm(self.size)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(causal(self.norm_q(q), self.norm_k(k), v).transpose(1, 2).flatten(2))


class TwoGroupsAttention(GroupedAttention):
    kv_heads = 2


class GatedMLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(3 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NormedMLP(nn.Module):
    """A norm over all features between the two linears: nothing that may be dealt."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(hidden, 2 * hidden),
            nn.LayerNorm(2 * hidden),
            nn.Linear(2 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


class ParallelLayer(nn.Module):
    """Attention and MLP side by side, from one linear if `fused`, into one linear."""

    def __init__(self, hidden: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.size = hidden // heads
        widths = [hidden, hidden, hidden, 3 * hidden]
        self.ins = nn.ModuleList([nn.Linear(hidden, sum(widths))] if fused else [nn.Linear(hidden, w) for w in widths])
        self.out = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.cat([part(x) for part in self.ins], -1)
        width = made.shape[-1] // 6
        q, k, v, inner = made.split([width, width, width, 3 * width], -1)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (q, k, v))
        return self.out(torch.cat((causal(q, k, v).transpose(1, 2).flatten(2), F.gelu(inner)), -1))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2, self.mlp = nn.LayerNorm(hidden), attention, nn.LayerNorm(hidden), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Embeddings, blocks, head. `kind` names the attention, `mlp` the MLP."""

    attentions: ClassVar = {
        "separate": SeparateAttention,
        "nano": NanoAttention,
        "interleaved": InterleavedAttention,
        "multi-query": GroupedAttention,
        "two groups": TwoGroupsAttention,
        "beside an MLP": partial(ParallelLayer, fused=False),
        "fused with an MLP": partial(ParallelLayer, fused=True),
    }

    def __init__(
        self,
        kind: str,
        mlp: type[nn.Module] = GatedMLP,
        *,
        vocabulary: int = 67,
        hidden: int = 16,
        heads: int = 4,
        tied: bool = False,
        zero: bool = False,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(16, hidden)
        self.blocks = nn.ModuleList(Block(self.attentions[kind](hidden, heads), mlp(hidden), hidden) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.token.weight
        if zero:
            for block in self.blocks:
                nn.init.zeros_(list(block.attention.children())[-1].weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example_inputs(self) -> tuple[Tensor]:
        return (torch.arange(16).view(2, 8) * 5 % self.token.num_embeddings,)
