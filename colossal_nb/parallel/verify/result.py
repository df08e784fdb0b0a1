"""What `verify` found, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

SHOWN = 8
KINDS = ("loss", "gradient", "statistic", "weight")
COLUMNS = ("what", "name", "difference", "allowed", "ranks", "evidence")


@dataclass(frozen=True)
class Row:
    """One comparison: `difference` and `allowed` are parts of the size of what was compared; `ranks`: those on which
    more differs than is allowed; `evidence`: what the difference looks like."""

    what: str
    name: str
    difference: float
    allowed: float
    ranks: tuple[int, ...] = ()
    evidence: str = ""

    @property
    def ok(self) -> bool:
        return not self.ranks

    @property
    def excess(self) -> float:
        """How many times what is allowed; something that is not a number is the worst."""
        return self.difference / self.allowed if self.difference == self.difference else float("inf")

    def cells(self) -> tuple[str, ...]:
        where = ", ".join(map(str, self.ranks)) or "-"
        return self.what, self.name, f"{self.difference:.1e}", f"{self.allowed:.0e}", where, self.evidence or "-"


@dataclass(frozen=True)
class Verification:
    """A parallel program against the sequential one. True where they are equal within the band of their precision.

    `ran` is False where the host had no room, and `ok` then too. `rows`: every comparison, the worst first. `cause`:
    where the difference begins and what it looks like. `reference`: what the sequential program was. `optimizer`:
    with which both stepped.
    """

    ok: bool
    strategy: str
    steps: int
    reference: str
    rows: tuple[Row, ...] = ()
    cause: str = ""
    notes: tuple[str, ...] = ()
    ran: bool = True
    seconds: float = 0.0
    optimizer: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def wrong(self) -> tuple[Row, ...]:
        """What differs more than is allowed, the worst first."""
        return tuple(row for row in self.rows if not row.ok)

    def worst(self, what: str) -> Row | None:
        """The largest difference of a loss, a gradient, a running statistic or a weight."""
        return next((row for row in self.rows if row.what == what), None)

    @property
    def sentence(self) -> str:
        """One line."""
        if not self.ran:
            return f"not verified: {self.cause}"
        steps = f"{self.steps} step{'s' * (self.steps != 1)} of forward_backward with {self.optimizer}"
        if not self.ok:
            return f"{self.strategy} is NOT the sequential program (compared over {steps}): {self.cause}"
        found = [row for row in map(self.worst, KINDS) if row is not None]
        worst = ", ".join(f"{row.what} {row.difference:.1e}" for row in found)
        return f"verified: {self.strategy} equals the sequential program over {steps}; largest differences: {worst}"

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.rows and not self.ok:
            lines += [*_table(self._shown()), *self._more()]
        if self.ran:
            lines.append(f"reference: {self.reference}")
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self._shown() if self.rows else []
        head = "".join(f'<th style="text-align:left">{name}</th>' for name in COLUMNS)
        body = "".join("<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row.cells())
                       + "</tr>" for row in rows)  # fmt: skip
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        below = [*self._more(), *([f"reference: {self.reference}"] if self.ran else []), *self.notes]
        return f"<p>{escape(self.sentence)}</p>{table}" + "".join(f"<p>{escape(line)}</p>" for line in below)

    def _shown(self) -> Sequence[Row]:
        """What is wrong, or the worst of each kind."""
        if self.wrong:
            return self.wrong[:SHOWN]
        return [row for row in map(self.worst, KINDS) if row is not None]

    def _more(self) -> list[str]:
        hidden = len(self.wrong) - SHOWN
        return [f"... and {hidden} more that differ: .wrong has all"] if hidden > 0 else []


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
