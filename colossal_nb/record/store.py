"""The record: everything that happened in a cell, as read-only arrays, and the builder that collects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colossal_nb.record.events import LAYOUT, MARK, MEMORY, SLICE, STATE, TABLES, Frame

Rows = NDArray[np.void]


@dataclass(frozen=True, eq=False)
class Record:
    """Read-only structured arrays, columns as in `events`, each in the order of time.

    Planned, predicted and measured are three records, so one code reads them all.
    `dropped`: events per rank that the rank's ring had no room for.
    """

    slices: Rows = field(default_factory=SLICE.array)
    memory: Rows = field(default_factory=MEMORY.array)
    layouts: Rows = field(default_factory=LAYOUT.array)
    marks: Rows = field(default_factory=MARK.array)
    states: Rows = field(default_factory=STATE.array)
    dropped: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for table in TABLES:
            getattr(self, table).flags.writeable = False
        object.__setattr__(self, "dropped", MappingProxyType(dict(self.dropped)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote anything."""
        found = [np.unique(getattr(self, table)["rank"]) for table in TABLES]
        return tuple(int(rank) for rank in np.unique(np.concatenate(found)))

    @classmethod
    def of(cls, **rows: Sequence[tuple[Any, ...]]) -> Record:
        """A record from plain rows: `Record.of(slices=[Slice(...)], marks=[Mark(...)])`."""
        given: dict[str, Any] = {table: _joined([TABLES[table].array(some)]) for table, some in rows.items()}
        return cls(**given)

    @classmethod
    def concat(cls, records: Iterable[Record]) -> Record:
        """Several records as one, in the order of time."""
        parts = list(records)
        if not parts:
            return cls()
        joined = {table: _joined([getattr(part, table) for part in parts]) for table in TABLES}
        dropped: dict[int, int] = {}
        for part in parts:
            for rank, number in part.dropped.items():
                dropped[rank] = max(number, dropped.get(rank, 0))
        return cls(**joined, dropped=dropped)

    def select(self, **masks: NDArray[np.bool_]) -> Record:
        """The same with only some rows of the named tables: `record.select(slices=record.slices["rank"] == 0)`."""
        return dataclasses.replace(self, **{table: getattr(self, table)[mask] for table, mask in masks.items()})


class RecordBuilder:
    """Folds the frames that recorders drained into a record. Frames may come late or in any order of ranks."""

    def __init__(self) -> None:
        self._parts: list[Record] = []

    def feed(self, frame: bytes) -> Record:
        """Take one frame; gives back what was new in it. ValueError if the bytes are no frame."""
        read = Frame.unpack(frame)
        part = Record(**{table: read.array(table) for table in TABLES}, dropped={read.rank: read.dropped})
        self._parts.append(part)
        return part

    def record(self) -> Record:
        """Everything so far."""
        self._parts = [Record.concat(self._parts)]
        return self._parts[0]


def _joined(arrays: list[Rows]) -> Rows:
    """Rows of several arrays, by time; text columns grow to the widest."""
    rows = np.concatenate(arrays)
    time = "t0" if "t0" in (rows.dtype.names or ()) else "t"
    return rows[np.argsort(rows[time], kind="stable")]
