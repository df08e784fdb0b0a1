"""Back-pressure for output: a rank that prints faster than the kernel reads waits, so that no queue on the way grows.

Both ends count the bytes of a rank's messages on the output socket. The kernel tells how much it has heard; whoever
wants to print while `LIMIT_BYTES` are under way waits until less is. The wait is plain sleep: an interrupt lands in it.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_BYTES = 1 << 20
_GLANCE_S = 0.002


class Flow:
    """What is under way between this rank and the kernel."""

    def __init__(self) -> None:
        self._sent = 0
        self._heard = 0                                # of what was sent, in this rank's own count
        self._offset = 0                               # this rank's count minus the kernel's
        self._governed = False

    def begin(self, heard: int | None) -> None:
        """A cell begins; `heard`: the kernel's count now, None for a cell of somebody who does not count.

        The counts are matched anew, whatever was lost between cells: the kernel's begins with the cluster, a rank's
        with its process.
        """
        self._governed = heard is not None
        self._offset, self._heard = self._sent - (heard or 0), self._sent

    def credit(self, heard: int) -> None:
        """The kernel has counted this many bytes (any thread)."""
        self._heard = max(self._heard, min(self._offset + heard, self._sent))

    def counted(self, send: Callable[..., None]) -> Callable[..., None]:
        """A function that sends the parts of a message, with what it sends counted."""
        def send_and_count(parts: list[Any], *arguments: Any, **options: Any) -> None:
            self._sent += sum(map(len, parts))
            send(parts, *arguments, **options)
        return send_and_count

    def paced(self, show: Callable[..., None]) -> Callable[..., None]:
        """A function that shows something, made to wait for room first."""
        def show_when_there_is_room(*arguments: Any, **options: Any) -> None:
            self.wait(int)
            show(*arguments, **options)
        return show_when_there_is_room

    def wait(self, unsent: Callable[[], int]) -> None:
        """Return when there is room for more. `unsent`: bytes that are written and will be sent by another thread."""
        while self._governed and self._sent - self._heard + unsent() > LIMIT_BYTES:
            time.sleep(_GLANCE_S)
