"""A cell's run: its messages while it runs, its outputs, errors and record afterwards."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from colossal_nb.plan.strategy import Strategy
    from colossal_nb.record.store import Record


@dataclass(frozen=True)
class Output:
    """One piece of output of one rank. `kind`: stream, display, update_display, result, error or clear.

    A stream has `name` (stdout, stderr) and `text`; display, update_display and result have a mime bundle in `data`
    and its `metadata`; an error has the formatted traceback in `text`; clear has `name` "wait" when the page shall
    keep the old output until new output arrives. `time_s` is seconds since the cell began.
    """

    rank: int
    kind: str
    time_s: float
    name: str = ""
    text: str = ""
    data: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    display_id: str = ""


@dataclass(frozen=True)
class Events:
    """Recorded events of one rank, a frame of `record` that the run has already folded into its own record."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class RankState:
    """What one rank does now: `state` is running, computing, waiting, released, done, error, busy, dead or started.

    `what` names the operation or the reason, `since_s` counts seconds since the cell began, `where` is the user's line.
    """

    rank: int
    state: str
    what: str = ""
    since_s: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class Pause:
    """Nothing has arrived for a moment: time to show what did, `time_s` after the cell began."""

    time_s: float


Message = Output | Events | RankState | Pause


@dataclass(frozen=True)
class RankError:
    """An exception (or the death) of one rank. `line`: the line in the cell; `consequence`: another rank caused it."""

    rank: int
    ename: str
    evalue: str
    traceback: list[str] = field(default_factory=list)
    line: int | None = None
    time_s: float = 0.0
    consequence: bool = False


@dataclass(frozen=True)
class Summary:
    """What the line under a cell says. Bytes and bubble are None where the cell recorded nothing of the kind."""

    engines: int
    strategy: str
    seconds: float
    peak_bytes: int | None = None
    peak_rank: int | None = None
    bubble: float | None = None
    sent_bytes: int | None = None
    steps: int = 0
    loss: float | None = None


MOST_TEXT = 1 << 26
"""Characters of text that a run keeps, in equal shares of the ranks: of more, the first and the last half."""


class _Kept(list[Output]):
    """One rank's outputs. Of a flood of text the middle is left out, so that no cell takes the notebook's memory."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self._share = share
        self._held = 0
        self._head = -1                                # how many outputs are the first half, once there is more
        self.left_out = 0

    def append(self, output: Output) -> None:
        super().append(output)
        self._held += len(output.text)
        if self._head < 0 and self._held > self._share // 2:
            self._head = len(self)
        if self._held > self._share * 5 // 4 and len(self) > self._head + 1:
            self._leave_out()

    def _leave_out(self) -> None:
        end = self._head
        while end < len(self) - 1 and self._held > self._share:
            self._held -= len(self[end].text)
            self.left_out += len(self[end].text)
            end += 1
        del self[self._head:end]


class Run:
    """One cell on the ranks. Iterate it while it runs (it must be iterated, or `wait()` called, for it to progress)."""

    def __init__(self, source: str, strategy: Strategy | None, ranks: tuple[int, ...], world_size: int = 0,
                 notes: tuple[str, ...] = ()) -> None:
        self.source = source
        self.strategy = strategy
        self.ranks = ranks
        self.world_size = world_size or len(ranks)
        self.notes = list(notes)
        """Plain sentences for the user: growth, replaced ranks, missing names, what limits a stop."""
        self.status = "running"
        self._share = MOST_TEXT // max(1, len(ranks))
        self.outputs: dict[int, list[Output]] = {rank: _Kept(self._share) for rank in ranks}
        self.errors: dict[int, RankError] = {}
        self.seconds = 0.0
        self.interrupted = False
        self.cell = 0
        """Its number among all cells that the ranks ran, as in their tracebacks."""
        self.title = ""
        """The strategy for people, a filled axis marked."""
        self._frames: list[bytes] = []
        self._record: Record | None = None
        self._messages: Iterator[Message] = iter(())
        self._press: Callable[[], None] = lambda: None
        self._summary: Summary | None = None

    def attach(self, messages: Iterator[Message], press: Callable[[], None]) -> None:
        """Give the run the loop that drives it and the way to stop it (the session does)."""
        self._messages, self._press = messages, press

    def stop(self) -> None:
        """Interrupt the cell (from any thread), as Stop does; the run must still be iterated to its end."""
        self._press()

    def __iter__(self) -> Iterator[Message]:
        return self._messages

    def wait(self, show: Callable[[Message], None] | None = None) -> Run:
        """Drive the run to its end; `show` is called with each message."""
        for message in self._messages:
            if show is not None:
                show(message)
        return self

    def add(self, message: Message) -> None:
        """Keep a message; the session calls this before the message is seen by who iterates."""
        if isinstance(message, Output):
            kept = self.outputs.setdefault(message.rank, _Kept(self._share))
            kept.append(message)
        elif isinstance(message, Events):
            self._frames.append(message.data)
            self._record = None

    @property
    def left_out(self) -> dict[int, int]:
        """rank -> characters of its output that were too many to be kept; {} if all are in `outputs`."""
        return {rank: kept.left_out for rank, kept in self.outputs.items() if isinstance(kept, _Kept) and kept.left_out}

    @property
    def error(self) -> RankError | None:
        """The first cause: the earliest error that is no consequence of another."""
        causes = [error for error in self.errors.values() if not error.consequence] or list(self.errors.values())
        return min(causes, key=lambda error: (error.time_s, error.rank), default=None)

    @property
    def record(self) -> Record:
        """Everything the ranks recorded, as one read-only `Record`."""
        if self._record is None:
            from colossal_nb.record.store import RecordBuilder
            builder = RecordBuilder()
            for frame in self._frames:
                builder.feed(frame)
            self._record = builder.record()
        return self._record

    def text(self, rank: int | None = None, name: str = "stdout") -> str:
        """All stream text of one rank (or of all, rank by rank)."""
        ranks = self.ranks if rank is None else (rank,)
        return "".join(output.text for each in ranks for output in self.outputs.get(each, [])
                       if output.kind == "stream" and output.name == name)

    @property
    def summary(self) -> Summary:
        """Figures for the line under the cell, all of them read from the record."""
        if self._summary is None or self.status == "running":
            self._summary = _summarize(self)
        return self._summary

    def slices(self) -> pandas.DataFrame:
        """The recorded slices, one row each (see `record`)."""
        return self._frame("slices")

    def memory(self) -> pandas.DataFrame:
        """The memory samples, one row per rank and instant, one column per category, in bytes."""
        return self._frame("memory")

    def _frame(self, name: str) -> pandas.DataFrame:
        from colossal_nb.record import export
        frame: pandas.DataFrame = export.to_frames(self.record)[name]
        return frame

    def to_csv(self, folder: str | Path) -> None:
        """Write the record as CSV files into `folder`."""
        from colossal_nb.record import export
        export.to_csv(self.record, Path(folder))

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the slices as a Chrome trace (opens in Perfetto)."""
        from colossal_nb.record import export
        export.to_chrome_trace(self.record, Path(path))

    def __repr__(self) -> str:
        return f"<Run {self.status}, {len(self.ranks)} ranks, {self.seconds:.2f} s>"


def _summarize(run: Run) -> Summary:
    """Peak is the largest on any rank, bytes sent those of all ranks together, the loss that of the last step."""
    from colossal_nb.plan import sent_bytes
    from colossal_nb.record import measures
    record = run.record
    peaks = measures.peak_memory(record)
    top = max(peaks, key=lambda rank: peaks[rank].total_bytes, default=None)
    sent = measures.sent_bytes(record, sent_bytes)
    losses = measures.losses(record)
    return Summary(
        engines=len(run.ranks),
        strategy=run.title or (str(run.strategy) if run.strategy is not None else ""),
        seconds=run.seconds,
        peak_bytes=None if top is None else peaks[top].total_bytes,
        peak_rank=top,
        bubble=measures.bubble(record),
        sent_bytes=int(sum(sent.values())) if sent else None,
        steps=len(measures.steps(record)),
        loss=losses[max(losses)] if losses else None,
    )
