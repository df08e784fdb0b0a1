"""Stop while a cell runs: presses are counted instead of raised, so that no message is lost half way."""
from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Presses:
    """A context in which SIGINT in the main thread only counts; `press()` does the same from any thread."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None
        self._installed = False

    def press(self) -> None:
        self.count += 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._signal)
            self._installed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before if self._before is not None else signal.SIG_DFL)
            self._installed = False

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self.press()


@contextmanager
def held_back() -> Iterator[None]:
    """Stop comes after the block, which is short and may not be left half done."""
    presses = Presses()
    try:
        with presses:
            yield
    finally:
        if presses.count:
            signal.raise_signal(signal.SIGINT)
