"""Where a cell's output goes: the page, and how much of a long text it gets."""
from __future__ import annotations

import sys
import uuid
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

HEAD_LINES = 4_000
HEAD_CHARACTERS = 400_000
TAIL_LINES = 100
LAST_LINES = 5
LONGEST_LINE = 20_000
WINDOW_S = 0.5


class Page(Protocol):
    """What shows things to the user. Text of the ranks is a stream; what we say ourselves is a display."""

    def write(self, stream: str, text: str) -> None: ...

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: str = "",
                update: bool = False) -> None: ...

    def clear(self, wait: bool) -> None: ...


def new_id() -> str:
    """An identifier of a display that will be updated."""
    return uuid.uuid4().hex


class KernelPage:
    """The output area of the cell that the kernel runs."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def write(self, stream: str, text: str) -> None:
        out = sys.stderr if stream == "stderr" else sys.stdout
        out.write(text)
        out.flush()

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: str = "",
                update: bool = False) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        transient = {"display_id": display_id} if display_id else {}
        self._shell.display_pub.publish(dict(data), dict(metadata or {}), transient=transient, update=update)

    def clear(self, wait: bool) -> None:
        self._shell.display_pub.clear_output(wait)


def say(page: Page, text: str) -> None:
    """A sentence of our own."""
    page.display({"text/plain": text})


class Text:
    """Lines on their way to the page: written in batches, and of a long text only its head and its tail.

    The rest is replaced by one note, which while the cell runs also shows the newest lines. The whole text is in the
    run; `limited=False` puts everything on the page.
    """

    def __init__(self, page: Page, limited: bool = True) -> None:
        self._page = page
        self._limited = limited
        self._batch: list[tuple[str, str]] = []
        self._lines = 0
        self._characters = 0
        self._tail: deque[tuple[str, str]] = deque(maxlen=TAIL_LINES)
        self._held = 0
        self._window_id = ""
        self._window_at = float("-inf")

    def add(self, stream: str, text: str) -> None:
        """One line with its newline, or a part of a line."""
        if not self._limited:
            self._batch.append((stream, text))
            return
        if len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]} ... ({len(text):,} characters; whole in cnb.last_run.outputs)\n"
        if self._lines < HEAD_LINES and self._characters < HEAD_CHARACTERS:
            self._batch.append((stream, text))
            self._lines += 1
            self._characters += len(text)
        else:
            self._tail.append((stream, text))
            self._held += 1

    def flush(self) -> None:
        """Write the batch: one write per stretch of one stream."""
        batch, self._batch = self._batch, []
        start = 0
        for i in range(1, len(batch) + 1):
            if i == len(batch) or batch[i][0] != batch[start][0]:
                self._page.write(batch[start][0], "".join(text for _, text in batch[start:i]))
                start = i

    def turn(self, now: float) -> None:
        """Flush, and renew the window on lines that the page does not get."""
        self.flush()
        if self._held and now - self._window_at >= WINDOW_S:
            last = "".join(text for _, text in list(self._tail)[-LAST_LINES:])
            self._window(f"... {self._held:,} more lines so far; the newest:\n{last}".rstrip("\n"))
            self._window_at = now

    def finish(self) -> None:
        """Write what is left: the note in place of what was left out, then the last lines."""
        self.flush()
        left_out = self._held - len(self._tail)
        if left_out > 0:
            self._window(f"... {left_out:,} lines left out here: cnb.last_run.outputs has every line of every rank "
                         f"(--show all puts them on the page)")
        elif self._window_id:
            self._window("...")
        self._batch.extend(self._tail)
        self._tail.clear()
        self._held = 0
        self.flush()

    def restart(self) -> None:
        """The page was cleared: a new budget."""
        self._lines = self._characters = self._held = 0
        self._tail.clear()
        self._window_id = ""

    def _window(self, text: str) -> None:
        update = bool(self._window_id)
        self._window_id = self._window_id or new_id()
        self._page.display({"text/plain": text}, display_id=self._window_id, update=update)
