"""The one event model: what happened on a rank, as rows of numbers. Text is interned; a frame carries its own table.

Times are seconds on the cell's common clock. `payload_bytes` is the whole logical tensor: all-gather its output,
reduce-scatter its input, all-to-all the local input, else the tensor. What follows from these (bytes sent, waits,
bubbles) is derived in `measures`, never stored.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPUTE_KINDS = ("F", "B", "I", "W", "R", "optimizer")  # I, W: input and weight part of B; R: recompute
POINT_TO_POINT = ("send", "recv")
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
)  # fmt: skip
KINDS = (*COMPUTE_KINDS, *POINT_TO_POINT, *COLLECTIVES, "transfer")  # transfer: between device, host and disk
LANES = ("compute", "comm")
CATEGORIES = (
    "parameter", "gradient", "optimizer", "activation", "buffer", "communication", "temporary", "unknown",
)  # fmt: skip
# Phases of a mark. A step begins with its first forward_backward and ends when optimizer.step() returns; "log" carries
# a named value (loss among them); "metered" says that the step was measured in full and is no measure of speed.
PHASES = ("begin", "end", "log", "metered")


@dataclass(frozen=True)
class Table:
    """The columns of one kind of event: number formats, "s" for interned text."""

    columns: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names."""
        return tuple(name for name, _ in self.columns)

    @property
    def text(self) -> tuple[str, ...]:
        """The columns that hold text."""
        return tuple(name for name, code in self.columns if code == "s")

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Rows as they travel: packed, little-endian, text as a number of the frame's name table."""
        return np.dtype([(name, "<i4" if code == "s" else "<" + code) for name, code in self.columns])

    @property
    def packer(self) -> struct.Struct:
        """The same rows for `struct`, which packs one faster than numpy."""
        codes = {"s": "i", "i4": "i", "i8": "q", "f8": "d"}
        return struct.Struct("<" + "".join(codes[code] for _, code in self.columns))

    def decoded(self, rows: NDArray[np.void], names: NDArray[Any]) -> NDArray[np.void]:
        """Rows with their text put in: `names[i]` is text number i."""
        columns = {name: names[rows[name]] if name in self.text else rows[name] for name in self.names}
        result = np.empty(len(rows), self._dtype({name: columns[name].tolist() for name in self.text}))
        for name, column in columns.items():
            result[name] = column
        return result

    def array(self, rows: Sequence[tuple[Any, ...]] = ()) -> NDArray[np.void]:
        """Rows given as tuples in the order of the columns."""
        columns = dict(zip(self.names, zip(*rows, strict=True), strict=True)) if rows else {}
        return np.array(list(map(tuple, rows)), self._dtype({name: columns.get(name, ()) for name in self.text}))

    def _dtype(self, text: Mapping[str, Sequence[str]]) -> np.dtype[np.void]:
        """Columns wide enough for their longest text."""
        width = {name: f"U{max([1, *map(len, set(values))])}" for name, values in text.items()}
        return np.dtype([(name, width.get(name, self.dtype[name])) for name in self.names])


SLICE = Table((
    ("rank", "i4"), ("lane", "s"), ("kind", "s"), ("stage", "i4"), ("chunk", "i4"), ("microbatch", "i4"),
    ("t0", "f8"), ("t1", "f8"), ("payload_bytes", "i8"), ("group", "s"), ("seq", "i8"), ("of", "s"),
))  # fmt: skip
MEMORY = Table((
    ("rank", "i4"), ("t", "f8"), ("where", "s"), ("basis", "s"), *((category, "i8") for category in CATEGORIES),
))  # fmt: skip
LAYOUT = Table((
    ("rank", "i4"), ("t", "f8"), ("tensor", "s"), ("layout", "s"), ("local_shape", "s"), ("local_bytes", "i8"),
))  # fmt: skip
MARK = Table((("rank", "i4"), ("t", "f8"), ("step", "i4"), ("phase", "s"), ("name", "s"), ("value", "f8")))
STATE = Table((("rank", "i4"), ("t", "f8"), ("state", "s"), ("reason", "s")))
TABLES: dict[str, Table] = {"slices": SLICE, "memory": MEMORY, "layouts": LAYOUT, "marks": MARK, "states": STATE}


class Slice(NamedTuple):
    """One piece of work on one lane of one rank. While it is open `t1` is nan.

    `stage` is the virtual stage, `chunk` its number on the rank, `of` says for what (a tensor, a module).
    """

    rank: int
    lane: str
    kind: str
    stage: int = -1
    chunk: int = 0
    microbatch: int = -1
    t0: float = math.nan
    t1: float = math.nan
    payload_bytes: int = 0
    group: str = ""
    seq: int = -1
    of: str = ""


class Mark(NamedTuple):
    """A point of a training step on one rank."""

    rank: int
    t: float
    step: int
    phase: str
    name: str = ""
    value: float = math.nan


def group_name(axis: str, ranks: Sequence[int]) -> str:
    """How a slice names the group of a collective: `tp:0,1`."""
    return f"{axis}:{','.join(map(str, ranks))}"


def link_name(axis: str, source: int, target: int) -> str:
    """How a send or a recv names its two ends: `pp:0>2`."""
    return f"{axis}:{source}>{target}"


def group_ranks(name: str) -> tuple[int, ...]:
    """The ranks that a group or link name lists."""
    ranks = name.rpartition(":")[2].replace(">", ",")
    return tuple(int(rank) for rank in ranks.split(",") if rank)


def group_axis(name: str) -> str:
    """The axis that a group or link name begins with."""
    return name.partition(":")[0]


# A frame: magic, version, length of the header, header (JSON), then the tables' rows in the order of TABLES.
_PREFIX = struct.Struct("<4sHI")
_MAGIC = b"cnbr"
VERSION = 1


@dataclass(frozen=True)
class Frame:
    """What one `drain` sends: rows by table, the names that they use, and how many events the ring had to drop."""

    rank: int
    dropped: int  # since the recorder began
    names: Mapping[int, str]
    rows: Mapping[str, bytes]

    def pack(self) -> bytes:
        """As bytes; only the names that the rows use travel, so that every frame can be read by itself."""
        header = {
            "rank": self.rank,
            "dropped": self.dropped,
            "names": {str(i): self.names[i] for i in self._used()},
            "bytes": {table: len(rows) for table, rows in self.rows.items()},
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        return b"".join([_PREFIX.pack(_MAGIC, VERSION, len(text)), text, *(self.rows[table] for table in TABLES)])

    @classmethod
    def unpack(cls, data: bytes) -> Frame:
        """Read what `pack` wrote; ValueError if these bytes are something else."""
        if len(data) < _PREFIX.size:
            raise ValueError(f"an event frame has at least {_PREFIX.size} bytes, not {len(data)}")
        magic, version, length = _PREFIX.unpack_from(data)
        if magic != _MAGIC or version != VERSION:
            raise ValueError(f"not an event frame of version {VERSION}: it begins with {magic!r}, version {version}")
        header = json.loads(data[_PREFIX.size : _PREFIX.size + length])
        at, rows = _PREFIX.size + length, {}
        for table in TABLES:
            rows[table] = data[at : at + header["bytes"][table]]
            at += header["bytes"][table]
        if at != len(data):
            raise ValueError(f"an event frame of {at} bytes came as {len(data)}")
        return cls(header["rank"], header["dropped"], {int(i): name for i, name in header["names"].items()}, rows)

    def array(self, table: str) -> NDArray[np.void]:
        """The rows of one table with their text."""
        rows = np.frombuffer(self.rows[table], TABLES[table].dtype)
        names = np.empty(max(self.names, default=-1) + 1, object)
        for i, name in self.names.items():
            names[i] = name
        return TABLES[table].decoded(rows, names)

    def _used(self) -> list[int]:
        used = np.zeros(max(self.names, default=-1) + 1, bool)
        for table, rows in self.rows.items():
            array = np.frombuffer(rows, TABLES[table].dtype)
            for column in TABLES[table].text:
                used[array[column]] = True
        numbers: list[int] = np.flatnonzero(used).tolist()
        return numbers
