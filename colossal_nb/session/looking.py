"""What the ranks do now: their side threads say it at once, wherever their main threads are."""
from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from colossal_nb.cluster.client import Client
from colossal_nb.cluster.wire import Frame

LOOK_S = 1.0
"""A rank that says nothing for so long is frozen, or in native code that lets no thread run."""


@dataclass(frozen=True)
class Doing:
    """What one rank does between the kernel's cells: `cell` is the one that it is still in (0: none)."""

    rank: int
    answers: bool = False
    cell: int = 0
    where: str = ""
    since_s: float = 0.0

    @property
    def free(self) -> bool:
        """Whether it answers requests."""
        return self.answers and not self.cell


def look(client: Client, ranks: Iterable[int], limit_s: float = LOOK_S) -> dict[int, Doing]:
    """What these ranks do, of those that are up."""
    lives = {rank: client.members[rank].life for rank in ranks if client.members[rank].phase == "ready"}
    found = {rank: Doing(rank) for rank in lives}
    if lives:
        client.link.send("look", ranks=list(lives))
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(not found[rank].answers and client.members[rank].life == life
                                         for rank, life in lives.items()):
        for event in client.pump(0.02):
            if not (isinstance(event, Frame) and event.kind == "stack"):
                client.backlog.append(event)
            elif lives.get(event.body["rank"]) == event.body["life"]:
                body = event.body
                since_s = max(0.0, time.perf_counter() - body["since"]) if body["cell"] else 0.0
                found[body["rank"]] = Doing(body["rank"], True, body["cell"], body["where"], since_s)
    return found


def busy(client: Client, ranks: Iterable[int], limit_s: float = LOOK_S) -> list[int]:
    """Those of these ranks that answer no requests now."""
    return [doing.rank for doing in look(client, ranks, limit_s).values() if not doing.free]


def stuck_text(ranks: list[int]) -> str:
    """That these ranks are busy, and the one command that replaces them."""
    many = len(ranks) > 1
    return (f"{named(ranks)} {'are' if many else 'is'} still in an earlier cell, or {'do' if many else 'does'} not "
            f"answer: wait, or replace {'them' if many else 'it'} with `%colossal restart --rank {listed(ranks)}`")


def named(ranks: Iterable[int]) -> str:
    """rank 2; ranks 0, 2"""
    found = list(ranks)
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def listed(ranks: Iterable[int]) -> str:
    """As the magics take it: 0,2"""
    return ",".join(map(str, ranks))
