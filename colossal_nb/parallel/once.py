"""`once`: what one rank does while the others wait, such as writing a file or downloading data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from colossal_nb.parallel import objects
from colossal_nb.parallel.world import World

Result = TypeVar("Result")


def once(function: Callable[..., Result] | None = None) -> Any:
    """One rank runs it, the others wait until it is done.

    `@cnb.once` on a function: rank 0 calls it and every rank gets its result (or its error).
    `with cnb.once() as mine:` a block: rank 0 first, with mine=True, then the others, with mine=False, so that
    `if mine: download()` followed by `load()` is right. Collective.
    """
    if function is None:
        return _block()
    if not callable(function):
        raise ValueError(f"once takes a function, not {type(function).__name__}: cnb.once(download)(url)")

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Result:
        group = World.current().whole()
        outcome: tuple[bool, Any] = (True, None)
        if group.index == 0:
            try:
                outcome = (True, function(*args, **kwargs))
            except Exception as error:
                outcome = (False, error)
        fine, value = objects.broadcast(outcome, group, 0, f"once {function.__name__}")
        if not fine:
            raise value
        return value  # type: ignore[no-any-return]

    return called


@contextmanager
def _block() -> Iterator[bool]:
    group = World.current().whole()
    first = group.index == 0
    if not first:
        group.run("barrier", [], of="once")
    yield first
    if first:
        group.run("barrier", [], of="once")
