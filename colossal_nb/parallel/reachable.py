"""The trained tensors that a loss function can reach: of its module, its closure, its arguments, the globals it names.

Only for finding them by the same names on every rank, nearest first. What is overlooked here is found in the graph of
the loss, and refused.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

MOST_OBJECTS = 500  # looked into in one search
MOST_ELEMENTS = 64  # of one list or dict
_LIBRARIES = ("torch", "numpy", "colossal_nb", "builtins")
Named = tuple[str, Any]


def trained_tensors(loss_fn: Any) -> dict[str, Tensor]:
    """Leaves that want a gradient, by what a program calls them."""
    found: dict[str, Tensor] = {}
    waiting: deque[Named] = deque([("loss_fn", loss_fn)])
    seen: dict[int, Any] = {}
    looked = 0
    while waiting and looked < MOST_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            if value.is_leaf and value.requires_grad:
                found.setdefault(name if name not in found else f"{name} {len(found)}", value)
        else:
            looked += 1
            waiting.extend(_inside(name, value))
    return found


def _inside(name: str, value: Any) -> Iterator[Named]:
    """What one object leads to."""
    if isinstance(value, functools.partial):
        yield from (("loss_fn", value.func), ("args", list(value.args)), *value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__self__), (name, value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, nn.Module):
        yield from _of_module(name, value)
    elif type(value) in (list, tuple):
        yield from ((f"{name}[{at}]", each) for at, each in enumerate(islice(value, MOST_ELEMENTS)))
    elif isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", each) for key, each in islice(value.items(), MOST_ELEMENTS))
    elif is_of_user(type(value)) and not isinstance(value, type | torch.optim.Optimizer):
        yield from _of_object(name, value)


def _of_function(function: types.FunctionType) -> Iterator[Named]:
    if not is_of_user(function):
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from (("default", each) for each in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    """Of globals, also in functions that are made inside; names of attributes are among them."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _of_module(name: str, module: nn.Module) -> Iterator[Named]:
    for key, p in module.named_parameters():
        yield f"{name}.{key}", p
    for inner in module.modules():
        if is_of_user(type(inner)):
            yield name, type(inner).forward
            own = ((key, value) for key, value in vars(inner).items() if not key.startswith("_"))
            yield from ((f"{name}.{key}", value) for key, value in own)


def _of_object(name: str, value: Any) -> Iterator[Named]:
    if callable(value):
        yield name, type(value).__call__
    yield from ((f"{name}.{key}", each) for key, each in getattr(value, "__dict__", {}).items())


def is_of_user(value: Any) -> bool:
    """Whether a class or function is none of the libraries', whose globals lead everywhere."""
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] not in _LIBRARIES
