"""The kernel's view of its cluster: who is there, what arrives from it, requests between cells.

Everything arrives through `pump`, in the thread that asks; nothing happens behind the kernel's back.
"""
from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import zmq

from colossal_nb.cluster.door import Door, Reply
from colossal_nb.cluster.link import Link, here
from colossal_nb.cluster.wire import Frame

_WARM_LIMIT_S, _START_LIMIT_S, _REQUEST_LIMIT_S = 180.0, 60.0, 60.0
_PROBE_S = 0.1
_CREDIT_BYTES = 1 << 18
_MOST_BACKLOG = 1000


class ClusterLost(RuntimeError):
    """A process that the whole cluster needs has ended; the next start makes a new cluster."""


class RankFailed(RuntimeError):
    """A rank could not do what was asked of it between cells, or did not start."""


_CHATTER = re.compile(r"\b(INFO|DEBUG|WARNING)\b|queue::unknown engine|^\d{4}-\d\d-\d\d (?!.*\b(ERROR|CRITICAL)\b)")


def _fault(process: str, code: int, log: str) -> str:
    """How a process ended, with the last error of its log."""
    try:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:
        how = f"killed by signal {-code}"
    errors = [line for line in log.splitlines() if line.strip() and not _CHATTER.search(line)][-1:]
    return "\n".join([f"the {process} ended ({how})", *errors])


@dataclass
class Member:
    """One rank. `life` counts the processes that have had this number; `fresh`: it has not got the others' names."""

    rank: int
    life: int = 0
    phase: str = "asked"
    pid: int = 0
    engine: str = ""
    fresh: bool = True
    greeted: bool = False

    @property
    def ready(self) -> bool:
        return self.phase == "ready" and self.greeted


@dataclass(frozen=True)
class Death:
    """How one rank ended, in words, and the last it wrote to its log."""

    rank: int
    life: int
    pid: int
    how: str
    log: str
    time: float


Event = Reply | Frame | Death


@dataclass
class Client:
    """Made in any thread (`Client()` starts the supervisor and returns when it answers); used by one at a time."""

    link: Link = field(default_factory=Link)
    door: Door | None = None
    members: dict[int, Member] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
    epoch: int = 0
    warm: bool = False
    lost: str = ""
    backlog: list[Event] = field(default_factory=list)
    regrouping: bool = False
    unresponsive: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._credited: Counter[int] = Counter()
        self._poller = zmq.Poller()
        self._poller.register(self.link.socket, zmq.POLLIN)

    def pump(self, wait_s: float) -> list[Event]:
        """What has arrived, after waiting at most `wait_s` for the first of it. Keeps the table of members."""
        ready = dict(self._poller.poll(max(0, int(wait_s * 1000))))
        events: list[Event] = []
        if self.link.socket in ready:
            for frame in self.link.receive():
                events += self._note(frame)
        if self.door is not None:
            for socket in (self.door.output, self.door.shell):
                if socket in ready:
                    events += self.door.receive(socket)
            self._credit(self.door)
        if not ready and not self.link.alive:
            self.lost = "the supervisor ended"
        if self.lost:
            raise ClusterLost(f"{self.lost}; all ranks have ended with it. The next cell starts a new cluster")
        return events

    def _credit(self, door: Door) -> None:
        """Let ranks print on, unless what they have printed only piles up here."""
        if len(self.backlog) > _MOST_BACKLOG:
            return
        for rank, heard in door.heard.items():
            if heard - self._credited[rank] >= _CREDIT_BYTES:
                self._credited[rank] = heard
                self.link.send("credit", ranks=[rank], heard=heard)

    def _note(self, frame: Frame) -> list[Event]:
        body = frame.body
        if frame.kind == "controller" and self.door is None:
            self.door = Door(self.link.context, body["connection"])
            self._poller.register(self.door.shell, zmq.POLLIN)
            self._poller.register(self.door.output, zmq.POLLIN)
        elif frame.kind == "warm":
            self.warm = True
        elif frame.kind == "rank":
            self._seen(body)
        elif frame.kind == "death":
            death = Death(body["rank"], body["life"], body["pid"], body["how"], body["log"], time.perf_counter())
            self.deaths.append(death)
            phase = "dead" if body["phase"] == "ready" else "failed"
            self.members[death.rank] = Member(death.rank, death.life, phase)
            return [death]
        elif frame.kind == "regrouped":
            self.epoch, self.regrouping, self.unresponsive = body["epoch"], False, body["missing"]
        elif frame.kind == "fault":
            self.lost = _fault(**body)
        else:
            return [frame]
        return []

    def _seen(self, body: dict[str, Any]) -> None:
        member = self.members.get(body["rank"])
        if member is None or member.life != body["life"]:
            member = self.members[body["rank"]] = Member(body["rank"], body["life"])
        member.phase, member.pid = body["phase"], body["pid"] or member.pid
        member.engine = body["engine"] or member.engine

    def until(self, done: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
        """Pump until `done()`; what is for a cell waits in the backlog. Raises TimeoutError(what())."""
        end = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"{what()} (waited {limit_s:.0f} s)")
            self.backlog += self.pump(0.05)

    def start(self, engines: int) -> None:
        """Have ranks 0 .. engines-1, all ready. Raises RankFailed or TimeoutError that names who has not come."""
        self.until(lambda: self.door is not None, _START_LIMIT_S, lambda: "the controller has not come up")
        for rank in range(engines):
            if rank not in self.members or self.members[rank].phase == "failed":
                self.members[rank] = Member(rank)
        self.link.send("start", engines=engines, folder=here())
        self.until(lambda: self.warm, _WARM_LIMIT_S, lambda: "the fork server still imports torch")
        self.settle(range(engines))

    def settle(self, ranks: Iterable[int]) -> None:
        """Wait until these ranks are ready and both ways to them are proven open."""
        wanted = list(ranks)

        def pending() -> list[Member]:
            return [self.members[rank] for rank in wanted if self.members[rank].phase != "ready"]

        def come() -> bool:
            for member in pending():
                if member.phase == "failed":
                    death = [each for each in self.deaths if each.rank == member.rank][-1]
                    raise RankFailed(f"rank {death.rank} ended while it started ({death.how}). {death.log}".strip())
            return not pending()

        self.until(come, _START_LIMIT_S, lambda: "; ".join(f"rank {each.rank}: {each.phase}" for each in pending()))
        for rank in wanted:
            if not self.members[rank].greeted:
                self._greet(self.members[rank])

    def _greet(self, member: Member) -> None:
        """Ask until an answer comes on both sockets: a publisher drops what it says before its relay has connected."""
        assert self.door is not None
        end = time.monotonic() + _START_LIMIT_S
        replied = heard = False
        mine: set[str] = set()
        while not (replied and heard):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {member.rank}: its engine does not answer (waited {_START_LIMIT_S:.0f} s)")
            asked = self.door.send(member.engine, "colossal_request", {"verb": "hello"})
            mine.add(asked)
            stop = time.monotonic() + _PROBE_S
            while time.monotonic() < stop and not (replied and heard):
                for event in self.pump(0.02):
                    if isinstance(event, Reply) and event.parent in mine:
                        replied |= event.kind == "colossal_reply"
                        heard |= event.kind == "status"
                    else:
                        self.backlog.append(event)
        member.greeted = True

    def ask(self, ranks: Iterable[int], kind: str, content: dict[str, Any] | Callable[[int], dict[str, Any]],
            limit_s: float = _REQUEST_LIMIT_S) -> dict[int, dict[str, Any]]:
        """Ask these ranks something between cells; returns each one's answer. Raises TimeoutError, RankFailed."""
        assert self.door is not None
        asked = {}
        for rank in ranks:
            fields = content(rank) if callable(content) else content
            asked[self.door.send(self.members[rank].engine, kind, fields)] = rank
        answers: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + limit_s
        while len(answers) < len(asked):
            missing = sorted(set(asked.values()) - set(answers))
            dead = [rank for rank in missing if not self.members[rank].ready]
            if dead:
                raise RankFailed(f"rank {dead[0]} ended meanwhile")
            if time.monotonic() > end:
                raise TimeoutError(f"no answer from ranks {', '.join(map(str, missing))} (waited {limit_s:.0f} s)")
            for event in self.pump(0.05):
                if isinstance(event, Reply) and event.parent in asked:
                    if event.kind.endswith("_reply"):
                        answers[asked[event.parent]] = event.content
                else:
                    self.backlog.append(event)
        return answers

    def regroup(self, ranks: Iterable[int], limit_s: float = 6.0) -> list[int]:
        """Rebuild all groups among these ranks; returns those that have not acknowledged."""
        self.regrouping = True
        self.link.send("regroup", ranks=list(ranks))
        self.until(lambda: not self.regrouping, limit_s, lambda: "the supervisor does not regroup")
        return self.unresponsive

    def close(self) -> None:
        if self.door is not None:
            self.door.close()
        self.link.close()
