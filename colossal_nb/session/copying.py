"""A new or replaced rank gets by-value copies of a live rank's globals; what it cannot get is named."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossal_nb.cluster.client import Client
from colossal_nb.session.looking import busy, named

_COPY_LIMIT_S = 60.0
Names = dict[int, dict[str, str]]
"""rank -> name -> what it is."""


@dataclass(frozen=True)
class Newcomer:
    """A rank that began after others. `lacks`: name -> why; `empty`: it got no names at all."""

    rank: int
    replaced: bool
    lacks: Mapping[str, str] = field(default_factory=dict)
    empty: bool = False

    def reason(self, name: str) -> str | None:
        """Why this rank does not have a name ("": it has none), None if that is not known."""
        return self.lacks.get(name, "" if self.empty else None)


@dataclass
class Mended:
    """`notes`: sentences for the user; `newcomers`: the ranks that began."""

    notes: list[str] = field(default_factory=list)
    newcomers: dict[int, Newcomer] = field(default_factory=dict)


def mend(client: Client, path: Path, before: Mapping[int, Newcomer]) -> Mended:
    """Give every fresh rank the names of the live one that has most; no rank that is busy is waited for.

    `before`: earlier newcomers; what they never got they cannot give.
    """
    fresh = [rank for rank, member in sorted(client.members.items()) if member.fresh]
    settled = [rank for rank, member in sorted(client.members.items()) if not member.fresh]
    mended = Mended()
    if not fresh:
        return mended
    if settled:
        lacks, empty, note = _fill(client, fresh, settled, path, before)
    else:
        lacks, empty = {}, True
        note = "all ranks are new and empty: the variables of the old ones are gone, run the cells that make them again"
    replaced = {rank: client.members[rank].life > 1 for rank in fresh}
    mended.notes += [note] if settled or any(replaced.values()) else []
    for rank in fresh:
        mended.newcomers[rank] = Newcomer(rank, replaced[rank], lacks, empty and bool(mended.notes))
        client.members[rank].fresh = False
    return mended


def _fill(client: Client, fresh: list[int], settled: list[int], path: Path,
          before: Mapping[int, Newcomer]) -> tuple[dict[str, str], bool, str]:
    """What the fresh ranks lack, whether that is everything, and a sentence."""
    taken = set(busy(client, settled))
    free = [rank for rank in settled if rank not in taken and client.members[rank].ready]
    if not free:
        return {}, True, f"{_who(client, fresh)} and empty: no other rank is free to copy its names"
    answers = _ask(client, free, verb="names")
    found = {rank: answer.get("names", {}) for rank, answer in answers.items()}
    source = max(free, key=lambda rank: (len(found[rank]), -rank))
    giver = before.get(source, Newcomer(source, replaced=False))
    if giver.empty and not found[source]:
        return {}, True, f"{_who(client, fresh)} and empty: no other rank has names to copy"
    copied, trouble = _copy(client, source, fresh, path)
    if trouble:
        return {}, True, f"{_who(client, fresh)} and empty: {trouble}"
    lacks = {**{name: why for name, why in giver.lacks.items() if name not in found[source]},
             **copied["missing"], **_elsewhere(found, source)}
    said = f"; not there: {', '.join(f'{name} ({why})' for name, why in lacks.items())}" if lacks else ""
    return lacks, giver.empty, f"{_who(client, fresh)}, with copies of rank {source}'s names{said}"


def _elsewhere(found: Names, source: int) -> dict[str, str]:
    """Names that others have and the source of the copies has not, each with the reason why it is not copied."""
    lacks: dict[str, str] = {}
    for name in sorted({name for names in found.values() for name in names} - found[source].keys()):
        there = [rank for rank, names in found.items() if name in names]
        parallel = found[there[0]][name].endswith(", parallel")
        lacks[name] = "is parallel" if parallel else f"is on {named(there)} alone"
    return lacks


def _copy(client: Client, source: int, fresh: list[int], path: Path) -> tuple[dict[str, Any], str]:
    """The source's answer, and what went wrong in words. What a fresh rank cannot read is left out, all else is
    written together once more: what is shared stays shared."""
    try:
        copied, trouble = _once(client, source, fresh, path, [])
        if trouble and copied["status"] == "ok" and (missing := _unreadable(client, source, fresh, path)):
            copied, trouble = _once(client, source, fresh, path, list(missing))
            copied["missing"] = {**copied.get("missing", {}), **missing}
    finally:
        path.unlink(missing_ok=True)
    return copied, trouble


def _once(client: Client, source: int, fresh: list[int], path: Path,
          without: list[str]) -> tuple[dict[str, Any], str]:
    copied = _ask(client, [source], verb="copy", path=str(path), without=without)[source]
    if copied["status"] == "error":
        return copied, f"copying rank {source}'s names failed, {copied['ename']}: {copied['evalue']}"
    answers = _ask(client, fresh, verb="push", path=str(path)) if copied["names"] else {}
    failed = [answer for answer in answers.values() if answer["status"] == "error"]
    return copied, f"{failed[0]['ename']}: {failed[0]['evalue']}" if failed else ""


def _unreadable(client: Client, source: int, fresh: list[int], path: Path) -> dict[str, str]:
    """The source's names whose copies some fresh rank cannot read, each with the reason."""
    copied = _ask(client, [source], verb="copy", path=str(path), apart=True)[source]
    if copied["status"] == "error":
        return {}
    answers = _ask(client, fresh, verb="unreadable", path=str(path), names=copied["names"])
    return {name: why for answer in answers.values() for name, why in answer.get("missing", {}).items()}


def _ask(client: Client, ranks: list[int], **request: Any) -> dict[int, dict[str, Any]]:
    return client.ask(ranks, "colossal_request", request, _COPY_LIMIT_S)


def _who(client: Client, fresh: list[int]) -> str:
    word = "replaced" if any(client.members[rank].life > 1 for rank in fresh) else "new"
    return f"{named(fresh)} {'is' if len(fresh) == 1 else 'are'} {word}"
