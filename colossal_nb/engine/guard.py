"""What is parallel never leaves its rank by value: another rank would take this one's part for its own."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from colossal_nb.cluster import parcel
from colossal_nb.parallel.handle import Parallel, find
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World


class IsParallel(ValueError):
    """A value is, or holds, a part of a parallel model."""


class GuardedPickler(parcel.Pickler):
    """Refuses parallel models and their optimizers at any depth; with `tensors` what lies in their memory as well."""

    def __init__(self, file: Any, namespace: dict[str, Any] | None, take: Callable[[Any], Any] | None,
                 tensors: bool = True) -> None:
        super().__init__(file, namespace, take)
        parallels = list(World.current().parallels)
        self._owned = {id(each) for parallel in parallels for each in (parallel.model, *parallel.optimizers)}
        self._memory = {place for parallel in parallels for each in _tensors(parallel) if (place := _place(each))}
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Parallel | World) or id(obj) in self._owned or find(obj) is not None:
            raise IsParallel("it is parallel, or holds something parallel")
        if self._tensors and isinstance(obj, torch.Tensor):
            if layout_of(obj) is not None or _place(obj) in self._memory:
                raise IsParallel("it holds a rank's part of a parallel model")
        elif not isinstance(obj, torch.Tensor) and is_parallel(obj):   # before its parts are taken
            raise IsParallel("it is parallel, or holds something parallel")
        return super().reducer_override(obj)


def is_parallel(value: Any) -> bool:
    """Whether this is a distributed parameter, or a model or optimizer that holds one."""
    if find(value) is not None:
        return True
    if isinstance(value, torch.nn.Module):
        tensors: list[Any] = list(value.parameters())
    elif isinstance(value, torch.optim.Optimizer):
        if any(value is each for parallel in World.current().parallels for each in parallel.optimizers):
            return True
        tensors = [each for group in value.param_groups for each in group["params"]]
    else:
        tensors = [value] if isinstance(value, torch.Tensor) else []
    return any(layout_of(each) is not None for each in tensors)


def _tensors(parallel: Parallel) -> Iterator[torch.Tensor]:
    """Everything of which this rank has its own part."""
    for p in parallel.parameters.values():
        yield p
        if p.grad is not None:
            yield p.grad
    for optimizer in parallel.optimizers:
        for state in optimizer.state.values():
            yield from (each for each in state.values() if isinstance(each, torch.Tensor) and each.dim())


def _place(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 for a tensor without any."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr() if tensor.untyped_storage().nbytes() else 0
