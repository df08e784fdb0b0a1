"""The supervisor's own children: the controller and the fork server, started, asked and ended here."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_END_WAIT_S, _KILL_WAIT_S = 1.0, 5.0


class Child:
    """One process that we started and therefore may end."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None,
                 stdin: int | None = subprocess.DEVNULL, stdout: int | IO[bytes] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(list(command), stdin=stdin, stdout=errors if stdout is None else stdout,
                                            stderr=errors, env=environment, start_new_session=True)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """End it now; returns when it has gone (on a busy machine that takes its time)."""
        if self.alive:
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_KILL_WAIT_S)


def start_controller(directory: Path) -> Child:
    profile = directory / "profile"
    return Child("controller", [sys.executable, "-m", "colossal_nb.cluster.controller", str(profile), str(os.getpid())],
                 directory / "controller.log")


class ForkServer(Child):
    """The warm process that forks ranks: JSON lines down its stdin, JSON lines up its stdout."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        super().__init__("fork server", [sys.executable, "-m", "colossal_nb.engine.fork_server", str(directory),
                                         str(os.getpid())],
                         directory / "fork_server.log", environment, subprocess.PIPE, subprocess.PIPE)
        assert self.process.stdout is not None
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self._partial = b""

    def ask(self, verb: str, **fields: Any) -> None:
        """Send one request; a fork server that has gone is noticed elsewhere."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"verb": verb, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def answers(self) -> list[dict[str, Any]]:
        """What it has said since the last call."""
        try:
            data = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def end(self) -> None:
        """Ask it to end all ranks and itself; insist after a second."""
        self.ask("stop")
        deadline = time.monotonic() + _END_WAIT_S
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()


def tail(path: Path, size_bytes: int = 2000) -> str:
    """The last whole lines of a log file, for messages about a process that failed."""
    try:
        with path.open("rb") as file:
            begin = file.seek(0, os.SEEK_END) - size_bytes
            file.seek(max(0, begin - 1))               # a line that begins where we begin is whole
            found = file.read()
            return (found.partition(b"\n")[2] if begin > 0 else found).decode(errors="replace").strip()
    except OSError:
        return ""
