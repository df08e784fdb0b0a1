"""The output of one cell as it happens: the ranks' streams, displays and results become one page."""
from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Collection, Sequence

from colossal_nb.notebook.bars import CONTROL, Bars
from colossal_nb.notebook.fold import Folder
from colossal_nb.notebook.lines import Splitter
from colossal_nb.notebook.merge import HOLD_S, Group, Item, Merger, Row
from colossal_nb.notebook.page import Page, new_id
from colossal_nb.notebook.text import LONGEST_LINE, Rest, Text
from colossal_nb.run import Output

_CELL_FILE = re.compile(r"/[^\s'\":]{0,200}?ipykernel_\d+/\d+\.py(:\d+)?")
"""The file of a cell as warnings, tracebacks and help name it: each process has a folder of its own for them."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


class CellOutput:
    """`add` each output when it arrives, call `turn` often (it shows what is due), `finish` once.

    `bare`: a cell without a strategy. `show_all` writes every line, `only` leaves out the other ranks' output.
    """

    def __init__(self, ranks: Sequence[int], page: Page, *, bare: bool, show_all: bool = False,
                 only: Collection[int] | None = None) -> None:
        shown = tuple(sorted(rank for rank in ranks if only is None or rank in only))
        self._only = None if only is None else set(shown)
        self._page = page
        self._text = Text(page, limited=not show_all)
        self._fold = not show_all
        self._merger = Merger(shown, fold=self._fold)
        self._rest = Rest(page, shown)  # takes the lines when the page has had enough
        self._folder = Folder(ranks, bare and only is None, show_all)
        self._bars = Bars(ranks if only is None else shown, self._show_bars, new_id)
        self._splitters: dict[tuple[int, str], Splitter] = {}
        self._ids: dict[tuple[int, str], str] = {}
        self._open = ("", "")  # stream and shown text of a line that is not complete

    def add(self, output: Output, now: float) -> None:
        """Take one output of one rank. Errors are not for here."""
        if self._only is not None and output.rank not in self._only:
            return
        if output.kind == "stream":
            if output.name == "stderr" and output.text.startswith("UsageError: "):
                return  # IPython prints these and raises them as well; the error is shown
            self._add_text(output.rank, output.name, _cell_files(output.text), now)
        elif output.kind != "error":
            self._flush_partials(output.rank, now)
            kind = "update" if output.kind == "update_display" else output.kind
            self._merger.add(output.rank, Item(kind, _digest(output), output), now)

    def _add_text(self, rank: int, name: str, text: str, now: float) -> None:
        """Cut a stream into lines; where the rank begins to draw, a mark keeps the place among them."""
        splitter = self._splitter(rank, name)
        for piece in _LINE.findall(text) if CONTROL.search(text) else [text]:
            drawings = self._bars.count(rank, name)
            lines = splitter.feed(piece, now)
            if self._bars.count(rank, name) > drawings:
                self._merger.add(rank, Item("bars", name), now)
            self._add_lines(rank, name, lines, now)

    def _add_lines(self, rank: int, name: str, lines: Sequence[str], now: float) -> None:
        """Lines to be merged, as many as the page may have room for; the others are only counted."""
        if not self._rest.has(rank):
            room = max(0, self._text.room - self._merger.pending(rank))
            self._merger.add_lines(rank, name, lines[:room], now)
            lines = lines[room:]
        self._rest.add(rank, name, lines)

    def turn(self, now: float) -> None:
        """Show what is due."""
        self._advance(now)
        self._show_partials(now)
        self._bars.draw(now)
        self._text.flush()
        self._rest.turn(now)

    def finish(self) -> None:
        """The cell has ended: show all that is left."""
        for rank in {rank for rank, _ in self._splitters}:
            self._flush_partials(rank, float("-inf"))
        self._advance(float("inf"))
        self._show_rows(self._merger.finish())
        self._close_line()
        self._text.flush()
        self._show_rows(self._rest.finish(self._fold))
        self._text.flush()
        self._bars.draw(0.0, last=True)

    def _advance(self, now: float) -> None:
        """Show the rows that are due. When the page has had enough lines, the rest goes where it is only counted."""
        self._show_rows(self._merger.take(now, self._text.room or sys.maxsize))
        if not self._text.room and not self._merger.empty:
            for rank, items in self._merger.drain().items():
                self._rest.add_before(rank, [item for item in items if item.kind in ("stdout", "stderr")])
                for item in items:
                    if item.kind not in ("stdout", "stderr"):
                        self._merger.add(rank, item, now)

    def _splitter(self, rank: int, name: str) -> Splitter:
        if (rank, name) not in self._splitters:
            self._splitters[rank, name] = Splitter(rank, name, self._bars)
        return self._splitters[rank, name]

    def _flush_partials(self, rank: int, now: float) -> None:
        for (of, name), splitter in self._splitters.items():
            if of == rank:
                self._add_lines(rank, name, splitter.flush(), now)

    def _show_rows(self, rows: Sequence[Row]) -> None:
        """Show rows. In a bare cell the first stretch of equal lines is followed by the word that they are."""
        start = next((i for i, row in enumerate(rows) if self._folder.is_news(row)), len(rows))
        end = next((i for i in range(start, len(rows)) if not self._folder.is_equal(rows[i])), len(rows))
        for row in rows[:start]:
            self._show(row)
        if end == start + 1:
            item = rows[start].groups[0].item
            self._write_line(item.kind, f"{item.text}  {self._folder.same()}")
        else:
            for row in rows[start:end]:
                self._show(row)
            if end > start:
                self._write_line(rows[start].groups[0].item.kind, self._folder.same())
        for row in rows[end:]:
            self._show(row)

    def _show(self, row: Row) -> None:
        kind = row.groups[0].item.kind
        if row.late or all(group.item.kind in ("stdout", "stderr") for group in row.groups):
            for stream, line in self._folder.lines(row):
                self._write_line(stream, line)
        elif kind == "result" and all(_is_text(group.item.output) for group in row.groups):
            self._show_results(row)
        else:
            for group in row.groups:
                self._show_rich(group)

    def _show_rich(self, group: Group) -> None:
        if group.item.kind in ("stdout", "stderr"):
            self._show(Row((group,)))
            return
        self._close_line()
        if group.item.kind == "bars":
            self._bars.place(group.ranks[0], group.item.text)
            return
        output = group.item.output
        assert output is not None
        if group.item.kind == "clear":
            self._clear(output.name == "wait")
        elif group.item.kind == "update":
            self._update(group)
        else:
            mark = self._folder.mark(group.ranks)
            if mark:
                self._text.add("stdout", f"{mark.rstrip()}\n")
            self._text.flush()
            self._page.display(output.data or {}, output.metadata, self._page_id(group))

    def _show_results(self, row: Row) -> None:
        self._close_line()
        self._text.flush()
        lines: list[str] = []
        for group in row.groups:
            text = str((group.item.output.data or {})["text/plain"]) if group.item.output else ""
            mark = self._folder.mark(group.ranks)
            if not mark and "\n" not in text:
                text = f"{text}  {self._folder.same()}".rstrip()
            lines.append(mark + text.replace("\n", "\n" + " " * len(mark)))
        self._page.display({"text/plain": "\n".join(lines)})

    def _page_id(self, group: Group) -> str:
        """One display of the page stands for the displays of these ranks."""
        named = [output for output in group.outputs if output is not None and output.display_id]
        page_id = new_id() if named else ""
        for output in named:
            self._ids[output.rank, output.display_id] = page_id
        return page_id

    def _update(self, group: Group) -> None:
        done: set[str] = set()
        for output in group.outputs:
            page_id = self._ids.get((output.rank, output.display_id), "") if output else ""
            if output and page_id and page_id not in done:
                done.add(page_id)
                self._page.display(output.data or {}, output.metadata, page_id, update=True)

    def _clear(self, wait: bool) -> None:
        self._text.flush()
        self._text.restart()
        self._rest = Rest(self._page, self._merger.ranks)
        self._page.clear(wait)

    def _write_line(self, stream: str, line: str) -> None:
        opened, shown = self._open
        if shown and opened == stream and line.startswith(shown):
            line = line[len(shown):]
        elif shown:
            self._text.add(opened, "\n")
        self._open = ("", "")
        self._text.add(stream, line + "\n")

    def _close_line(self) -> None:
        if self._open[1]:
            self._text.add(self._open[0], "\n")
            self._open = ("", "")

    def _show_partials(self, now: float) -> None:
        """Lines that are not complete but old: what the ranks that wrote them have in common."""
        if not self._merger.empty or not self._text.room:
            return
        for stream in ("stdout", "stderr"):
            texts = {rank: splitter.partial[:LONGEST_LINE] for (rank, name), splitter in self._splitters.items()
                     if name == stream and splitter.partial and now - splitter.since >= HOLD_S}
            opened, shown = self._open
            if not texts or (shown and opened != stream):
                continue
            common = _common_start(list(texts.values()))
            text = self._folder.mark(sorted(texts)) + common
            if common and text.startswith(shown) and len(text) > len(shown):
                self._text.add(stream, text[len(shown):])
                self._open = (stream, text)

    def _show_bars(self, display_id: str, text: str, update: bool) -> None:
        self._text.flush()
        self._page.display({"text/plain": text}, display_id=display_id, update=update)


def _is_text(output: Output | None) -> bool:
    return output is not None and set(output.data or {}) == {"text/plain"}


def _cell_files(text: str) -> str:
    """Without the names that a cell has only in one process."""
    if "ipykernel_" not in text:
        return text
    return _CELL_FILE.sub(lambda match: f"cell, line {match[1][1:]}" if match[1] else "cell", text)


def _digest(output: Output) -> str:
    """Equal for outputs that look equal: addresses of objects and names of a cell's file do not count."""
    bundle = sorted((output.data or {}).items())
    return hashlib.sha1(_ADDRESS.sub("", _cell_files(f"{output.name}{bundle!r}")).encode()).hexdigest()


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)  # all others lie between them
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
