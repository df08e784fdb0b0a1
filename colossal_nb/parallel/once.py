"""`once`: what one rank does while the others wait, such as writing a file or downloading data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from colossal_nb.parallel import objects
from colossal_nb.parallel.handle import tell
from colossal_nb.parallel.sharing import shared
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as

Result = TypeVar("Result")


@called_as("@cnb.once on a function, or with cnb.once() as mine: a block")
def once(function: Callable[..., Result] | None = None) -> Any:
    """One rank runs it, the others wait until it is done.

    `@cnb.once` on a function: rank 0 calls it and every rank gets its result (or its error). Tensors and arrays in the
    result are in memory once for all ranks of a host; a rank that writes into them writes into pages of its own.
    `with cnb.once() as mine:` a block: rank 0 first, with mine=True, then the others, with mine=False, so that
    `if mine: download()` followed by `load()` is right. A block that never asks for `mine` runs on every rank, and it
    is said so after the cell. Collective.
    """
    if function is None:
        return _block()
    if not callable(function):
        raise ValueError(f"once takes a function, not {type(function).__name__}: cnb.once(download)(url)")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Result:
        group = World.current().taking_part()
        value: Any = None
        failure: Exception | None = None
        if group.index == 0:
            try:
                value = function(*args, **kwargs)
            except Exception as error:
                failure = error
        of = f"once {function.__name__}"
        failure = objects.broadcast(failure, group, 0, of)
        if failure is not None:
            raise failure
        if group.size > 1:
            value = shared(value, group, of)
        return value  # type: ignore[no-any-return]

    return called


class Mine(int):
    """True on the rank that goes first, False on the others; remembers whether anybody has looked."""

    looked = False

    def __bool__(self) -> bool:
        self.looked = True
        return int(self) == 1

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))


_ALL_RAN_IT = (
    "every rank ran the block of `with cnb.once()`, one of them first, because the block did not ask whose turn it is: "
    "for one rank alone write `with cnb.once() as mine:` and `if mine:` inside, or a function under @cnb.once"
)


@contextmanager
def _block() -> Iterator[Mine]:
    world = World.current()
    group = world.taking_part()
    mine = Mine(group.index == 0)
    if group.index != 0:
        group.run("barrier", [], of="once")
    yield mine
    if group.index == 0:
        group.run("barrier", [], of="once")
    if group.size > 1 and not mine.looked and _ALL_RAN_IT not in world.notes:  # Python cannot leave a block out
        tell(_ALL_RAN_IT)
