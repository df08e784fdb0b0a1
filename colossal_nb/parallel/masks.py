"""The dropouts of torch with numbers of ours: the same arithmetic, what is drawn comes from whoever installs them.

Attention with dropout is computed in the open (the scores exist), since no fused kernel takes a mask of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.parallel.attention import attention_arguments, attention_weights, repeated
from colossal_nb.parallel.recurrent import RECURRENT, between_layers

# What all of torch's dropouts end in, under whatever name they were imported; the "feature" ones drop whole channels.
# A function mode would not do: it is off inside a backward, where checkpointed blocks run again.
ENDINGS = tuple(f"{kind}dropout{end}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_"))
RRELU = ("rrelu", "rrelu_")
REPLACED = (*ENDINGS, *RRELU, *RECURRENT)
ATTENTION = functional.scaled_dot_product_attention
ALPHA = 1.7580993408473766  # where torch's alpha dropout puts what it drops
Fill = Callable[[Tensor, torch.Generator], Any]


@dataclass(frozen=True)
class Masks:
    """`drawn(shape, like, fill)`: a tensor of that shape on the device of `like`, filled sample by sample.
    `time_first(x)`: whether the samples are dim 1."""

    drawn: Callable[[torch.Size, Tensor, Fill], Tensor]
    time_first: Callable[[Tensor], bool]

    @contextmanager
    def installed(self, named: list[Named]) -> Iterator[None]:
        """Inside, torch's dropouts are these, also where code has attention under a name of its own."""
        places = [(vars(room), name) for room in (torch, torch._VF) for name in REPLACED]
        places += [(vars(functional), name) for name in (ATTENTION.__name__, "rrelu_")]  # torch's own, by another name
        places += [(each.room, each.name) for each in named]
        before = [(room, name, room.get(name)) for room, name in places]
        for room, name in places:
            room[name] = self._replacement(name if name in REPLACED else ATTENTION.__name__)
        try:
            yield
        finally:
            for room, name, value in before:
                if value is None:
                    del room[name]
                else:
                    room[name] = value

    def _replacement(self, name: str) -> Callable[..., Any]:
        """What stands under a name while the model runs."""
        if name == ATTENTION.__name__:
            return self._attention
        plain = getattr(torch._C._VariableFunctions, name)
        if name in RECURRENT:
            return between_layers(plain, lambda x, p: self._drop("dropout", x, p))

        def rrelu(
            input: Tensor,  # noqa: A002 - torch's own name
            lower: float = 1 / 8,
            upper: float = 1 / 3,
            training: bool = False,
            generator: torch.Generator | None = None,
        ) -> Any:
            if training and lower < upper and generator is None:
                return self._rrelu(name, input, lower, upper)
            return plain(input, lower, upper, training, generator)

        if name in RRELU:
            return rrelu

        def dropout(input: Tensor, p: float, train: bool) -> Any:  # noqa: A002 - torch's own name
            return self._dropout(name, input, p) if train and p > 0 else plain(input, p, train)

        return dropout

    def _dropout(self, name: str, x: Tensor, p: float) -> Tensor:
        if self.time_first(x):
            return self._drop(name, x.transpose(0, 1), p).transpose(0, 1)
        return self._drop(name, x, p)

    def _drop(self, name: str, x: Tensor, p: float) -> Tensor:
        channels = name.startswith("feature")
        shape = torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)]) if channels else x.shape
        mask, rest = self._mask(shape, p, x), None
        if "alpha" in name:
            kept = (mask > 0).to(x.dtype)
            scale = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
            mask, rest = kept * scale, (kept - 1 + p) * (ALPHA * scale)
        if name.endswith("_"):
            return x.mul_(mask) if rest is None else x.mul_(mask).add_(rest)
        return x * mask if rest is None else x * mask + rest

    def _rrelu(self, name: str, x: Tensor, lower: float, upper: float) -> Tensor:
        slopes = self.drawn(x.shape, x, lambda row, key: row.uniform_(lower, upper, generator=key)).to(x.dtype)
        slopes = slopes.where(x <= 0, 1.0)
        return x.mul_(slopes) if name.endswith("_") else x * slopes

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        given = attention_arguments(*args, **kwargs)
        if not given["dropout_p"]:
            result: Tensor = ATTENTION(*args, **kwargs)
            return result
        weights = attention_weights(given)
        return (weights * self._mask(weights.shape, given["dropout_p"], weights)) @ repeated(given["value"], given)

    def _mask(self, shape: torch.Size, p: float, like: Tensor) -> Tensor:
        """0 or 1 / (1 - p) for every element of `shape`."""
        scale = 0.0 if p == 1 else 1 / (1 - p)
        drawn = self.drawn(shape, like, lambda row, key: row.bernoulli_(1 - p, generator=key).mul_(scale))
        return drawn.to(dtype=like.dtype)


@dataclass(frozen=True)
class Named:
    """A name in the globals of somebody's code. A copy of a model has the same code."""

    room: dict[str, Any]
    name: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Named:
        return self


def attention_by_name(model: nn.Module) -> list[Named]:
    """Where the code of a model's modules has torch's attention under a name of its own."""
    code = {id(room): room for room in (_globals(module) for module in model.modules()) if room is not vars(functional)}
    return [Named(room, name) for room in code.values() for name, value in room.items() if value is ATTENTION]


def _globals(module: nn.Module) -> dict[str, Any]:
    return getattr(getattr(type(module).forward, "__func__", type(module).forward), "__globals__", {})
