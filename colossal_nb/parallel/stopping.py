"""A press of Stop that lands where all ranks are at the same place: the exchange of a forward_backward.

Anywhere else one rank may have updated its weights and another not. So while a model is being trained a press waits a
moment for that exchange; where none comes (a slow step, a cell that does something else) it lands wherever a rank is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HOLD_S = 1.5
"""How long a press waits for the exchange; a model counts as being trained for so long after its last one."""


class Stopping:
    """What the side thread of a rank and its training steps tell each other. `land` makes the error to be raised."""

    def __init__(self) -> None:
        self.asked = False
        self.land: Callable[[], BaseException] = KeyboardInterrupt
        self._last_s = float("-inf")

    def seen(self) -> None:
        """A forward_backward begins, or has its exchange."""
        self._last_s = time.monotonic()

    def landed(self) -> BaseException:
        """The error to be raised, on a rank whose own press may still be on its way."""
        self.asked = False
        return self.land()

    @property
    def near(self) -> bool:
        """Whether an exchange may be expected soon."""
        return time.monotonic() - self._last_s < HOLD_S
