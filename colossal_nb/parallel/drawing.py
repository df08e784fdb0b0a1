"""Weights drawn after `parallelize` (`torch.nn.init`, `reset_parameters`, `model.apply(init)`): those of one device.

What lies here only in part, or on another stage, is drawn whole, so that the random state goes on alike on all ranks
and fans are those of the whole matrix; this rank's part is kept. Ours stands inside torch's functions, so that it is
also what somebody imported by name before, and in front of the two methods of Parameter by which people draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init

from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part
from colossal_nb.parallel.world import World
from colossal_nb.plan import Layout

_FANS = "_calculate_fan_in_and_fan_out"
_TRUNCATED = "_no_grad_trunc_normal_"  # draws by several methods, as often as what it drew asks for
_FUNCTIONS = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_", "eye_", "dirac_", _TRUNCATED,
)  # fmt: skip
_METHODS = ("uniform_", "normal_")
_MARK = "_colossal_draws_whole"


def install() -> None:
    """From now on parameters of parallel models are drawn as on one device."""
    for name in _FUNCTIONS:
        _refill(name, _whole)
    for name in _METHODS:
        own = getattr(nn.Parameter, name)
        if not hasattr(own, _MARK):
            ours = _method(own)
            setattr(ours, _MARK, True)
            setattr(nn.Parameter, name, ours)
    _refill(_FANS, _of_the_whole)


def _refill(name: str, wrapped: Callable[[Any], Any]) -> None:
    """Let a function of torch.nn.init run ours, and ours what it ran; it stays the object that others have."""
    function: FunctionType = getattr(init, name)
    if hasattr(function, _MARK):
        return
    own = FunctionType(function.__code__, function.__globals__, name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    setattr(init, f"_colossal{name}", wrapped(own))
    scope: dict[str, Any] = {}
    exec(f"def {name}(*args, **kwargs): return _colossal{name}(*args, **kwargs)", scope)
    function.__code__ = scope[name].__code__
    function.__defaults__ = function.__kwdefaults__ = None
    setattr(function, "__wrapped__", own)  # noqa: B010  its signature
    setattr(function, _MARK, True)


def _whole(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def draw(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        layout = _cut(tensor)
        if layout is None:
            return own(tensor, *args, **kwargs)
        with torch.no_grad():
            whole = torch.empty(layout.global_shape, dtype=tensor.dtype, device=tensor.device)
            own(whole, *args, **kwargs)
            part = local_part(whole, layout, World.current().rank)
            return tensor if part is None else tensor.copy_(part)

    return draw


def _method(own: Callable[..., Any]) -> Callable[..., Any]:
    whole = _whole(own)

    @functools.wraps(own)
    def draw(p: Tensor, *args: Any, **kwargs: Any) -> Any:
        refused = p.requires_grad and torch.is_grad_enabled()  # by torch
        return (own if refused else whole)(p, *args, **kwargs)

    return draw


def _of_the_whole(own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(own)
    def fans(tensor: Tensor) -> Any:
        layout = _cut(tensor)
        return own(tensor if layout is None else torch.empty(layout.global_shape, device="meta"))

    return fans


def _cut(tensor: Any) -> Layout | None:
    """The layout of what this rank does not have whole."""
    layout = layout_of(tensor) if isinstance(tensor, Tensor) else None
    whole = layout is None or layout.local_shape(World.current().rank) == layout.global_shape
    return None if whole else layout
