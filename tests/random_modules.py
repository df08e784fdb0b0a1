"""Small models of layers in any order, as people write them: plain torch, sizes that divide nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ACTIVATIONS: dict[str, Any] = {
    "gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh, "softplus": nn.Softplus, "mish": nn.Mish,
    "sigmoid": nn.Sigmoid, "leaky": lambda: nn.LeakyReLU(0.1), "elu": nn.ELU, "prelu": nn.PReLU,
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of a trunk. `around` it: "" nothing, "pre" x + f(norm(x)), "post" norm(x + f(x))."""

    kind: str
    around: str = ""
    norm: str = "layer"
    bias: bool = True
    inner: int = 0
    act: str = "gelu"
    heads: int = 1
    kv_heads: int = 1
    causal: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Spec:
    """A model: tokens or features in, layers, a head. `length` 0: samples have no sequence."""

    layers: tuple[Layer, ...]
    hidden: int
    head_size: int
    length: int
    tokens: int = 0
    features: int = 0
    classes: int = 0
    values: int = 0
    positions: bool = False
    tied: bool = False
    final_norm: str = ""
    twice: int = -1
    frozen: int = -1
    example: bool = True
    dropout: float = 0.0


class Channels(nn.GroupNorm):
    """Group norm over the last dim, each position by itself."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return super().forward(input.flatten(0, -2)).view_as(input)


def norm_of(kind: str, width: int) -> nn.Module:
    if kind == "group":
        return Channels(2 if width % 2 == 0 else 1, width)
    return nn.RMSNorm(width) if kind == "rms" else nn.LayerNorm(width, bias=kind != "scale")


class Joint(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.size, self.causal, self.dropout = size, layer.causal, layer.dropout
        self.qkv = nn.Linear(hidden, 3 * layer.heads * size, bias=layer.bias)
        self.out = nn.Linear(layer.heads * size, hidden, bias=layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Grouped(nn.Module):
    """Attention by hand, with fewer key and value heads than query heads."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.causal = layer.heads, layer.kv_heads, size, layer.causal
        self.q = nn.Linear(hidden, layer.heads * size, bias=layer.bias)
        self.k = nn.Linear(hidden, layer.kv_heads * size, bias=layer.bias)
        self.v = nn.Linear(hidden, layer.kv_heads * size, bias=layer.bias)
        self.out = nn.Linear(layer.heads * size, hidden, bias=False)
        self.drop = nn.Dropout(layer.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        scores = q @ k.transpose(-2, -1) / self.size**0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size))
        return out


class Torchs(nn.Module):
    """Torch's own attention."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        heads = layer.heads if hidden % layer.heads == 0 else 1
        self.inside = nn.MultiheadAttention(hidden, heads, layer.dropout, bias=layer.bias, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inside(x, x, x, need_weights=False)[0]
        return out


class Plain(nn.Module):
    """Up, activation, down."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, layer.inner, bias=layer.bias)
        self.act = ACTIVATIONS[layer.act]()
        self.drop = nn.Dropout(layer.dropout)
        self.down = nn.Linear(layer.inner, hidden, bias=layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.drop(self.act(self.up(x))))
        return out


class Gated(nn.Module):
    """act(gate) * up, down."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, layer.inner, bias=layer.bias)
        self.up = nn.Linear(hidden, layer.inner, bias=layer.bias)
        self.act = ACTIVATIONS[layer.act]()
        self.down = nn.Linear(layer.inner, hidden, bias=layer.bias)
        self.dropout = layer.dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.gate(x)) * self.up(x)
        out: Tensor = self.down(functional.dropout(inner, self.dropout, self.training))
        return out


class Packed(nn.Module):
    """Gate and up in one linear."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.both = nn.Linear(hidden, 2 * layer.inner, bias=layer.bias)
        self.down = nn.Linear(layer.inner, hidden, bias=layer.bias)
        self.act = ACTIVATIONS[layer.act]()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        out: Tensor = self.down(self.act(gate) * up)
        return out


class Dense(nn.Module):
    """One linear and an activation."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=layer.bias)
        self.act = ACTIVATIONS[layer.act]()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x))
        return out


class Scaled(nn.Module):
    """A parameter of its own, without a submodule."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _norm(layer: Layer, hidden: int, size: int) -> nn.Module:
    return norm_of(layer.norm, hidden)


def _dropout(layer: Layer, hidden: int, size: int) -> nn.Module:
    return nn.Dropout(layer.dropout)


KINDS: dict[str, Any] = {
    "joint": Joint, "grouped": Grouped, "torchs": Torchs, "plain": Plain, "gated": Gated, "packed": Packed,
    "dense": Dense, "scaled": Scaled, "norm": _norm, "dropout": _dropout,
}  # fmt: skip
ATTENTION = ("joint", "grouped", "torchs")


class Around(nn.Module):
    """A residual connection with its norm."""

    def __init__(self, layer: Layer, hidden: int, size: int) -> None:
        super().__init__()
        self.before = layer.around == "pre"
        self.norm = norm_of(layer.norm, hidden)
        self.body = KINDS[layer.kind](layer, hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(self.norm(x)) if self.before else self.norm(x + self.body(x))
        return out


class Model(nn.Module):
    """What a `Spec` says."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.hidden
        self.enter = nn.Embedding(spec.tokens, width) if spec.tokens else nn.Linear(spec.features, width)
        if spec.positions:
            self.position = nn.Embedding(spec.length + 3, width)
        self.drop = nn.Dropout(spec.dropout)
        self.layers = nn.ModuleList(
            (Around if layer.around else KINDS[layer.kind])(layer, width, spec.head_size) for layer in spec.layers
        )
        if spec.final_norm:
            self.norm = norm_of(spec.final_norm, width)
        self.head = nn.Linear(width, spec.classes or spec.values, bias=not spec.tied)
        if spec.tied:
            self.head.weight = self.enter.weight
        if spec.frozen >= 0:
            self.layers[spec.frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.spec.positions:
            x = x + self.position(torch.arange(x.shape[1]))
        x = self.drop(x)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.spec.twice:
                x = layer(x)
        if self.spec.final_norm:
            x = self.norm(x)
        out: Tensor = self.head(x)
        return out


class Telling(Model):
    """Also says what it takes."""

    def example_inputs(self) -> Tensor:
        spec = self.spec
        shape = (2, spec.length) if spec.length else (2,)
        if spec.tokens:
            return torch.arange(2 * (spec.length or 1)).view(shape) % spec.tokens
        return torch.linspace(-1, 1, 2 * (spec.length or 1) * spec.features).view(*shape, -1).to(self.head.weight.dtype)


def build(spec: Spec) -> Model:
    return (Telling if spec.example else Model)(spec)
