"""One rank's pen: opening and closing a slice costs about a microsecond, reading is for another thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import count
from threading import Lock
from time import perf_counter

from colossal_nb.record.events import CATEGORIES, TABLES, Frame, Slice

Token = int
_PACK = {name: table.packer.pack for name, table in TABLES.items()}
_pack_slice = _PACK["slices"]
_Open = tuple[str, str, int, int, int, float, int, str, int, str]


class _Names(dict[str, int]):
    """Text to number; a new text gets the next number."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def __missing__(self, name: str) -> int:
        with self._lock:
            return self.setdefault(name, len(self))


class Recorder:
    """Writes a rank's events into a ring of `capacity` events per table.

    Any thread may call any method. A full ring drops its oldest event and counts it: `dropped` travels with every
    frame. With `enabled = False` nothing is written, but open slices are still known (a hang can be explained).
    """

    def __init__(self, rank: int, capacity: int = 1 << 17) -> None:
        self.rank = rank
        self.capacity = capacity
        self.enabled = True
        self.shift_s = 0.0  # common clock - this rank's perf_counter
        self.dropped = 0
        self._names = _Names()
        self._open: dict[Token, _Open] = {}
        self._background: set[Token] = set()
        self._tokens = count()
        self._rows: dict[str, deque[bytes]] = {table: deque() for table in TABLES}
        self._slices = self._rows["slices"]
        self._take_lock = Lock()

    def now(self) -> float:
        """Seconds on the common clock."""
        return perf_counter() + self.shift_s

    def begin(
        self,
        kind: str,
        lane: str = "compute",
        *,
        stage: int = -1,
        chunk: int = 0,
        microbatch: int = -1,
        group: str = "",
        seq: int = -1,
        payload_bytes: int = 0,
        of: str = "",
    ) -> Token:
        """Open a slice: kinds and lanes in `events`; `of` says for what (a tensor, a module)."""
        token = next(self._tokens)
        t0 = perf_counter() + self.shift_s
        self._open[token] = (lane, kind, stage, chunk, microbatch, t0, payload_bytes, group, seq, of)
        return token

    def end(self, token: Token) -> None:
        """Close a slice and write it, unless it was abandoned."""
        opened = self._open.pop(token, None)
        self._background.discard(token)
        if not self.enabled or opened is None:
            return
        lane, kind, stage, chunk, microbatch, t0, payload_bytes, group, seq, of = opened
        names = self._names
        row = _pack_slice(
            self.rank, names[lane], names[kind], stage, chunk, microbatch, t0, perf_counter() + self.shift_s,
            payload_bytes, names[group], seq, names[of],
        )  # fmt: skip
        slices = self._slices
        if len(slices) >= self.capacity:
            self._make_room(slices)
        slices.append(row)

    def abandon(self) -> None:
        """Nothing goes on any more of what has begun: a stop or an error has cut it short. It is not written."""
        self._open.clear()
        self._background.clear()

    def memory(self, where: str, bytes_by_category: Mapping[str, int], basis: str = "hooks") -> None:
        """One instant's bytes on "device", "host" or "nvme"; categories that are not named hold none.

        `basis` says how temporaries are known: "hooks" (hooks and the metered remainder) or "metered".
        """
        names = self._names
        sizes = [bytes_by_category.get(category, 0) for category in CATEGORIES]
        assert sum(sizes) == sum(bytes_by_category.values()), f"categories are {CATEGORIES}, not {[*bytes_by_category]}"
        self._write("memory", _PACK["memory"](self.rank, self.now(), names[where], names[basis], *sizes))

    def mark(self, step: int, phase: str, name: str = "", value: float = math.nan) -> None:
        """A point of a training step; phases in `events`."""
        names = self._names
        self._write("marks", _PACK["marks"](self.rank, self.now(), step, names[phase], names[name], float(value)))

    def layout(self, tensor: str, layout: str, local_shape: str, local_bytes: int) -> None:
        """What this rank holds of a tensor: `layout` is `plan.Layout.to_json()`, the rest is measured."""
        names = self._names
        row = _PACK["layouts"](
            self.rank, self.now(), names[tensor], names[layout], names[local_shape], local_bytes
        )  # fmt: skip
        self._write("layouts", row)

    def state(self, state: str, reason: str = "") -> None:
        """What the rank as a whole does."""
        self._write("states", _PACK["states"](self.rank, self.now(), self._names[state], self._names[reason]))

    def set_background(self, token: Token, background: bool) -> None:
        """Say whether an open slice goes on by itself while its rank does other work: nobody waits for it then."""
        if background and token in self._open:
            self._background.add(token)
        else:
            self._background.discard(token)

    def open(self) -> list[Slice]:
        """The slices that have begun and not ended, oldest first."""
        return [self._opened(fields) for fields in list(self._open.values())]

    def waits(self) -> list[Slice]:
        """The open slices of the lane "comm" that the rank itself is in, oldest first."""
        return [
            self._opened(fields)
            for token, fields in list(self._open.items())
            if fields[0] == "comm" and token not in self._background
        ]

    def _opened(self, fields: _Open) -> Slice:
        lane, kind, stage, chunk, microbatch, t0, payload_bytes, group, seq, of = fields
        return Slice(self.rank, lane, kind, stage, chunk, microbatch, t0, math.nan, payload_bytes, group, seq, of)

    def drain(self) -> bytes:
        """Take everything written so far, as one frame for `RecordBuilder.feed`."""
        with self._take_lock:
            rows = {table: b"".join([ring.popleft() for _ in range(len(ring))]) for table, ring in self._rows.items()}
        names = {number: name for name, number in list(self._names.items())}
        return Frame(self.rank, self.dropped, names, rows).pack()

    def _write(self, table: str, row: bytes) -> None:
        if not self.enabled:
            return
        ring = self._rows[table]
        if len(ring) >= self.capacity:
            self._make_room(ring)
        ring.append(row)

    def _make_room(self, ring: deque[bytes]) -> None:
        with self._take_lock:
            while len(ring) >= self.capacity:
                ring.popleft()
                self.dropped += 1
