"""The one loop that serves a running cell, in the kernel's main thread: output, events, deaths and Stop."""
from __future__ import annotations

import base64
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from colossal_nb.cluster.client import Client, ClusterLost, Death
from colossal_nb.cluster.door import Reply
from colossal_nb.cluster.wire import Frame
from colossal_nb.run import Events, Message, Output, Pause, RankError, RankState, Run
from colossal_nb.session.looking import listed
from colossal_nb.session.presses import Presses

RELEASE_AFTER_S = 1.0         # those who wait for a rank that failed
STOP_PATIENCE_S = 3.0         # a rank in native code after an interrupt
DEADLOCK_AFTER_S = 10.0       # a wait that is proven to have no end
LOST_AFTER_S = 60.0           # all have come to one operation: what it waits for is lost on the way
_SLICE_S = 0.05
_KINDS = {"display_data": "display", "update_display_data": "update_display", "execute_result": "result"}


@dataclass
class Counts:
    """Frames of events received from a rank, and how many it says it has sent, since its process began."""

    received: int = 0
    expected: int = 0


@dataclass
class Part:
    """One rank's share of the cell."""

    rank: int
    replied: bool = False
    idle: bool = False
    over: bool = False                                 # dead, or no longer waited for
    state: RankState | None = None
    reply: dict[str, Any] = field(default_factory=dict)


class CellLoop:
    """Drives one run. `parents`: the id of each rank's request."""

    def __init__(self, client: Client, run: Run, parents: dict[str, int], counts: dict[tuple[int, int], Counts],
                 timeout_s: float | None, presses: Presses) -> None:
        self.client, self.run, self.cell = client, run, run.cell
        self.parts = {rank: Part(rank) for rank in run.ranks}
        self.begin = time.perf_counter()
        self.replies: dict[int, dict[str, Any]] = {}
        self.unsettled = False                         # whether the groups must be rebuilt afterwards
        self._parents, self._counts, self._timeout_s, self._presses = parents, counts, timeout_s, presses
        self._lives = {rank: member.life for rank, member in client.members.items()}
        self._pressed = 0
        self._interrupted_at: float | None = None
        self._failed_at: float | None = None
        self._released = False
        self._verdict: tuple[str, str] | None = None   # what the unfinished ranks' errors really are

    def now(self) -> float:
        return time.perf_counter() - self.begin

    def messages(self) -> Iterator[Message]:
        """Everything that happens, until all ranks have ended the cell."""
        while not all(map(self._finished, self.parts.values())):
            backlog, self.client.backlog = self.client.backlog, []
            try:
                events = [*backlog, *(self.client.pump(0 if backlog else _SLICE_S))]
            except ClusterLost as error:
                yield from self._lost(str(error))
                raise
            for event in events:
                for message in self._handle(event):
                    self.run.add(message)
                    yield message
            if not events:
                yield Pause(self.now())
            self._watch()

    def _finished(self, part: Part) -> bool:
        if part.over:
            return True
        counts = self._counts[part.rank, self._lives[part.rank]]
        return part.replied and part.idle and counts.received >= counts.expected

    def unfinished(self) -> list[int]:
        return [rank for rank, part in self.parts.items() if not part.replied and not part.over]

    # what arrives
    def _handle(self, event: Reply | Frame | Death) -> Iterator[Message]:
        if isinstance(event, Death):
            yield from self._death(event)
        elif isinstance(event, Frame):
            yield from self._frame(event)
        else:
            yield from self._reply(event)

    def _reply(self, reply: Reply) -> Iterator[Message]:
        rank = self._parents.get(reply.parent)
        if reply.kind == "execute_reply" and rank is not None:
            yield from self._ended(rank, reply.content)
        elif reply.kind == "status":
            if rank is not None and reply.content["execution_state"] == "idle":
                self.parts[rank].idle = True
        elif reply.rank >= 0 and (rank is not None or reply.kind != "error"):       # or an earlier cell's thread
            output = output_of(reply.rank, reply, self.now())
            if output is not None:
                yield output

    def _frame(self, frame: Frame) -> Iterator[Message]:
        rank = frame.body["rank"]
        if frame.kind == "events":
            self._counts[rank, frame.body["life"]].received += 1
            yield Events(rank, frame.blobs[0])
        elif frame.kind == "state" and frame.body["cell"] == self.cell and rank in self.parts:
            state = RankState(rank, frame.body["state"], frame.body["what"], frame.body["since"] - self.begin,
                              frame.body["where"])
            self.parts[rank].state = state
            yield state

    def _ended(self, rank: int, content: dict[str, Any]) -> Iterator[Message]:
        part = self.parts[rank]
        part.replied, part.reply = True, content
        self.replies[rank] = content
        self._counts[rank, self._lives[rank]].expected += int(content.get("frames", 0))
        self.run.notes += [note for note in content.get("notes", []) if note not in self.run.notes]
        if content.get("events"):
            yield Events(rank, base64.b64decode(content["events"]))
        for page in content.get("payload", []):        # what `name?` shows
            if page.get("source") == "page":
                yield Output(rank, "display", self.now(), data=page["data"], metadata={})
        if content["status"] == "error":
            error = self._error(rank, content)
            self.run.errors[rank] = error
            self._failed(error.time_s)
            yield RankState(rank, "error", error.ename, self.now())
        else:
            yield RankState(rank, "done", "", self.now())

    def _error(self, rank: int, content: dict[str, Any]) -> RankError:
        name, value, consequence = content["ename"], content["evalue"], content["ename"] == "Released"
        if self._verdict is not None and name in ("Released", "KeyboardInterrupt"):
            (name, value), consequence = self._verdict, False
        return RankError(rank, name, value, content.get("traceback", []), content.get("line"),
                         content.get("raised_at", time.perf_counter()) - self.begin, consequence)

    def _death(self, death: Death) -> Iterator[Message]:
        if self._lives.get(death.rank) != death.life:
            return                                     # it ended before this cell and has been replaced
        self.unsettled = True
        part = self.parts.get(death.rank)
        if part is not None and not self._finished(part):
            text = self.run.text(death.rank).strip()[-200:]
            said = f"; its last output: {text}" if text else ""
            self.run.errors[death.rank] = RankError(
                death.rank, "RankDied", f"rank {death.rank} (process {death.pid}) was lost: {death.how}{said}",
                time_s=death.time - self.begin)
            part.over = True
            self._release(f"rank {death.rank} was lost ({death.how})")
        yield RankState(death.rank, "dead", death.how, self.now())

    def _lost(self, reason: str) -> Iterator[Message]:
        for rank in self.unfinished():
            self.run.errors[rank] = RankError(rank, "ClusterLost", reason, time_s=self.now())
            self.parts[rank].over = True
            yield RankState(rank, "dead", reason, self.now())

    # what time brings
    def _watch(self) -> None:
        waiting = self.unfinished()
        if not waiting:
            return
        now = self.now()
        if self._presses.count > self._pressed:
            self._pressed = self._presses.count
            self.interrupt()
        if self._timeout_s is not None and now > self._timeout_s and self._verdict is None:
            self._verdict = ("TimeoutError", f"the cell ran longer than {self._timeout_s:g} s")
            self.interrupt(by_user=False)
        if self._failed_at is not None and now > self._failed_at + RELEASE_AFTER_S:
            cause = self.run.error
            assert cause is not None
            self._release(f"rank {cause.rank} raised {cause.ename}: {cause.evalue}"[:300])
        self._end_deadlock(waiting, now)
        if self._interrupted_at is not None and now > self._interrupted_at + STOP_PATIENCE_S:
            self._abandon(waiting)

    def _end_deadlock(self, waiting: list[int], now: float) -> None:
        """All who have not ended wait for others, and somebody has ended, or they wait in different operations: nobody
        will ever come. Nor will bytes where all of them have been in one operation for long."""
        states = [self.parts[rank].state for rank in waiting]
        since = [state.since_s for state in states if state is not None and state.state == "waiting"]
        done = [rank for rank, part in self.parts.items() if part.replied]
        if len(since) < len(waiting) or self._failed_at is not None or self._released:
            return
        places: dict[str, list[int]] = defaultdict(list)
        for rank, state in zip(waiting, states, strict=True):
            assert state is not None
            places[f"{state.what} (cell {state.where})"].append(rank)
        apart = len({state.what for state in states if state is not None}) > 1
        proven = bool(done) or apart
        if now > max(since) + (DEADLOCK_AFTER_S if proven else LOST_AFTER_S):
            told = [f"{_ranks(ranks)} {'wait' if ranks[1:] else 'waits'} in {place}" for place, ranks in places.items()]
            told.append(f"{_ranks(done)} finished the cell" if done else "each waits for another" if apart else
                        f"nothing has come for {LOST_AFTER_S:g} s, so the connection has lost it: run the cell again")
            text = "; ".join(told)
            self._verdict = self._verdict or ("Deadlock", text)
            self._release(text)

    def interrupt(self, by_user: bool = True) -> None:
        """KeyboardInterrupt in every rank that still runs the cell; each press goes on to the ranks."""
        self.run.interrupted |= by_user
        self.unsettled = True
        if self._interrupted_at is None:
            self._interrupted_at = self.now()
        self.client.link.send("interrupt", ranks=self.unfinished(), cell=self.cell)

    def _failed(self, at: float) -> None:
        self.unsettled = True
        if self._failed_at is None:
            self._failed_at = min(at, self.now())

    def _release(self, reason: str) -> None:
        if not self._released and self.unfinished():
            self._released = self.unsettled = True
            self.client.link.send("release", ranks=self.unfinished(), reason=reason)

    def _abandon(self, ranks: list[int]) -> None:
        """The prompt comes back though these ranks still run; they are not replaced without being asked."""
        for rank in ranks:
            part = self.parts[rank]
            part.over = True
            where = f", {part.state.where}" if part.state is not None and part.state.where else ""
            self.run.errors.setdefault(rank, RankError(
                rank, "StillRunning", f"rank {rank} is still in the cell{where}: it caught the interrupt, or runs "
                f"native code that cannot be interrupted; `%colossal restart --rank {listed(ranks)}` "
                f"replaces {'it' if len(ranks) == 1 else 'all that are'}",
                time_s=self.now()))

    def still_running(self) -> dict[str, tuple[int, int]]:
        """The requests that have not come to an end: their ids with (rank, life)."""
        return {parent: (rank, self._lives[rank]) for parent, rank in self._parents.items()
                if not self.parts[rank].replied and self.client.members[rank].life == self._lives[rank]
                and self.client.members[rank].phase == "ready"}


def output_of(rank: int, reply: Reply, time_s: float) -> Output | None:
    """A message of a rank's engine as output, None for what is none."""
    content = reply.content
    if reply.kind == "stream":
        return Output(rank, "stream", time_s, content["name"], content["text"])
    if reply.kind in _KINDS:
        return Output(rank, _KINDS[reply.kind], time_s, data=content["data"], metadata=content.get("metadata"),
                      display_id=(content.get("transient") or {}).get("display_id", ""))
    if reply.kind == "error":
        return Output(rank, "error", time_s, content["ename"], "\n".join(content["traceback"]))
    if reply.kind == "clear_output":
        return Output(rank, "clear", time_s, "wait" if content.get("wait") else "")
    return None


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
