"""A record in the formats of others: CSV, pandas frames, a Chrome trace that Perfetto opens."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colossal_nb.record.events import CATEGORIES, LANES, POINT_TO_POINT, TABLES, Mark, Slice
from colossal_nb.record.store import Record, Rows

if TYPE_CHECKING:
    import pandas as pd

_TRACKS_PER_LANE = 1000
_ARGS = ("kind", "stage", "chunk", "microbatch", "payload_bytes", "group", "seq", "of")


def to_frames(record: Record) -> dict[str, pd.DataFrame]:
    """One pandas frame per table (slices, memory, layouts, marks, states), columns as in `events`; needs pandas."""
    import pandas as pd

    return {table: pd.DataFrame({c: getattr(record, table)[c] for c in TABLES[table].names}) for table in TABLES}


def to_csv(record: Record, folder: Path | str) -> list[Path]:
    """Write one CSV file per table into a folder, the column names in its first line; returns the files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for table, columns in TABLES.items():
        with (folder / f"{table}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns.names)
            writer.writerows(getattr(record, table).tolist())
    return [folder / f"{table}.csv" for table in TABLES]


def to_chrome_trace(record: Record, path: Path | str) -> Path:
    """Write a Chrome trace: process = rank, thread = lane, counters of memory, arrows from send to recv.

    On one thread slices always nest: a lane whose slices overlap in another way gets as many threads as it takes.
    Times are microseconds from the first event.
    """
    path = Path(path)
    times = [getattr(record, table)[column] for table, column in (("slices", "t0"), ("memory", "t"), ("marks", "t"))]
    zero = float(np.concatenate(times).min(initial=np.inf))
    events = [*_names(record), *_slices(record, zero), *_counters(record, zero), *_instants(record, zero)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return path


def tracks(slices: Rows) -> list[int]:
    """For each slice of one lane the number of the track on which it nests with all others there (0 where it can)."""
    found = [0] * len(slices)
    open_ends: list[list[float]] = []
    starts, ends = slices["t0"].tolist(), slices["t1"].tolist()
    for position in np.lexsort((-slices["t1"], slices["t0"])).tolist():
        start, end = starts[position], ends[position]
        for stack in open_ends:
            while stack and stack[-1] <= start:
                stack.pop()
        free = (number for number, stack in enumerate(open_ends) if not stack or stack[-1] >= end)
        number = next(free, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(end)
        found[position] = number
    return found


def _by_lane(record: Record) -> Iterator[tuple[int, str, Rows, list[int]]]:
    for rank in record.ranks:
        mine = record.slices[record.slices["rank"] == rank]
        for lane in np.unique(mine["lane"]).tolist():
            rows = mine[mine["lane"] == lane]
            yield rank, lane, rows, tracks(rows)


def _thread(lane: str, track: int) -> int:
    return (LANES.index(lane) if lane in LANES else len(LANES)) * _TRACKS_PER_LANE + track


def _names(record: Record) -> Iterator[dict[str, Any]]:
    for rank in record.ranks:
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for rank, lane, _, numbers in _by_lane(record):
        for track in sorted(set(numbers)):
            thread = {"ph": "M", "pid": rank, "tid": _thread(lane, track)}
            yield {**thread, "name": "thread_name", "args": {"name": lane if track == 0 else f"{lane} {track + 1}"}}
            yield {**thread, "name": "thread_sort_index", "args": {"sort_index": thread["tid"]}}


def _slices(record: Record, zero: float) -> Iterator[dict[str, Any]]:
    for rank, lane, rows, numbers in _by_lane(record):
        for row, track in zip(rows.tolist(), numbers, strict=True):
            yield from _slice(Slice(*row), {"pid": rank, "tid": _thread(lane, track)}, zero)


def _slice(piece: Slice, where: dict[str, int], zero: float) -> Iterator[dict[str, Any]]:
    """One slice, and the end of an arrow if it is half of a message."""
    start, end = _ns(piece.t0, zero), _ns(piece.t1, zero)
    event = {**where, "cat": piece.lane, "ts": start / 1e3}
    name = f"{piece.kind}{piece.microbatch}" if piece.microbatch >= 0 else piece.kind
    args = {column: getattr(piece, column) for column in _ARGS}
    yield {"ph": "X", "name": name, **event, "dur": (end - start) / 1e3, "args": args}
    if piece.kind in POINT_TO_POINT:
        arrow = {"name": "message", "id": f"{piece.group} {piece.seq}", **event}
        yield {"ph": "s", **arrow} if piece.kind == "send" else {"ph": "f", "bp": "e", **arrow}


def _counters(record: Record, zero: float) -> Iterator[dict[str, Any]]:
    for rank, t, where, _, *sizes in record.memory.tolist():
        args = dict(zip(CATEGORIES, sizes, strict=True))
        yield {"ph": "C", "pid": rank, "name": f"memory ({where})", "ts": _ns(t, zero) / 1e3, "args": args}


def _instants(record: Record, zero: float) -> Iterator[dict[str, Any]]:
    for mark in map(Mark._make, record.marks.tolist()):
        args = {"step": mark.step} | ({} if math.isnan(mark.value) else {mark.name: mark.value})
        event = {"ph": "i", "s": "p", "pid": mark.rank, "tid": 0, "name": f"step {mark.step} {mark.phase}"}
        yield {**event, "ts": _ns(mark.t, zero) / 1e3, "args": args}


def _ns(t: float, zero: float) -> int:
    """Whole nanoseconds since the first event: rounding keeps order, so what nests still nests."""
    return round((t - zero) * 1e9)
