"""Tensors inside what models take and return: tuples, lists, dicts and their subclasses, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors inside `value`, in the order in which `rebuild` meets them."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    rebuild(value, keep)
    return found


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside `value`, each with how it is reached: `name[0]['mask']`."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from named_leaves(part, f"{name}[{number}]")
    else:
        yield from ((name, tensor) for tensor in leaves(value))


def rebuild(value: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of the structure with `replace(tensor)` in the place of every tensor.

    What is not a tensor or a known container (a cache object, a string, None) is handed through as it is.
    """
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, tuple):
        parts = [rebuild(part, replace) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) in (list, set, frozenset):
        return type(value)(rebuild(part, replace) for part in value)
    if isinstance(value, dict):
        return _rebuild_dict(value, replace)
    if isinstance(value, Mapping):
        return type(value)({key: rebuild(part, replace) for key, part in value.items()})  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts_by_name = {f.name: rebuild(getattr(value, f.name), replace) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **parts_by_name)
    return value


def _rebuild_dict(value: dict[Any, Any], replace: Callable[[torch.Tensor], Any]) -> dict[Any, Any]:
    """Subclasses (OrderedDict, defaultdict, output classes with fields as keys) stay what they are."""
    fresh = {key: rebuild(part, replace) for key, part in value.items()}
    if type(value) is dict:
        return fresh
    same = copy.copy(value)
    for key, part in fresh.items():
        same[key] = part
    return same
