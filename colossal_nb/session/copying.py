"""A new or replaced rank gets by-value copies of a live rank's globals; what it cannot get is named."""
from __future__ import annotations

from pathlib import Path

from colossal_nb.cluster.client import Client


def mend(client: Client, path: Path) -> list[str]:
    """Give every fresh rank the names of a live one; returns sentences for the user."""
    fresh = [rank for rank, member in sorted(client.members.items()) if member.fresh]
    settled = [rank for rank, member in sorted(client.members.items()) if not member.fresh]
    notes: list[str] = []
    if fresh and settled:
        notes = _copy(client, settled[0], fresh, path)
    for rank in fresh:
        client.members[rank].fresh = False
    return notes


def _copy(client: Client, source: int, fresh: list[int], path: Path) -> list[str]:
    try:
        copied = client.ask([source], "colossal_request", {"verb": "copy", "path": str(path)})[source]
        if copied["status"] == "error":
            return [f"{_who(client, fresh)} and empty: copying rank {source}'s names failed, "
                    f"{copied['ename']}: {copied['evalue']}"]
        answers = client.ask(fresh, "colossal_request", {"verb": "paste", "path": str(path)}) if copied["names"] else {}
    finally:
        path.unlink(missing_ok=True)
    failed = [answer for answer in answers.values() if answer["status"] == "error"]
    if failed:
        return [f"{_who(client, fresh)} and empty: {failed[0]['ename']}: {failed[0]['evalue']}"]
    missing = [f"{name} ({reason})" for name, reason in copied["missing"].items()]
    lacks = f"; not there: {', '.join(missing)}" if missing else ""
    return [f"{_who(client, fresh)}, with copies of rank {source}'s names{lacks}"]


def _who(client: Client, fresh: list[int]) -> str:
    replaced = [rank for rank in fresh if client.members[rank].life > 1]
    word = "replaced" if replaced else "new"
    return f"rank {fresh[0]} is {word}" if len(fresh) == 1 else f"ranks {', '.join(map(str, fresh))} are {word}"
