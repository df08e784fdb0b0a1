"""What follows from a record: steps, bubble, bytes sent, waits, peaks, losses. Reads arrays, keeps nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colossal_nb.record.events import CATEGORIES, group_ranks
from colossal_nb.record.store import Record, Rows

PIPELINE_KINDS = ("F", "B", "I", "W", "R")
SYNCHRONOUS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
WireModel = Callable[[str, int, int], Fraction]  # (operation, ranks, payload bytes) -> bytes sent per rank


@dataclass(frozen=True)
class StepTime:
    """One training step: from the first rank's begin to the last rank's end. A metered step is no measure of speed."""

    number: int
    t0: float
    t1: float
    metered: bool = False
    loss: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.t1 - self.t0


@dataclass(frozen=True)
class Peak:
    """The instant at which a rank held the most."""

    total_bytes: int
    t: float
    categories: dict[str, int]  # bytes


def steps(record: Record) -> list[StepTime]:
    """The finished steps in order. The k-th step of a record is every rank's k-th pair of begin and end."""
    per_rank = [list(_windows(record.marks[record.marks["rank"] == rank])) for rank in _ranks(record.marks)]
    return [_merged(windows) for windows in zip(*per_rank, strict=False)]


def step_of(record: Record, rows: Rows | None = None) -> NDArray[np.int64]:
    """For each slice (or each row of `rows`) the position in `steps(record)` it began in; -1 outside of all steps."""
    rows = record.slices if rows is None else rows
    time = rows["t0"] if "t0" in (rows.dtype.names or ()) else rows["t"]
    found = np.full(len(rows), -1, np.int64)
    for rank in _ranks(record.marks):
        windows = list(_windows(record.marks[record.marks["rank"] == rank]))
        if windows:
            mine = np.flatnonzero(rows["rank"] == rank)
            position = np.searchsorted([window.t0 for window in windows], time[mine], "right") - 1
            inside = (position >= 0) & (time[mine] <= np.array([window.t1 for window in windows])[position])
            found[mine] = np.where(inside, position, -1)
    return found


def bubbles(record: Record) -> list[float]:
    """Per step the share of the pipeline's time in which ranks did nothing: 1 - busy / (ranks * T).

    T runs from the first start to the last end of the step's pipeline slices on any rank. A step without them counts
    as nan.
    """
    return [_bubble(slices) for slices in _pipeline_by_step(record)]


def bubble(record: Record) -> float | None:
    """The bubble over all steps that measure speed, weighted by their time; None without a pipeline (two stages)."""
    pieces = _pipeline_by_step(record)
    timed = [piece for piece, step in zip(pieces, steps(record), strict=True) if not step.metered] or pieces
    if len({stage for piece in pieces for stage in np.unique(piece["stage"]).tolist()}) < 2:
        return None
    known = [(_span(piece), _bubble(piece)) for piece in timed if len(piece)]
    whole = sum(span for span, _ in known)
    return sum(span * value for span, value in known) / whole if whole > 0 else None


def busy(record: Record, kinds: tuple[str, ...] = PIPELINE_KINDS) -> dict[int, float]:
    """Seconds that each rank spent in slices of these kinds; what overlaps on a rank counts once."""
    chosen = record.slices[np.isin(record.slices["kind"], kinds)]
    return {rank: covered(chosen[chosen["rank"] == rank]) for rank in record.ranks}


def waits(record: Record) -> dict[int, float]:
    """Seconds that each rank waited for others in synchronous collectives.

    In one call nobody can finish before the last has come, so the shortest duration is the transfer and the rest of
    each duration is waiting.
    """
    chosen = record.slices[np.isin(record.slices["kind"], SYNCHRONOUS) & (record.slices["seq"] >= 0)]
    seconds = dict.fromkeys(record.ranks, 0.0)
    call = _numbered(chosen, "group", "seq", "kind")
    duration = chosen["t1"] - chosen["t0"]
    shortest = np.full(call.max(initial=-1) + 1, np.inf)
    np.minimum.at(shortest, call, duration)
    for rank, waited in zip(chosen["rank"].tolist(), (duration - shortest[call]).tolist(), strict=True):
        seconds[rank] += waited
    return seconds


def sent_bytes(record: Record, model: WireModel) -> dict[tuple[int, str], Fraction]:
    """Bytes that each rank sent by kind of operation, under a wire model (`plan.sent_bytes`); exact."""
    chosen = record.slices[record.slices["group"] != ""]
    call = _numbered(chosen, "rank", "kind", "group", "payload_bytes")
    _, first, counts = np.unique(call, return_index=True, return_counts=True)
    sent: dict[tuple[int, str], Fraction] = {}
    for row, number in zip(chosen[first], counts.tolist(), strict=True):
        rank, kind, ranks = int(row["rank"]), str(row["kind"]), len(group_ranks(str(row["group"])))
        sent[rank, kind] = sent.get((rank, kind), Fraction(0)) + number * model(kind, ranks, int(row["payload_bytes"]))
    return sent


def overlap(record: Record) -> dict[int, float]:
    """Per rank the share of its communication time in which it computed as well; nan if it communicated never.

    By unions of intervals. Meaningful where the two lanes are independent: a collective inside of a forward is
    covered by that forward's slice.
    """
    shares = {}
    for rank in record.ranks:
        mine = record.slices[record.slices["rank"] == rank]
        comm, compute = mine[mine["lane"] == "comm"], mine[mine["lane"] == "compute"]
        both = covered(comm) + covered(compute) - covered(mine)
        shares[rank] = both / covered(comm) if len(comm) else float("nan")
    return shares


def peak_memory(record: Record, where: str = "device") -> dict[int, Peak]:
    """Per rank the largest sum of categories among its samples."""
    chosen = record.memory[record.memory["where"] == where]
    totals = total_bytes(chosen)
    peaks = {}
    for rank in _ranks(chosen):
        mine = np.flatnonzero(chosen["rank"] == rank)
        top = mine[np.argmax(totals[mine])]
        categories = {category: int(chosen[category][top]) for category in CATEGORIES}
        peaks[rank] = Peak(int(totals[top]), float(chosen["t"][top]), categories)
    return peaks


def total_bytes(memory: Rows) -> NDArray[np.int64]:
    """The sum of the categories of each sample."""
    total: NDArray[np.int64] = np.sum([memory[category] for category in CATEGORIES], axis=0, dtype=np.int64)
    return total


def losses(record: Record, name: str = "loss") -> dict[int, float]:
    """The logged value of each step (by default the loss), the last one where a step logged several."""
    marks = record.marks[(record.marks["phase"] == "log") & (record.marks["name"] == name)]
    return dict(zip(marks["step"].tolist(), marks["value"].tolist(), strict=True))


def covered(slices: Rows) -> float:
    """Seconds in the union of the slices."""
    order = np.argsort(slices["t0"], kind="stable")
    start, end = slices["t0"][order], slices["t1"][order]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())


def _windows(marks: Rows) -> Iterator[StepTime]:
    """One rank's steps: from the first begin after an end to the next end."""
    begun: Any = None
    metered, loss = False, None
    for mark in marks[np.argsort(marks["t"], kind="stable")]:
        phase = mark["phase"]
        if phase == "begin" and begun is None:
            begun, metered, loss = mark, False, None
        elif phase == "metered":
            metered = True
        elif phase == "log" and mark["name"] == "loss":
            loss = float(mark["value"])
        elif phase == "end" and begun is not None:
            yield StepTime(int(begun["step"]), float(begun["t"]), float(mark["t"]), metered, loss)
            begun = None


def _merged(windows: tuple[StepTime, ...]) -> StepTime:
    first = windows[0]
    return StepTime(
        first.number,
        min(window.t0 for window in windows),
        max(window.t1 for window in windows),
        any(window.metered for window in windows),
        first.loss,
    )


def _pipeline_by_step(record: Record) -> list[Rows]:
    """The pipeline slices of each step."""
    slices = record.slices[np.isin(record.slices["kind"], PIPELINE_KINDS) & (record.slices["stage"] >= 0)]
    where = step_of(record, slices)
    order = np.argsort(where, kind="stable")
    edges = np.searchsorted(where[order], np.arange(len(steps(record)) + 1))
    return [slices[order[start:stop]] for start, stop in pairwise(edges.tolist())]


def _bubble(slices: Rows) -> float:
    ranks = _ranks(slices)
    span = _span(slices)
    total = sum(covered(slices[slices["rank"] == rank]) for rank in ranks)
    return 1.0 - total / (len(ranks) * span) if span > 0 else float("nan")


def _numbered(rows: Rows, *columns: str) -> NDArray[np.int64]:
    """A number per row, the same for rows that agree in these columns."""
    number = np.zeros(len(rows), np.int64)
    for column in columns:
        values, code = np.unique(rows[column], return_inverse=True)
        _, number = np.unique(number * len(values) + code, return_inverse=True)
    return number


def _span(slices: Rows) -> float:
    return float(slices["t1"].max() - slices["t0"].min()) if len(slices) else 0.0


def _ranks(rows: Rows) -> list[int]:
    found: list[int] = np.unique(rows["rank"]).tolist()
    return found
