"""%timeit on ranks: the first rank of the cell decides the count, so that all do the same number of loops.

A statement with a collective in it would hang as soon as two ranks disagreed about how often to run it.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import IPython.core.magics.execution as execution

Agree = Callable[[str, float], float]
"""Takes a key and this rank's value, returns the first rank's value."""


def install(agree: Agree) -> None:
    """Make IPython's timer agree on the times by which it finds the count; the measured times stay each rank's own."""
    module: Any = execution
    base: Any = module.Timer
    number = itertools.count()

    class AgreedTimer(base):                                           # type: ignore[misc]
        def timeit(self, loops: int = 1) -> float:
            return agree(f"timeit{next(number)}", super().timeit(loops))

        def repeat(self, repeat: int = 5, loops: int = 1) -> list[float]:
            return [super(AgreedTimer, self).timeit(loops) for _ in range(repeat)]

    module.Timer = AgreedTimer
