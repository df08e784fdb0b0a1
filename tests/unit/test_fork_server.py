"""The fork server's children end at any moment: also while it goes through them."""
from __future__ import annotations

import os
from typing import Any

import pytest

from colossal_nb.engine import fork_server


class Told(fork_server.ForkServer):
    """A server with children of its own making, whose words are kept."""

    def __init__(self) -> None:
        self._children, self._reaping, self.told = {}, False, []

    def tell(self, what: str, **fields: Any) -> None:
        self.told.append((what, fields["rank"], fields["how"]))

    def have(self, rank: int) -> None:
        pid = os.posix_spawn("/bin/sleep", ["sleep", "30"], os.environ, setsid=True)
        self._children[pid] = (rank, 0)


def test_a_rank_that_ends_while_ranks_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Told()
    for rank in range(3):
        server.have(rank)
    kill = fork_server._kill

    def killed_and_heard_of(pid: int) -> None:
        kill(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        server._reap()                                 # as the signal's handler does

    monkeypatch.setattr(fork_server, "_kill", killed_and_heard_of)
    server._obey({"verb": "kill", "ranks": [0, 1, 2]})
    assert sorted(server.told) == [("exit", rank, "killed by SIGKILL") for rank in range(3)]
    assert server._children == {}
