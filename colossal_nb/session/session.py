"""The session of a kernel: starts the cluster when it is wanted, sends cells, asks ranks for values and names."""
from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from colossal_nb.cluster import parcel
from colossal_nb.cluster.client import ClusterLost, Death, RankFailed
from colossal_nb.plan.strategy import Strategy
from colossal_nb.run import MOST_TEXT, Message, Run
from colossal_nb.session import pushing
from colossal_nb.session.explaining import explain, unexplained, where
from colossal_nb.session.looking import LOOK_S, Doing, look, named
from colossal_nb.session.loop import CellLoop
from colossal_nb.session.presses import Presses
from colossal_nb.session.upkeep import DEFAULT_ENGINES, Upkeep

_ASIDE_LIMIT_S, _ASIDE_LOOK_S = 2.0, 0.5


@dataclass(frozen=True)
class Status:
    """What `%colossal status` shows. `members`: (rank, process id, phase); `deaths`: all of this cluster's, of which
    `told` had been seen by the last cell or restart; `doing`: what each rank does, between cells."""

    engines: int
    warm: bool
    epoch: int
    threads: int
    members: tuple[tuple[int, int, str], ...] = ()
    deaths: tuple[Death, ...] = ()
    running: bool = False
    told: int = 0
    doing: Mapping[int, Doing] = field(default_factory=dict)


class Session:
    """One per kernel (`current()`); all calls from the kernel's main thread, except `interrupt`."""

    def __init__(self) -> None:
        self._upkeep = Upkeep()
        self._loop: CellLoop | None = None
        self._thread = 0                               # the one that sent the last cell
        self._run: Run | None = None
        self._cells = itertools.count(1)

    # the cluster
    def warm(self) -> None:
        """Start the supervisor, the controller and the fork server in the background; returns at once."""
        self._upkeep.warm()

    @property
    def engines(self) -> int:
        """How many ranks there are, 0 before the start."""
        return self._upkeep.engines

    @property
    def usual_engines(self) -> int:
        """How many ranks a cell without a strategy runs on: those there are, as many as a lost cluster had, or 4."""
        return self._upkeep.usual_engines

    def start(self, engines: int | None = None) -> Status:
        """Have at least this many ranks (None: 4 if there are none). Never takes ranks away.

        Raises ValueError for an absurd number, TimeoutError or RankFailed that names the rank and where it is stuck.
        """
        Strategy(dp=DEFAULT_ENGINES if engines is None else engines).check()
        self._settle()
        self._upkeep.grow(engines or max(self.engines, DEFAULT_ENGINES))
        return self.status()

    def growth(self, before: int, strategy: Strategy) -> list[str]:
        """What to tell where this strategy has made the cluster grow from so many engines."""
        return self._upkeep.growth(before, strategy)

    def stop(self) -> None:
        """End the cluster, silently; nothing is left of it. Raises RankFailed from a thread while a cell runs."""
        self._from_its_thread()
        self._loop = self._run = None
        self._upkeep.drop()

    def restart(self, rank: int | Sequence[int] | None = None) -> list[str]:
        """Replace processes of ranks (names are copied from a rank that is free), or all (all names are gone).

        Returns sentences for the user: what the new ranks have and what they lack, and which ranks are stuck.
        """
        self._from_its_thread()
        if rank is not None:
            return self._upkeep.replace([rank] if isinstance(rank, int) else list(rank))
        engines = self.engines
        self.stop()
        return self._upkeep.grow(engines or DEFAULT_ENGINES)

    def status(self) -> Status:
        """The state of things now; starts nothing."""
        client = self._upkeep.present
        if client is None:
            return Status(0, False, 0, 0)
        if self._loop is None:
            try:
                client.backlog += client.pump(0)
            except ClusterLost:
                self.stop()
                return Status(0, False, 0, 0, deaths=tuple(client.deaths))
        members = tuple((each.rank, each.pid, each.phase) for _, each in sorted(client.members.items()))
        return Status(len(members), client.warm, client.epoch, client.link.cores // max(1, len(members)) or 1,
                      members, tuple(client.deaths), self._loop is not None, self._upkeep.told_deaths, self.doing())

    def doing(self, limit_s: float = LOOK_S) -> dict[int, Doing]:
        """What each rank does between cells; {} while a cell runs or without engines."""
        client = self._upkeep.present
        if client is None or self._loop is not None:
            return {}
        return look(client, client.members, limit_s)

    # cells
    def run(self, source: str, strategy: Strategy | str | None = None, *, ranks: Sequence[int] | None = None,
            timeout_s: float | None = None, record: bool = True, verify: bool = False) -> Run:
        """A cell for the ranks; the returned Run is then iterated to its end, and its first step sends it.

        Starts or grows the cluster if need be. `ranks` (some of them) is for cells without a strategy. Raises
        ValueError before anything runs for what cannot be right.
        """
        wanted = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
        if wanted is not None:
            wanted.check()
            if ranks is not None:
                raise ValueError("--ranks is for cells without a strategy: a strategy says itself who works")
        self._settle()
        before = self.engines
        notes = self._upkeep.grow(wanted.needs if wanted is not None else self._upkeep.usual_engines)
        notes += self.growth(before, wanted) if wanted is not None else []
        wishes = {"record": record, "verify": verify}
        return self._made(source, wanted, self._chosen(wanted, ranks), timeout_s, wishes, notes)

    def _chosen(self, strategy: Strategy | None, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if strategy is not None:
            return tuple(range(strategy.uses(self.engines)))
        chosen = tuple(sorted(set(ranks))) if ranks is not None else tuple(range(self.engines))
        unknown = [rank for rank in chosen if not 0 <= rank < self.engines]
        if unknown or not chosen:
            raise ValueError(f"no rank {', '.join(map(str, unknown)) or 'at all'} among the {self.engines} engines: "
                             f"ranks are 0 to {self.engines - 1}")
        return chosen

    def _made(self, source: str, strategy: Strategy | None, chosen: tuple[int, ...], timeout_s: float | None,
              wishes: dict[str, bool], notes: list[str]) -> Run:
        filled = strategy.filled(self.engines) if strategy is not None else None
        run = Run(source, filled, chosen, self.engines, tuple(notes))
        run.cell = next(self._cells)
        if strategy is not None:
            run.title = strategy.describe(self.engines)
            if len(chosen) < self.engines:
                run.notes.append(f"{run.title} works on {len(chosen)} of {self.engines} engines; the rest wait")
        settings = {"cell": run.cell, "strategy": None if filled is None else str(filled), "ranks": list(chosen),
                    "threads": self._upkeep.client().link.cores // self.engines or 1, **wishes}
        presses = Presses()
        run.attach(self._drive(run, settings, timeout_s, presses), presses.press)
        self._run = run
        return run

    def _send(self, run: Run, settings: dict[str, Any], timeout_s: float | None, presses: Presses) -> CellLoop:
        """The cell goes to its ranks. Raises RankFailed if the session has another since."""
        if self._run is not run:
            raise RankFailed("this cell was never sent, and now another is: run it again")
        upkeep, client = self._upkeep, self._upkeep.client()
        assert client.door is not None
        parents: dict[str, int] = {}
        loop = CellLoop(client, run, parents, upkeep.counts, timeout_s, presses)
        content = {"code": run.source, "silent": False, "store_history": True, "user_expressions": {},
                   "allow_stdin": False, "stop_on_error": False}
        for rank in run.ranks:
            differs = upkeep.states and upkeep.digests.get(rank) != upkeep.digests.get(0)
            own = {"heard": client.door.heard[rank], **({"random": upkeep.states} if differs else {})}
            metadata = {"colossal": {**settings, **own}}
            parents[client.door.send(client.members[rank].engine, "execute_request", content, metadata)] = rank
        upkeep.told_deaths = len(client.deaths)
        self._loop, self._thread = loop, threading.get_ident()
        return loop

    def _drive(self, run: Run, settings: dict[str, Any], timeout_s: float | None,
               presses: Presses) -> Iterator[Message]:
        # From before the cell is sent until the ranks are back in one state, Stop is counted: raised in between, it
        # would leave a cell that nobody looks after.
        with presses:
            loop = self._send(run, settings, timeout_s, presses)
            try:
                yield from loop.messages()
            except ClusterLost as error:
                if not any(each.ename == "ClusterLost" for each in run.errors.values()):
                    run.notes.append(str(error))
                self._upkeep.drop()
            except GeneratorExit:
                if not sys.is_finalizing():
                    presses.press()                    # nobody looks any more: end the cell, keep the cluster right
                    for _ in loop.messages():
                        pass
                raise
            finally:
                if not sys.is_finalizing():
                    self._finish(loop, run)

    def _finish(self, loop: CellLoop, run: Run) -> None:
        """The ranks are brought back into one state before the prompt: replaced, regrouped, acknowledged."""
        run.seconds = loop.now()
        self._upkeep.note_end(loop)
        try:
            if self._upkeep.present is not None and loop.unsettled and not self._upkeep.late:
                run.notes += self._upkeep.settle()
        except (ClusterLost, RankFailed, TimeoutError) as error:
            run.notes.append(str(error))
        if run.left_out:
            run.notes.append(f"more output than a run keeps ({MOST_TEXT >> 20} M characters): of "
                             f"{named(run.left_out)} the middle is not in cnb.last_run.outputs")
        explain(run, self._upkeep.newcomers, self.engines)
        stopped = any(error.ename in ("KeyboardInterrupt", "StillRunning") for error in run.errors.values())
        run.status = "interrupted" if run.interrupted and stopped else ("error" if run.errors else "ok")
        self._loop = None
        wanted = unexplained(run)
        if wanted:
            with suppress(TimeoutError, RankFailed, ClusterLost):
                where(run, wanted, self.names(_ASIDE_LIMIT_S))

    @property
    def busy(self) -> bool:
        """Whether a cell runs now."""
        return self._loop is not None

    def _from_its_thread(self) -> None:
        """Raise RankFailed in another thread than the one that serves a running cell: the sockets are that one's."""
        if self._loop is not None and threading.get_ident() != self._thread:
            raise RankFailed("a cell runs on the ranks now: stop it, or wait for its end")

    def _settle(self) -> None:
        """End what an earlier cell has left open. Raises RankFailed while a rank is still in it."""
        self._from_its_thread()
        if self._run is not None and self._loop is not None:
            self._run.stop()
            self._run.wait()
        self._run = None
        self._upkeep.await_late()

    def interrupt(self) -> None:
        """Stop the running cell, from any thread; nothing happens between cells."""
        run = self._run
        if run is not None:
            run.stop()

    # values and names
    def _ask(self, ranks: Sequence[int], verb: str, limit_s: float = 60.0, **fields: Any) -> dict[int, dict[str, Any]]:
        answers = self._upkeep.client().ask(ranks, "colossal_request", {"verb": verb, **fields}, limit_s)
        for rank, answer in answers.items():
            if answer["status"] == "error":
                raise RankFailed(f"rank {rank}: {answer['ename']}: {answer['evalue']}")
        return answers

    def push(self, values: Mapping[str, Any]) -> list[str]:
        """Give every rank these names, by value. Functions of cells find the ranks' names there; what they read and
        some rank lacks goes along, bound where it lacks. Returns sentences on that. Raises what pickling raises."""
        self._settle()
        self._upkeep.grow(self._upkeep.usual_engines)
        path = self._upkeep.path("push")
        try:
            push = pushing.gather(values, self._lacking)
            parcel.write(path, (push.values, push.helping), pushing.pickler)
            self._ask(range(self.engines), "push", path=str(path))
        finally:
            path.unlink(missing_ok=True)
        return push.notes()

    def _lacking(self, names: list[str]) -> set[str]:
        """Those of these names that some rank does not have."""
        answers = self._ask(range(self.engines), "lacking", names=names)
        return {name for answer in answers.values() for name in answer["names"]}

    def pull(self, name: str, rank: int | None = None) -> Any:
        """A rank's value of a name (None: rank 0's). Arrays for tensors unless torch is imported here."""
        self._settle()
        if not self.engines:
            raise RankFailed("no engines run, so there is nothing to pull")
        where = self._chosen(None, [rank or 0])
        path = self._upkeep.path("pull")
        try:
            self._ask(where, "pull", name=name, path=str(path), as_numpy="torch" not in sys.modules)
            return parcel.read(path)
        finally:
            path.unlink(missing_ok=True)

    def names(self, limit_s: float = 60.0) -> dict[int, dict[str, str]]:
        """rank -> name -> what it is, of the ranks that are free; {} while a cell runs or without engines.

        TimeoutError after `limit_s`.
        """
        free = [rank for rank, doing in self.doing(min(LOOK_S, limit_s)).items() if doing.free]
        return {rank: answer["names"] for rank, answer in self._ask(free, "names", limit_s).items()} if free else {}

    def complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Completions on a free rank, as a Jupyter complete_reply; {} while a cell runs or without engines."""
        return self._aside("complete_request", {"code": code, "cursor_pos": cursor})

    def inspect(self, code: str, cursor: int, detail: int = 0) -> dict[str, Any]:
        """Help on the name at the cursor on a free rank, as a Jupyter inspect_reply; {} as for `complete`."""
        return self._aside("inspect_request", {"code": code, "cursor_pos": cursor, "detail_level": detail})

    def _aside(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        try:
            free = [rank for rank, doing in self.doing(_ASIDE_LOOK_S).items() if doing.free][:1]
            return self._upkeep.client().ask(free, kind, content, _ASIDE_LIMIT_S)[free[0]] if free else {}
        except (TimeoutError, RankFailed, ClusterLost):
            return {}


_current: Session | None = None


def current() -> Session:
    """The session of this kernel."""
    global _current
    if _current is None:
        _current = Session()
    return _current
