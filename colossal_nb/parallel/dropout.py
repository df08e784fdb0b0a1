"""Dropout whose masks are keyed by (seed, call, site, global sample, element): equal under every strategy.

A site is a module and which of its dropouts in this forward. Each sample's mask is drawn from a generator of its own,
in the shape that the whole model has there; a rank that holds some features or heads takes its part of it. Attention
with dropout is computed in the open (the scores exist), since no fused kernel takes a mask of ours.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.parallel.compat import in_backward

Site = tuple[str, int]
Features = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Per sharded region its name and, per rank, the features that its row-parallel linear reads there."""
# In torch.nn.functional; of these dropout1d, 2d, 3d drop whole channels: the dims behind the channel share its fate.
# A function mode would not do: it is off inside a backward, where checkpointed blocks run again.
REPLACED = ("dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention")


class KeyedDropout:
    """Active while the model runs in training mode. `sites`: the shapes that the whole model has at its sites."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.sites: dict[Site, torch.Size] | None = None
        self.features: Features = ()
        self.index = 0
        self._recording = False
        self._inside: list[str] = []
        self._parts: dict[int, tuple[int, int, int]] = {}
        self._calls: Counter[tuple[int, str, bool]] = Counter()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(_Enter(self, name))
            module.register_forward_hook(_Leave(self), always_call=True)

    def begin(self, call: int, start: int, stop: int) -> None:
        """The samples `start` to `stop` - 1 of the call's global batch are next.

        Their key becomes torch's seed: checkpointed blocks, which run again when other samples may be under way, find
        it again with the random state that torch restores for them.
        """
        key = _number(self.seed, call, start, stop)
        torch.manual_seed(key)
        self._parts[key] = call, start, stop
        self._inside.clear()

    def place(self) -> tuple[str, dict[tuple[int, str], int]]:
        """Which site is next, for `again`."""
        again = in_backward()
        counts = {(seed, name): count for (seed, name, second), count in self._calls.items() if second == again}
        return self._inside[-1] if self._inside else "", counts

    @contextmanager
    def again(self, place: tuple[str, dict[tuple[int, str], int]]) -> Iterator[None]:
        """Inside, a part of a forward runs a second time, in a backward, from the place where it began."""
        name, counts = place
        before, inside = self._calls, self._inside
        self._calls = Counter({(seed, site, True): count for (seed, site), count in counts.items()})
        self._inside = [name]
        try:
            yield
        finally:
            self._calls, self._inside = before, inside

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, dropout is keyed; torch's random state is afterwards what it was."""
        state = torch.get_rng_state()
        before = {name: getattr(functional, name) for name in REPLACED}
        for name, func in before.items():
            setattr(functional, name, self._replacement(name, func))
        try:
            yield
        finally:
            for name, func in before.items():
                setattr(functional, name, func)
            torch.set_rng_state(state)
            self._parts.clear()
            self._calls.clear()

    def record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the whole model once in training mode and note the shapes at its sites; model and states stay."""
        modes = [(module, module.training) for module in model.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self.sites, self._recording = {}, True
        model.train()
        try:
            with torch.no_grad(), self.running():
                self.begin(0, 0, 1)
                model(*args, **kwargs)
        finally:
            self._recording = False
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _replacement(self, name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in torch.nn.functional under a name while the model runs."""
        if name == "scaled_dot_product_attention":
            return lambda *args, **kwargs: self._attention(func, args, kwargs)

        def dropout(*args: Any, **kwargs: Any) -> Any:
            given = _arguments(func, args, kwargs)
            if given["training"] and given["p"] > 0:
                return self._dropout(given, name != "dropout")
            return func(*args, **kwargs)

        return dropout

    def _dropout(self, given: dict[str, Any], channels: bool) -> Tensor:
        x: Tensor = given["input"]
        shape = torch.Size([*x.shape[:2], *[1] * (x.dim() - 2)]) if channels else x.shape
        mask = self._mask(shape, given["p"], x)
        if given["inplace"]:
            return x.mul_(mask)
        return x * mask

    def _attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = _attention_arguments(*args, **kwargs)
        if not given["dropout_p"]:
            result: Tensor = func(*args, **kwargs)
            return result
        weights = attention_weights(given)
        return (weights * self._mask(weights.shape, given["dropout_p"], weights)) @ _repeated(given["value"], given)

    def _mask(self, shape: torch.Size, p: float, like: Tensor) -> Tensor:
        """0 or 1 / (1 - p) for every element of `shape`."""
        site = self._site()
        if self._recording:
            assert self.sites is not None
            self.sites[site] = shape
        call, start, stop = self._parts.get(torch.initial_seed(), (0, 0, shape[0]))
        count = stop - start
        rows = shape[0]
        tail = [rows // count, *shape[1:]] if rows % count == 0 else list(shape)
        held = self._held(site, shape)
        if held is not None:
            dim, whole, indices = held
            tail[dim] = whole
        drawn = torch.empty(count if rows % count == 0 else 1, *tail)
        for sample in range(len(drawn)):
            generator = torch.Generator().manual_seed(_number(self.seed, call, *site, start + sample))
            drawn[sample].bernoulli_(1 - p, generator=generator)
        if held is not None:
            drawn = drawn.index_select(dim if dim < 0 else dim + 1, torch.tensor(indices))
        scale = 0.0 if p == 1 else 1 / (1 - p)
        return drawn.mul_(scale).reshape(shape).to(device=like.device, dtype=like.dtype)

    def _site(self) -> Site:
        """The innermost module and the number of this dropout among those of its calls for these samples."""
        name = self._inside[-1] if self._inside else ""
        key = torch.initial_seed(), name, in_backward()
        self._calls[key] += 1
        return name, self._calls[key] - 1

    def _held(self, site: Site, shape: torch.Size) -> tuple[int, int, list[int]] | None:
        """The dim of a sample's mask that is cut on this rank, its whole length, and what this rank has of it.

        Heads are dim 1 of four, features the last dim of fewer.
        """
        whole_shape = (self.sites or {}).get(site)
        if not self.features or whole_shape is None or len(whole_shape) != len(shape):
            return None
        dim = 1 if len(shape) == 4 else -1
        whole, local = whole_shape[dim], shape[dim]
        for region, parts in self.features:
            if whole == local or not (not region or site[0] == region or site[0].startswith(f"{region}.")):
                continue
            each, rest = divmod(len(set().union(*parts)), whole)
            mine = parts[self.index]
            if not rest and each and local * each == len(mine):
                return dim, whole, [feature // each for feature in mine[::each]]
        return None


@dataclass(frozen=True)
class _Enter:
    """A pre-hook: a module begins. Objects, so that a copy of the model tells a copy of the KeyedDropout."""

    dropout: KeyedDropout
    name: str

    def __call__(self, *_: Any) -> None:
        self.dropout._inside.append(self.name)


@dataclass(frozen=True)
class _Leave:
    """A hook: the innermost module ends."""

    dropout: KeyedDropout

    def __call__(self, *_: Any) -> None:
        if self.dropout._inside:
            self.dropout._inside.pop()


def attention_weights(given: dict[str, Any]) -> Tensor:
    """softmax(q k^T / sqrt(width)) with its masks; a row in which nothing may be seen is 0."""
    query, key = given["query"], _repeated(given["key"], given)
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale
    mask = given["attn_mask"]
    if given["is_causal"]:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return torch.softmax(scores, -1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)


def _repeated(x: Tensor, given: dict[str, Any]) -> Tensor:
    """Keys or values as often as there are query heads."""
    if not given["enable_gqa"]:
        return x
    return x.repeat_interleave(given["query"].shape[-3] // x.shape[-3], dim=-3)


def _attention_arguments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of scaled_dot_product_attention by name; it has no signature of its own."""
    return {
        "query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout_p,
        "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
    }  # fmt: skip


def _arguments(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = _signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _number(*key: Any) -> int:
    """63 bits of a key."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
