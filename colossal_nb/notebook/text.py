"""How much of a long text the page gets: its head, its tail, and a note in place of the rest."""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

from colossal_nb.notebook.merge import Item, Merger, Row
from colossal_nb.notebook.page import Page, new_id

HEAD_LINES = 1_000
HEAD_CHARACTERS = 400_000
TAIL_LINES = 100
LAST_LINES = 5
LONGEST_LINE = 20_000
WINDOW_S = 0.5


class Text:
    """Lines on their way to the page: written in batches, one write per stretch of one stream."""

    def __init__(self, page: Page, limited: bool = True) -> None:
        self._page = page
        self._limited = limited
        self._batch: list[tuple[str, str]] = []
        self._lines = 0
        self._characters = 0

    @property
    def room(self) -> int:
        """How many more lines the page gets."""
        if not self._limited:
            return sys.maxsize
        return max(0, HEAD_LINES - self._lines) if self._characters < HEAD_CHARACTERS else 0

    def add(self, stream: str, text: str) -> None:
        """One line with its newline, or a part of a line."""
        if self._limited and len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]} ... ({len(text):,} characters; whole in cnb.last_run.outputs)\n"
        self._batch.append((stream, text))
        self._lines += 1
        self._characters += len(text)

    def flush(self) -> None:
        batch, self._batch = self._batch, []
        start = 0
        for i in range(1, len(batch) + 1):
            if i == len(batch) or batch[i][0] != batch[start][0]:
                self._page.write(batch[start][0], "".join([text for _, text in batch[start:i]]))
                start = i

    def restart(self) -> None:
        """The page was cleared: a new budget."""
        self._lines = self._characters = 0


class Rest:
    """Lines for which the page has no room: counted, the last ones kept, and meanwhile shown in a window.

    The whole text is in the run.
    """

    def __init__(self, page: Page, ranks: Sequence[int]) -> None:
        self._page = page
        self._ranks = tuple(ranks)
        self._tails: dict[int, deque[Item]] = {}
        self._counts: dict[int, int] = {}
        self._window_id = ""
        self._window_at = float("-inf")

    def has(self, rank: int) -> bool:
        """Whether lines of this rank are here already: what it prints from now on comes after them."""
        return rank in self._tails

    def add_before(self, rank: int, items: Sequence[Item]) -> None:
        """Items that the rank printed before all those that are here."""
        if items:
            tail = self._tails.setdefault(rank, deque(maxlen=TAIL_LINES))
            room = TAIL_LINES - len(tail)
            tail.extendleft(reversed(items[-room:] if room else []))
            self._counts[rank] = self._counts.get(rank, 0) + len(items)

    def add(self, rank: int, name: str, lines: Sequence[str]) -> None:
        """Lines that the rank prints now."""
        if not lines:
            return
        tail = self._tails.setdefault(rank, deque(maxlen=TAIL_LINES))
        tail.extend([Item(name, line[:LONGEST_LINE]) for line in lines[-TAIL_LINES:]])
        self._counts[rank] = self._counts.get(rank, 0) + len(lines)

    def turn(self, now: float) -> None:
        """Renew the window."""
        if self._tails and now - self._window_at >= WINDOW_S:
            rank = min(self._tails)
            last = "\n".join(item.text for item in list(self._tails[rank])[-LAST_LINES:])
            self._window(f"... {max(self._counts.values()):,} more lines of a rank so far; the newest of rank {rank}:"
                         f"\n{last}")
            self._window_at = now

    def finish(self, fold: bool) -> list[Row]:
        """Put the note in place of what was left out; returns the rows of the last lines."""
        left_out = max((self._counts[rank] - len(tail) for rank, tail in self._tails.items()), default=0)
        if left_out > 0:
            self._window(f"... {left_out:,} lines of each rank left out here: cnb.last_run.outputs has them "
                         f"(--show all puts them on the page)")
        elif self._window_id:
            self._window("...")
        merger = Merger(self._ranks, fold=fold)
        for rank, tail in self._tails.items():
            for item in tail:
                merger.add(rank, item, 0.0)
        return merger.finish()

    def _window(self, text: str) -> None:
        update = bool(self._window_id)
        self._window_id = self._window_id or new_id()
        self._page.display({"text/plain": text}, display_id=self._window_id, update=update)
