r"""Progress that redraws itself: `\r` and cursor moves of each rank become one small picture, merged where it is equal.

A front end has no cursor to move up, so a block of bars is one display that is replaced at most `PER_SECOND` times a
second; its last state stays in the saved notebook.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from colossal_nb.notebook.digits import skeleton
from colossal_nb.notebook.fold import rank_list

PER_SECOND = 5.0
MOST_ROWS = 12
CONTROL = re.compile(r"\r|\x1b\[\d*[ABCDGJK]")
_TOKEN = re.compile(r"(\r|\n|\x1b\[\d*[ABCDGJK])")
_BAR = re.compile(r"^(?P<title>.*?)(?P<percent>\d+)%\|.*\|\s*\S+/(?P<total>\S+)")


class Screen:
    """A terminal of a few rows: enough for progress bars that redraw in place, nested ones too."""

    def __init__(self) -> None:
        self.rows = [""]
        self._row = 0
        self._column = 0

    def feed(self, text: str) -> None:
        for token in _TOKEN.split(text):
            if token == "\r":
                self._column = 0
            elif token == "\n":
                self._down()
            elif token.startswith("\x1b["):
                self._move(token)
            elif token:
                self._put(token)

    @property
    def settled(self) -> bool:
        """The cursor stands on a fresh last row: what was drawn is complete."""
        return self._row == len(self.rows) - 1 and self._row > 0 and not self.rows[-1]

    def text(self) -> list[str]:
        """The rows that show something."""
        return [row.rstrip() for row in self.rows if row.strip()]

    def _down(self) -> None:
        self._row += 1
        self._column = 0
        if self._row == len(self.rows):
            self.rows.append("")

    def _move(self, token: str) -> None:
        count = int(token[2:-1] or 1)
        if token[-1] == "A":
            self._row = max(0, self._row - count)
        elif token[-1] == "B":
            self._row = min(len(self.rows) - 1, self._row + count)
        elif token[-1] == "K":
            self.rows[self._row] = self.rows[self._row][: self._column]

    def _put(self, text: str) -> None:
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + text + row[self._column + len(text):]
        self._column += len(text)


class Block:
    """The bars that the ranks draw at the same time."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id
        self.screens: dict[int, Screen] = {}
        self.open: set[int] = set()
        self.placed = False  # what the ranks printed before it is on the page: it may be shown
        self.on_page = False
        self.shown = ""
        self.shown_at = float("-inf")

    def picture(self, ranks: Sequence[int]) -> str:
        """All rows, equal loops merged to the slowest rank's bar, others marked."""
        texts = {rank: screen.text() for rank, screen in sorted(self.screens.items())}
        height = max((len(rows) for rows in texts.values()), default=0)
        rows = [{rank: text[i] for rank, text in texts.items() if i < len(text)} for i in range(height)]
        return "\n".join(line for row in rows for line in _merged(row, ranks))


class Bars:
    """The blocks of one cell. `show(display_id, text, update)` puts one on the page."""

    def __init__(self, ranks: Sequence[int], show: Callable[[str, str, bool], None], new_id: Callable[[], str]) -> None:
        self._ranks = tuple(sorted(ranks))
        self._show = show
        self._new_id = new_id
        self._blocks: dict[tuple[str, int], Block] = {}
        self._count: dict[tuple[int, str], int] = {}
        self._placed: dict[tuple[int, str], int] = {}

    def open(self, rank: int, name: str) -> Screen:
        """A rank begins to draw on a stream: its nth drawing belongs to the other ranks' nth."""
        nth = self._count.get((rank, name), 0)
        self._count[rank, name] = nth + 1
        block = self._blocks.get((name, nth))
        if block is None:
            block = self._blocks[name, nth] = Block(self._new_id())
        block.open.add(rank)
        screen = block.screens[rank] = Screen()
        return screen

    def count(self, rank: int, name: str) -> int:
        """How often the rank has begun to draw on a stream."""
        return self._count.get((rank, name), 0)

    def place(self, rank: int, name: str) -> None:
        """The page has come to where this rank began to draw, the next time on this stream: here the picture stands."""
        nth = self._placed.get((rank, name), 0)
        self._placed[rank, name] = nth + 1
        block = self._blocks.get((name, nth))
        if block is not None and not block.placed:
            block.placed = True
            self._renew(block)

    def close(self, rank: int, name: str) -> None:
        """The rank prints ordinary lines again."""
        self._blocks[name, self._count[rank, name] - 1].open.discard(rank)

    def draw(self, now: float, last: bool = False) -> None:
        """Show what has changed, each block at most `PER_SECOND` times a second; `last` without waiting."""
        for key, block in list(self._blocks.items()):
            if not block.placed or (not last and now - block.shown_at < 1 / PER_SECOND):
                continue
            if self._renew(block):
                block.shown_at = now
            if not block.open and len(block.screens) == len(self._ranks):
                del self._blocks[key]


    def _renew(self, block: Block) -> bool:
        """Put the picture on the page if it is another one."""
        text = block.picture(self._ranks)
        changed = text != block.shown
        if changed:
            self._show(block.display_id, text, block.on_page)
            block.shown, block.on_page = text, True
        return changed


def _merged(row: dict[int, str], ranks: Sequence[int]) -> list[str]:
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, text in row.items():
        alike.setdefault(_kind(text), []).append(rank)
    return [_one(which, row, ranks) for which in alike.values()]


def _one(which: list[int], row: dict[int, str], ranks: Sequence[int]) -> str:
    slowest = min(which, key=lambda rank: (_percent(row[rank]), rank))
    return row[slowest] if tuple(which) == tuple(ranks) else f"[{rank_list(which)}] {row[slowest]}"


def _kind(text: str) -> tuple[str, str]:
    bar = _BAR.match(text)
    return (skeleton(bar["title"]), bar["total"]) if bar else (skeleton(text), "")


def _percent(text: str) -> int:
    bar = _BAR.match(text)
    return int(bar["percent"]) if bar else 0
