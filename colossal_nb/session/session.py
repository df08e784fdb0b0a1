"""The session of a kernel: starts the cluster when it is wanted, sends cells, keeps what lies between them."""
from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossal_nb.cluster import parcel
from colossal_nb.cluster.client import Client, ClusterLost, Death, RankFailed
from colossal_nb.cluster.door import Reply
from colossal_nb.plan.strategy import Strategy
from colossal_nb.run import Message, Run
from colossal_nb.session.copying import mend
from colossal_nb.session.loop import CellLoop, Counts

DEFAULT_ENGINES = 4
_GRACE_S = 1.0
_ASIDE_LIMIT_S = 2.0


@dataclass(frozen=True)
class Status:
    """What `%colossal status` shows. `members`: (rank, process id, phase); `deaths`: all of this cluster's."""

    engines: int
    warm: bool
    epoch: int
    threads: int
    members: tuple[tuple[int, int, str], ...] = ()
    deaths: tuple[Death, ...] = ()
    running: bool = False


class Session:
    """One per kernel (`current()`); all calls from the kernel's main thread, except `interrupt`."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._warming: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._loop: CellLoop | None = None
        self._run: Run | None = None
        self._cells = itertools.count(1)
        self._files = itertools.count(1)
        self._counts: defaultdict[tuple[int, int], Counts] = defaultdict(Counts)
        self._digests: dict[int, str] = {}
        self._states = ""
        self._grouped: tuple[int, ...] = ()
        self._late: dict[str, tuple[int, int]] = {}

    # the cluster
    def warm(self) -> None:
        """Start the supervisor, the controller and the fork server in the background; returns at once."""
        if self._client is None and self._warming is None:
            self._trouble = None
            self._warming = threading.Thread(target=self._make, name="colossal-warm", daemon=True)
            self._warming.start()

    def _make(self) -> None:
        try:
            self._client = Client()
        except BaseException as error:
            self._trouble = error

    def _cluster(self) -> Client:
        self.warm()
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        if self._trouble is not None or self._client is None:
            error, self._trouble = self._trouble, None
            raise RuntimeError(f"the cluster did not start: {error}") from error
        return self._client

    @property
    def engines(self) -> int:
        """How many ranks there are, 0 before the start."""
        return len(self._client.members) if self._client is not None else 0

    def start(self, engines: int | None = None) -> Status:
        """Have at least this many ranks (None: 4 if there are none). Never takes ranks away.

        Raises ValueError for an absurd number, TimeoutError or RankFailed that names the rank and where it is stuck.
        """
        Strategy(dp=engines or DEFAULT_ENGINES).check()
        self._settle()
        self._grow(engines or max(self.engines, DEFAULT_ENGINES))
        return self.status()

    def _grow(self, engines: int) -> list[str]:
        """Have the ranks, all alive, all with the same names, all in one world; returns what the user should know."""
        client = self._cluster()
        try:
            client.backlog += client.pump(0)
            wanted = max(engines, len(client.members))
            if any(not client.members[rank].ready for rank in range(wanted) if rank in client.members) or \
                    len(client.members) < wanted:
                client.start(wanted)
            notes = mend(client, self._path("copy"))
            everyone = tuple(sorted(client.members))
            if self._grouped and (everyone != self._grouped or notes):
                self._regroup(client)
            self._grouped = everyone
        except ClusterLost:
            self._drop()
            raise
        return notes

    def _regroup(self, client: Client) -> None:
        missing = client.regroup(sorted(client.members))
        if missing:
            raise RankFailed(f"ranks {', '.join(map(str, missing))} did not rebuild their groups; "
                             f"`%colossal restart --rank {missing[0]}` replaces a rank")

    def stop(self) -> None:
        """End the cluster, silently; nothing is left of it."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        self._drop()

    def _drop(self) -> None:
        client, self._client = self._client, None
        self._loop = self._run = None
        self._counts.clear()
        self._digests, self._states, self._grouped, self._late = {}, "", (), {}
        if client is not None:
            client.close()

    def restart(self, rank: int | None = None) -> list[str]:
        """Replace one rank's process (its names are copied from a live rank), or all (all names are gone)."""
        if rank is None:
            engines = self.engines
            self.stop()
            return self._grow(engines or DEFAULT_ENGINES)
        client = self._cluster()
        if rank not in client.members:
            raise ValueError(f"there is no rank {rank}; there are {self.engines} engines, 0 to {self.engines - 1}")
        life = client.members[rank].life
        client.link.send("restart", ranks=[rank])
        client.until(lambda: client.members[rank].life != life, 10.0, lambda: f"rank {rank} does not end")
        return self._grow(self.engines)

    def status(self) -> Status:
        """The state of things now; starts nothing."""
        client = self._client
        if client is None:
            return Status(0, False, 0, 0)
        if self._loop is None:
            client.backlog += client.pump(0)
        members = tuple((each.rank, each.pid, each.phase) for _, each in sorted(client.members.items()))
        return Status(len(members), client.warm, client.epoch, max(1, client.link.cores // max(1, len(members))),
                      members, tuple(client.deaths), self._loop is not None)

    # cells
    def run(self, source: str, strategy: Strategy | str | None = None, *, ranks: Sequence[int] | None = None,
            timeout_s: float | None = None, record: bool = True) -> Run:
        """Send a cell to the ranks; the returned Run is then iterated to its end.

        Starts or grows the cluster if need be. `ranks` (some of them) is for cells without a strategy. Raises
        ValueError before anything runs for what cannot be right.
        """
        wanted = Strategy.parse(strategy) if isinstance(strategy, str) else strategy
        if wanted is not None:
            wanted.check()
            if ranks is not None:
                raise ValueError("--ranks is for cells without a strategy: a strategy says itself who works")
        self._settle()
        notes = self._grow(wanted.needs if wanted is not None and (self.engines or wanted.needs) else
                           (self.engines or DEFAULT_ENGINES))
        chosen = self._chosen(wanted, ranks)
        return self._send(source, wanted, chosen, timeout_s, record, notes)

    def _chosen(self, strategy: Strategy | None, ranks: Sequence[int] | None) -> tuple[int, ...]:
        if strategy is not None:
            return tuple(range(strategy.uses(self.engines)))
        chosen = tuple(sorted(set(ranks))) if ranks is not None else tuple(range(self.engines))
        unknown = [rank for rank in chosen if not 0 <= rank < self.engines]
        if unknown or not chosen:
            raise ValueError(f"no rank {', '.join(map(str, unknown)) or 'at all'} among the {self.engines} engines: "
                             f"ranks are 0 to {self.engines - 1}")
        return chosen

    def _send(self, source: str, strategy: Strategy | None, chosen: tuple[int, ...], timeout_s: float | None,
              record: bool, notes: list[str]) -> Run:
        client, cell = self._cluster(), next(self._cells)
        assert client.door is not None
        filled = strategy.filled(self.engines) if strategy is not None else None
        idle = self.engines - len(chosen)
        if strategy is not None and idle:
            notes = [*notes, f"{strategy} works on {len(chosen)} of {self.engines} engines; the rest wait"]
        run = Run(source, filled, chosen, self.engines, tuple(notes))
        run.title = strategy.describe(self.engines) if strategy is not None else ""
        settings = {"cell": cell, "strategy": None if filled is None else str(filled), "ranks": list(chosen),
                    "engines": len(chosen) if filled is not None else self.engines, "record": record,
                    "threads": max(1, client.link.cores // self.engines)}
        content = {"code": source, "silent": False, "store_history": True, "user_expressions": {},
                   "allow_stdin": False, "stop_on_error": False}
        parents: dict[str, int] = {}
        lead = self._digests.get(0)
        loop = CellLoop(client, run, parents, self._counts, cell, timeout_s)
        for rank in chosen:
            differs = self._states and self._digests.get(rank) != lead
            metadata = {"colossal": {**settings, "random": self._states} if differs else settings}
            parents[client.door.send(client.members[rank].engine, "execute_request", content, metadata)] = rank
        self._loop, self._run = loop, run
        run.attach(self._drive(loop, run), loop.presses.press)
        return run

    def _drive(self, loop: CellLoop, run: Run) -> Iterator[Message]:
        try:
            yield from loop.messages()
        except ClusterLost as error:
            run.notes.append(str(error))
            self._drop()
        except GeneratorExit:
            if sys.is_finalizing():
                return
            loop.presses.press()                       # nobody looks any more: end the cell, keep the cluster right
            for _ in loop.messages():
                pass
            raise
        finally:
            self._finish(loop, run)

    def _finish(self, loop: CellLoop, run: Run) -> None:
        """The ranks are brought back into one state before the prompt: replaced, regrouped, acknowledged."""
        if sys.is_finalizing():
            return
        run.seconds = loop.now()
        for rank, reply in loop.replies.items():
            self._digests[rank] = reply.get("random", "")
            self._states = reply.get("states") or self._states
        self._late = loop.still_running() if self._client is not None else {}
        try:
            if self._client is not None and loop.unsettled and not self._late:
                run.notes += self._grow(self.engines)
                self._regroup(self._client)
        except (ClusterLost, RankFailed, TimeoutError) as error:
            run.notes.append(str(error))
        interrupted = run.interrupted and any(each.ename in ("KeyboardInterrupt", "StillRunning")
                                              for each in run.errors.values())
        run.status = "interrupted" if interrupted else ("error" if run.errors else "ok")
        self._loop = None

    def _settle(self) -> None:
        """End what an earlier cell has left open. Raises RankFailed while a rank is still in it."""
        if self._run is not None and self._run.status == "running":
            self._run.stop()
            self._run.wait()
        self._run = None
        if self._late:
            client = self._cluster()
            with suppress(TimeoutError):
                client.until(lambda: not self._still_late(client), _GRACE_S, lambda: "")
            late = self._still_late(client)
            if late:
                raise RankFailed(f"rank {late[0]} is still in an earlier cell: wait for it, or replace it with "
                                 f"`%colossal restart --rank {late[0]}`")
            self._grow(self.engines)
            self._regroup(client)

    def _still_late(self, client: Client) -> list[int]:
        """The ranks that have not come back from a cell whose prompt came back without them."""
        ended = {event.parent for event in client.backlog if isinstance(event, Reply) and event.kind == "execute_reply"}
        self._late = {parent: (rank, life) for parent, (rank, life) in self._late.items()
                      if parent not in ended and client.members[rank].life == life}
        return [rank for rank, _life in self._late.values()]

    def interrupt(self) -> None:
        """Stop the running cell, from any thread; nothing happens between cells."""
        loop = self._loop
        if loop is not None:
            loop.presses.press()

    # values and names
    def _path(self, what: str) -> Path:
        return self._cluster().link.directory / f"{what}{next(self._files)}"

    def _ask(self, ranks: Sequence[int], verb: str, **fields: Any) -> dict[int, dict[str, Any]]:
        answers = self._cluster().ask(ranks, "colossal_request", {"verb": verb, **fields})
        for rank, answer in answers.items():
            if answer["status"] == "error":
                raise RankFailed(f"rank {rank}: {answer['ename']}: {answer['evalue']}")
        return answers

    def push(self, values: Mapping[str, Any]) -> None:
        """Give every rank these names, by value. Raises what pickling raises, with the name."""
        self._settle()
        self._grow(self.engines or DEFAULT_ENGINES)
        path = self._path("push")
        try:
            parcel.write(path, dict(values))
            self._ask(range(self.engines), "push", path=str(path))
        finally:
            path.unlink(missing_ok=True)

    def pull(self, name: str, rank: int | None = None) -> Any:
        """A rank's value of a name (None: rank 0's). Arrays for tensors unless torch is imported here."""
        self._settle()
        if not self.engines:
            raise RankFailed("no engines run, so there is nothing to pull")
        where = self._chosen(None, [rank or 0])
        path = self._path("pull")
        try:
            self._ask(where, "pull", name=name, path=str(path), as_numpy="torch" not in sys.modules)
            return parcel.read(path)
        finally:
            path.unlink(missing_ok=True)

    def names(self) -> dict[int, dict[str, str]]:
        """rank -> name -> what it is."""
        if not self.engines or self._loop is not None:
            return {}
        return {rank: answer["names"] for rank, answer in self._ask(range(self.engines), "names").items()}

    def complete(self, code: str, cursor: int) -> dict[str, Any]:
        """Completions on rank 0, as a Jupyter complete_reply; {} while a cell runs or without engines."""
        return self._aside("complete_request", {"code": code, "cursor_pos": cursor})

    def inspect(self, code: str, cursor: int, detail: int = 0) -> dict[str, Any]:
        """Help on the name at the cursor on rank 0, as a Jupyter inspect_reply; {} as for `complete`."""
        return self._aside("inspect_request", {"code": code, "cursor_pos": cursor, "detail_level": detail})

    def _aside(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        client = self._client
        if client is None or self._loop is not None or 0 not in client.members or not client.members[0].ready:
            return {}
        try:
            return client.ask([0], kind, content, limit_s=_ASIDE_LIMIT_S)[0]
        except (TimeoutError, RankFailed, ClusterLost):
            return {}


_current: Session | None = None


def current() -> Session:
    """The session of this kernel."""
    global _current
    if _current is None:
        _current = Session()
    return _current
