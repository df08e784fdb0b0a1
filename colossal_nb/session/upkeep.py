"""Keeps a session's cluster: made when wanted, grown, mended, all ranks in one world with the same names."""
from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from colossal_nb.cluster.client import Client, RankFailed
from colossal_nb.cluster.door import Reply
from colossal_nb.plan.strategy import Strategy
from colossal_nb.session.copying import Newcomer, mend
from colossal_nb.session.looking import busy, listed, named, stuck_text
from colossal_nb.session.loop import CellLoop, Counts
from colossal_nb.session.presses import held_back

DEFAULT_ENGINES = 4
_GRACE_S = 1.0
_END_LIMIT_S = 60.0          # a kill is sure, but the fork server may be in the middle of a long import


class Upkeep:
    """One cluster at a time; a lost one is dropped, and the next `client()` makes another."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._warming: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._lost_engines = 0                         # how many the last cluster had, if it was lost
        self._files = itertools.count(1)
        self._reset()

    def _reset(self) -> None:
        self.counts: defaultdict[tuple[int, int], Counts] = defaultdict(Counts)
        self.digests: dict[int, str] = {}              # of each rank's random states at the end of its last cell
        self.states = ""                               # rank 0's
        self.late: dict[str, tuple[int, int]] = {}     # requests whose prompt came back without them: (rank, life)
        self.newcomers: dict[int, Newcomer] = {}
        self.told_deaths = 0                           # how many deaths the last cell or restart has told of
        self._grouped: tuple[int, ...] = ()
        self._unsettled = False                        # whether the groups must be rebuilt before the next cell

    def warm(self) -> None:
        """Start the supervisor, the controller and the fork server in the background; returns at once."""
        if self.present is None and self._warming is None:
            self._trouble = None
            self._warming = threading.Thread(target=self._make, name="colossal-warm", daemon=True)
            self._warming.start()

    def _make(self) -> None:
        try:
            self._client = Client()
        except BaseException as error:
            self._trouble = error

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    @property
    def present(self) -> Client | None:
        """The cluster, if there is one that is not lost. A lost one is dropped here, whoever met the loss."""
        if self._client is not None and self._client.lost:
            self.drop()
        return self._client

    def client(self) -> Client:
        """The cluster; made now if there is none."""
        self._join()
        if self.present is not None:
            return self.present
        self.warm()                                    # again where the first was cut short by a press
        self._join()
        if self._client is None:
            error, self._trouble = self._trouble, None
            if isinstance(error, FileNotFoundError):   # says itself what to do
                raise error
            raise RuntimeError(f"the cluster did not start: {error}") from error
        return self._client

    @property
    def engines(self) -> int:
        client = self.present
        return len(client.members) if client is not None else 0

    @property
    def usual_engines(self) -> int:
        """How many engines a cell without a strategy wants: as there are, else as a cluster had that was lost."""
        return self.engines or self._lost_engines or DEFAULT_ENGINES

    def path(self, what: str) -> Path:
        """A fresh file name in the cluster's private folder."""
        return self.client().link.directory / f"{what}{next(self._files)}"

    def grow(self, engines: int) -> list[str]:
        """Have the ranks, all alive, all with the same names, all in one world; returns what the user should know."""
        notes = self._fill(engines)
        if self._unsettled:
            self.regroup()
        return notes

    def growth(self, before: int, strategy: Strategy) -> list[str]:
        """A sentence where this strategy has made a cluster of `before` engines grow; their first start is no news."""
        client = self.present
        if client is None or not 0 < before < self.engines:
            return []
        cores = client.link.cores
        on = f" on {cores} core{'s' * (cores > 1)}" if self.engines > cores else ""
        return [f"the cluster has grown from {before} to {self.engines} engines{on} for {strategy}, and they stay: "
                f"`%colossal stop`, then `%colossal start -n {before}` goes back (variables on the ranks are lost)"]

    def settle(self) -> list[str]:
        """After what tore the groups: all ranks alive, in new groups."""
        self._unsettled = True
        return self.grow(self.engines)

    def _fill(self, engines: int) -> list[str]:
        """Have the ranks, all with the same names."""
        client = self.client()
        client.backlog += client.pump(0)
        wanted = max(engines, len(client.members))
        if len(client.members) < wanted or not all(member.ready for member in client.members.values()):
            client.start(wanted)
        mended = mend(client, self.path("copy"), self.newcomers)
        self.newcomers.update(mended.newcomers)
        everyone = tuple(sorted(client.members))
        self._unsettled |= bool(self._grouped) and (everyone != self._grouped or bool(mended.newcomers))
        self._grouped = everyone
        return mended.notes

    def regroup(self) -> None:
        """Rebuild the groups of all ranks. Raises RankFailed naming those that did not."""
        client = self.client()
        missing = client.regroup(sorted(client.members))
        if missing:
            raise RankFailed(f"{named(missing)} did not rebuild the groups; "
                             f"`%colossal restart --rank {listed(missing)}` replaces {'them' if missing[1:] else 'it'}")
        self._unsettled = False

    def replace(self, ranks: Sequence[int]) -> list[str]:
        """End these ranks' processes and wait for the next with their numbers; waits for no other rank."""
        client = self.client()
        unknown = [rank for rank in ranks if rank not in client.members]
        if unknown:
            there = f"; there are {self.engines} engines, 0 to {self.engines - 1}"
            raise ValueError(f"there is no {named(unknown)}{there if self.engines else ': no engines run'}")
        lives = {rank: client.members[rank].life for rank in ranks}
        client.link.send("restart", ranks=list(ranks))
        client.until(lambda: not self._ending(lives), _END_LIMIT_S, lambda: f"{named(self._ending(lives))} not ended")
        notes = self._fill(self.engines)
        self.told_deaths = len(client.deaths)
        self._still_late(client)
        taken = busy(client, client.members)
        if taken:
            notes.append(stuck_text(taken))
        elif self._unsettled:
            self.regroup()
        return notes

    def _ending(self, lives: dict[int, int]) -> list[int]:
        """Those of these processes that still have their numbers."""
        members = self.client().members
        return [rank for rank, life in lives.items() if members[rank].life == life and members[rank].phase != "dead"]

    def note_end(self, loop: CellLoop) -> None:
        """Keep what the end of a cell says for the next."""
        for rank, reply in loop.replies.items():
            self.digests[rank] = reply.get("random", "")
            self.states = reply.get("states") or self.states
        self.late = loop.still_running() if self.present is not None else {}

    def await_late(self) -> None:
        """Give ranks that are still in an earlier cell a moment. Raises RankFailed while one is."""
        client = self.present
        if client is None or not self.late:
            return
        with suppress(TimeoutError):
            client.until(lambda: not self._still_late(client), _GRACE_S, lambda: "")
        late = sorted(set(self._still_late(client)))
        if late:
            them, are = ("them", "are") if late[1:] else ("it", "is")
            raise RankFailed(f"{named(late)} {are} still in an earlier cell: wait for {them}, or replace {them} with "
                             f"`%colossal restart --rank {listed(late)}`")
        self.settle()

    def _still_late(self, client: Client) -> list[int]:
        ended = {event.parent for event in client.backlog if isinstance(event, Reply) and event.kind == "execute_reply"}
        self.late = {parent: (rank, life) for parent, (rank, life) in self.late.items()
                     if parent not in ended and client.members[rank].life == life}
        return [rank for rank, _life in self.late.values()]

    def drop(self) -> None:
        """End the cluster, silently; nothing is left of it."""
        self._join()
        with held_back():
            client, self._client = self._client, None
            self._lost_engines = len(client.members) if client is not None and client.lost else 0
            self._reset()
            if client is not None:
                client.close()
