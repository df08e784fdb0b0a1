"""How a row of the ranks' lines is written: marks, and lines that differ only in digits folded to one."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from colossal_nb.notebook.digits import blanked, differing_numbers, skeleton
from colossal_nb.notebook.merge import Group, Row


def rank_list(ranks: Iterable[int]) -> str:
    """`(0, 1, 2, 5)` as `0-2,5`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def named(ranks: Sequence[int]) -> str:
    """`rank 2` or `ranks 0-3`, for sentences."""
    return f"rank{'s' * (len(ranks) > 1)} {rank_list(ranks)}"


class Folder:
    """Writes rows of lines for one cell. It remembers what it need not say twice."""

    def __init__(self, ranks: Sequence[int], bare: bool, show_all: bool = False) -> None:
        self._ranks = tuple(sorted(ranks))
        self._show_all = show_all
        self._say_same = bare and len(self._ranks) > 1
        self._say_how = True

    def lines(self, row: Row) -> list[tuple[str, str]]:
        """The row as (stream, line) pairs; rich output is not for here."""
        if row.late:
            group = row.groups[0]
            stream = group.item.kind if group.item.kind in ("stdout", "stderr") else ""
            late = _late(row, "line" if stream else "output") + (self._how() if row.alike else "")
            return [(stream or "stdout", f"[{rank_list(group.ranks)}] {late}")]
        if len(row.groups) > 1 and not self._show_all:
            blanks = {(group.item.kind, blanked(group.item.text)) for group in row.groups}
            if len(blanks) == 1:  # quick, and the usual case
                return [self._write(row.groups, blanks.pop()[1])]
            return [self._write(alike) for alike in self._alike(row.groups)]
        return [self._write([group]) for group in row.groups]

    def mark(self, ranks: Sequence[int]) -> str:
        """Before something that only these ranks showed; nothing if all did."""
        return "" if tuple(sorted(ranks)) == self._ranks else f"[{rank_list(ranks)}] "

    def is_equal(self, row: Row) -> bool:
        """Whether this is a line that all ranks printed."""
        first = row.groups[0]
        return first.ranks == self._ranks and not row.late and first.item.kind in ("stdout", "stderr")

    def is_news(self, row: Row) -> bool:
        """Whether it is yet to be said of such a line that it is equal: in a bare cell, once, and of no empty line."""
        return self._say_same and self.is_equal(row) and bool(row.groups[0].item.text.strip())

    def same(self) -> str:
        """Said once in a bare cell, of the first that all ranks showed equally."""
        if not self._say_same:
            return ""
        self._say_same = False
        return f"(same on ranks {rank_list(self._ranks)})"

    def _how(self) -> str:
        """How to see what is folded; said once."""
        said, self._say_how = self._say_how, False
        return "; --show all shows them" if said else ""

    def _alike(self, groups: Sequence[Group]) -> list[list[Group]]:
        alike: dict[tuple[str, str], list[Group]] = {}
        for group in groups:
            alike.setdefault((group.item.kind, skeleton(group.item.text)), []).append(group)
        return list(alike.values())

    def _write(self, alike: Sequence[Group], blank: str = "") -> tuple[str, str]:
        """Groups whose lines differ only in digits as one line of (stream, text)."""
        first = alike[0]
        text = f"{self.mark(first.ranks)}{first.item.text}"
        if len(alike) > 1:
            others = sum(len(group.ranks) for group in alike[1:])
            count = differing_numbers([group.item.text for group in alike], blank)
            where = f"differ in {count} number{'s' * (count != 1)}" if count else "differ in spaces"
            text += f"  ({others} alike, {where}{self._how()})"
        return first.item.kind, text


def _late(row: Row, what: str) -> str:
    """`the same 3 lines`, `3 alike lines, numbers differ`, or both."""
    same = row.late - row.alike
    parts = [f"the same {what}" if same == 1 else f"the same {same} {what}s"] if same else []
    parts += [f"{row.alike} alike {what}{'s' * (row.alike != 1)}, numbers differ"] if row.alike else []
    return " and ".join(parts)
