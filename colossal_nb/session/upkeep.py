"""Keeps a session's cluster: made when wanted, grown, mended, all ranks in one world with the same names."""
from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from colossal_nb.cluster.client import Client, ClusterLost, RankFailed
from colossal_nb.cluster.door import Reply
from colossal_nb.session.copying import mend
from colossal_nb.session.loop import CellLoop, Counts

_GRACE_S = 1.0
_END_LIMIT_S = 10.0


class Upkeep:
    """One cluster at a time; a lost one is dropped, and the next `client()` makes another."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._warming: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._files = itertools.count(1)
        self._reset()

    def _reset(self) -> None:
        self.counts: defaultdict[tuple[int, int], Counts] = defaultdict(Counts)
        self.digests: dict[int, str] = {}              # of each rank's random states at the end of its last cell
        self.states = ""                               # rank 0's
        self.late: dict[str, tuple[int, int]] = {}     # requests whose prompt came back without them: (rank, life)
        self._grouped: tuple[int, ...] = ()

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

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    @property
    def present(self) -> Client | None:
        """The cluster, if there is one whose supervisor answers."""
        return self._client

    def client(self) -> Client:
        """The cluster; made now if there is none."""
        self.warm()
        self._join()
        if self._client is None:
            error, self._trouble = self._trouble, None
            raise RuntimeError(f"the cluster did not start: {error}") from error
        return self._client

    @property
    def engines(self) -> int:
        return len(self._client.members) if self._client is not None else 0

    def path(self, what: str) -> Path:
        """A fresh file name in the cluster's private folder."""
        return self.client().link.directory / f"{what}{next(self._files)}"

    def grow(self, engines: int) -> list[str]:
        """Have the ranks, all alive, all with the same names, all in one world; returns what the user should know."""
        client = self.client()
        try:
            client.backlog += client.pump(0)
            wanted = max(engines, len(client.members))
            if len(client.members) < wanted or not all(member.ready for member in client.members.values()):
                client.start(wanted)
            notes = mend(client, self.path("copy"))
            everyone = tuple(sorted(client.members))
            if self._grouped and (everyone != self._grouped or notes):
                self.regroup()
            self._grouped = everyone
        except ClusterLost:
            self.drop()
            raise
        return notes

    def regroup(self) -> None:
        """Rebuild the groups of all ranks. Raises RankFailed naming those that did not."""
        client = self.client()
        missing = client.regroup(sorted(client.members))
        if missing:
            raise RankFailed(f"ranks {', '.join(map(str, missing))} did not rebuild their groups; "
                             f"`%colossal restart --rank {missing[0]}` replaces a rank")

    def replace(self, rank: int) -> list[str]:
        """End one rank's process and wait for the next with its number."""
        client = self.client()
        if rank not in client.members:
            raise ValueError(f"there is no rank {rank}; there are {self.engines} engines, 0 to {self.engines - 1}")
        life = client.members[rank].life
        client.link.send("restart", ranks=[rank])
        client.until(lambda: client.members[rank].life != life or client.members[rank].phase == "dead", _END_LIMIT_S,
                     lambda: f"rank {rank} does not end")
        return self.grow(self.engines)

    def note_end(self, loop: CellLoop) -> None:
        """Keep what the end of a cell says for the next."""
        for rank, reply in loop.replies.items():
            self.digests[rank] = reply.get("random", "")
            self.states = reply.get("states") or self.states
        self.late = loop.still_running() if self._client is not None else {}

    def await_late(self) -> None:
        """Give ranks that are still in an earlier cell a moment. Raises RankFailed while one is."""
        if not self.late:
            return
        client = self.client()
        with suppress(TimeoutError):
            client.until(lambda: not self._still_late(client), _GRACE_S, lambda: "")
        late = self._still_late(client)
        if late:
            raise RankFailed(f"rank {late[0]} is still in an earlier cell: wait for it, or replace it with "
                             f"`%colossal restart --rank {late[0]}`")
        self.grow(self.engines)
        self.regroup()

    def _still_late(self, client: Client) -> list[int]:
        ended = {event.parent for event in client.backlog if isinstance(event, Reply) and event.kind == "execute_reply"}
        self.late = {parent: (rank, life) for parent, (rank, life) in self.late.items()
                     if parent not in ended and client.members[rank].life == life}
        return [rank for rank, _life in self.late.values()]

    def drop(self) -> None:
        """End the cluster, silently; nothing is left of it."""
        self._join()
        client, self._client = self._client, None
        self._reset()
        if client is not None:
            client.close()
