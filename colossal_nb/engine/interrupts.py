"""When a SIGINT may raise in a rank: only while a cell's own code runs."""
from __future__ import annotations

import signal
import threading
import time
from types import FrameType


class Interrupts:
    """A gate for KeyboardInterrupt in the main thread, opened by a cell, knocked at by the side thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread()
        self._lock = threading.Lock()
        self._open = False
        self._cell = 0
        self._until = 0
        self.begun = 0.0
        """When the cell began, by this process's performance counter."""
        self.landed = False
        """Whether the cell that runs, or ran last, has been interrupted."""

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._signal)

    def _signal(self, number: int, frame: FrameType | None) -> None:
        if self._open:
            raise KeyboardInterrupt

    def begin(self, number: int) -> None:
        """The user's code of cell `number` follows; raises at once if this cell was interrupted before it began."""
        with self._lock:
            self._cell = number
            self.landed = number <= self._until
        self.begun = time.perf_counter()
        self._open = True
        if self.landed:                                # the signal may have come while the gate was closed
            raise KeyboardInterrupt

    def end(self) -> None:
        """The cell is over, however it went; harmless again and again."""
        self._open = False
        with self._lock:
            self._cell = 0

    def interrupt(self, cell: int) -> bool:
        """From the side thread: interrupt this cell now, or when it begins. True if it runs now."""
        with self._lock:
            self._until = max(self._until, cell)
            if self._cell != cell:
                return False
            self.landed = True
        assert self._main.ident is not None
        signal.pthread_kill(self._main.ident, signal.SIGINT)
        return True

    @property
    def running(self) -> int:
        """The number of the cell whose code runs, 0 between cells."""
        return self._cell
