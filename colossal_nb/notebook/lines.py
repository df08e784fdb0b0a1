"""One rank's stream becomes lines: what is complete, what is not yet, and what belongs to a progress bar."""
from __future__ import annotations

import re

from colossal_nb.notebook.bars import CONTROL, MOST_ROWS, Bars, Screen

MOST_PARTIAL = 1 << 20
"""Characters after which a line without an end is taken for one: it would be read again and again."""
_PIECE = re.compile(r"[^\n]*\n|[^\n]+")


class Splitter:
    """Cuts one stream of one rank. Text that moves the cursor goes to `bars` until ordinary lines follow."""

    def __init__(self, rank: int, name: str, bars: Bars) -> None:
        self._rank = rank
        self._name = name
        self._bars = bars
        self._parts: list[str] = []
        self._length = 0
        self._screen: Screen | None = None
        self.since = 0.0
        """When the line that is not complete began."""

    @property
    def partial(self) -> str:
        """The line that is not complete yet."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def feed(self, text: str, now: float) -> list[str]:
        """Lines that are complete now, without their newlines."""
        moves = "\r" in text or "\x1b[" in text
        if moves:
            text = text.replace("\r\n", "\n")
        if self._screen is None and not (moves and CONTROL.search(text)):
            return self._plain(text, now)
        return [line for piece in _PIECE.findall(text) for line in self._piece(piece, now)]

    def flush(self) -> list[str]:
        """The incomplete line as if it were complete."""
        partial = self.partial
        self._parts = []
        return [partial] if partial else []

    def _plain(self, text: str, now: float) -> list[str]:
        head, newline, tail = text.rpartition("\n")
        if not self._parts:
            self.since = now
            self._length = 0
        if not newline:
            self._parts += [text] if text else []
            self._length += len(text)
            return self.flush() if self._length > MOST_PARTIAL else []
        lines = (self.partial + head).split("\n")
        self._parts, self._length = [tail] if tail else [], len(tail)
        self.since = now
        return lines

    def _piece(self, piece: str, now: float) -> list[str]:
        """At most one line, with its newline if it has one."""
        if self._screen is not None and self._screen.settled and not CONTROL.match(piece):
            self._bars.close(self._rank, self._name)
            self._screen = None
        if self._screen is None and not CONTROL.search(piece):
            return self._plain(piece, now)
        if self._screen is None or (self._screen.settled and len(self._screen.rows) > MOST_ROWS):
            self._screen = self._bars.open(self._rank, self._name)
            self._screen.feed("".join(self.flush()))
        self._screen.feed(piece)
        return []
