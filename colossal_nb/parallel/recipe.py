"""The operations that made tensors, written down so that the tensors need no memory until somebody wants them.

A storage that such an operation made is emptied at once; its values are those that its operations make when they run
again, in their order, each with the random state that it had. They run on other memory than the tensors', so that what
a tensor has become since never enters the making of another.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.trace import Storage, storage_of

Random = tuple[torch.Generator, Tensor]


@dataclass(frozen=True)
class Place:
    """A tensor as a view of a storage."""

    storage: Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Place:
        return Place(storage_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of another storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Step:
    """One operation. `args`, `kwargs` have a `Place` for a tensor of the recipe and a copy of any other; `made` are the
    places of new results (None: not kept empty), nothing if it only writes; `random` is the state it draws from.
    `afresh`: it writes all of its storages and asks not for what was there."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[Place | None, ...]
    reads: frozenset[Storage]
    writes: frozenset[Storage]
    random: Random | None
    afresh: bool = False

    def run(self, rooms: dict[Storage, torch.UntypedStorage]) -> None:
        """Again, on these storages."""
        args, kwargs = _filled((self.args, self.kwargs), rooms)
        if self.random is None:
            result = self.func(*args, **kwargs)
        else:
            generator, state = self.random
            before = generator.get_state()
            generator.set_state(state)
            try:
                result = self.func(*args, **kwargs)
            finally:
                generator.set_state(before)
        for place, value in zip(self.made, leaves(result) if self.made else (), strict=True):
            if place is not None:
                place.on(rooms[place.storage]).copy_(value)


@dataclass(eq=False)
class Recipe:
    """`sizes`: the bytes of every storage that the steps made. The storages are kept: an address is never used twice.
    `waiting`: the tensors without values, with their own classes."""

    steps: list[Step] = field(default_factory=list)
    sizes: dict[Storage, int] = field(default_factory=dict)
    storages: dict[Storage, torch.UntypedStorage] = field(default_factory=dict)
    waiting: list[tuple[weakref.ref[Tensor], type[Tensor]]] = field(default_factory=list)

    def knows(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.sizes

    def keys(self, value: Any) -> frozenset[Storage]:
        """The recipe's storages inside `value`."""
        return frozenset({storage_of(tensor) for tensor in leaves(value)} & self.sizes.keys())

    def empty(self, tensor: Tensor) -> None:
        """Take the memory of a tensor that the next step makes."""
        storage = tensor.untyped_storage()
        key = storage_of(tensor)
        self.storages[key], self.sizes[key] = storage, storage.nbytes()
        storage.resize_(0)

    def placed(self, value: Any) -> Any:
        """`value` with a place for every tensor of the recipe and a copy of every other."""
        return rebuild(value, lambda tensor: Place.of(tensor) if self.knows(tensor) else tensor.detach().clone())

    def with_values(self, value: Any) -> Any:
        """`value` with full tensors, for one use, in the place of empty ones."""
        rooms = self.values(self.keys(value))
        return rebuild(value, lambda t: Place.of(t).on(rooms[storage_of(t)]) if self.knows(t) else t)

    def values(self, wanted: Iterable[Storage]) -> dict[Storage, torch.UntypedStorage]:
        """What these storages hold after all steps, in new memory."""
        rooms: dict[Storage, torch.UntypedStorage] = {}
        self._run(set(wanted), rooms)
        return rooms

    def fill(self, wanted: Iterable[Storage]) -> None:
        """Give these storages, which are empty, their values."""
        own = {key: self.storages[key] for key in wanted}
        for key, storage in own.items():
            storage.resize_(self.sizes[key])
        self._run(set(own), dict(own))

    def _run(self, wanted: set[Storage], rooms: dict[Storage, torch.UntypedStorage]) -> None:
        steps, last_use = self._leading_to(wanted)
        with torch.no_grad():
            for number, step in enumerate(steps):
                touched = step.reads | step.writes
                for key in touched - rooms.keys():
                    rooms[key] = room(self.sizes[key])
                step.run(rooms)
                for key in touched - wanted:
                    if last_use[key] == number:
                        del rooms[key]

    def _leading_to(self, wanted: set[Storage]) -> tuple[list[Step], dict[Storage, int]]:
        """The steps that these storages depend on, in their order, and the last of them that touches each storage."""
        needed, backwards = set(wanted), []
        for step in reversed(self.steps):
            if step.writes & needed:
                needed |= step.reads | step.writes
                needed -= step.writes if step.afresh else set()
                backwards.append(step)
        steps = backwards[::-1]
        return steps, {key: number for number, step in enumerate(steps) for key in step.reads | step.writes}


def room(size_bytes: int) -> torch.UntypedStorage:
    """Memory that goes back to the system when it is let go, which small pieces of the heap would prevent."""
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).untyped_storage()


def _filled(value: Any, rooms: dict[Storage, torch.UntypedStorage]) -> Any:
    """`value` with tensors on `rooms` in the place of places."""
    if isinstance(value, Place):
        return value.on(rooms[value.storage])
    if isinstance(value, list | tuple):
        return type(value)(_filled(each, rooms) for each in value)
    if isinstance(value, dict):
        return {key: _filled(each, rooms) for key, each in value.items()}
    return value
