"""The kernel's end of the link to its supervisor: starts it, talks to it, and is the pipe whose end is its end."""
from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import zmq

from colossal_nb.cluster.wire import Address, Frame, arrived, connect, pack, unpack

_STOP_LIMIT_S = 5.0


def here() -> str:
    """This process's folder. Raises FileNotFoundError, with what to do, if it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        try:
            name = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        except OSError:
            name = "in which this notebook works"
        raise FileNotFoundError(f"the folder {name} no longer exists: %cd somewhere first") from None


class Link:
    """One supervisor process and the socket to it. Made in any thread; used by one thread at a time."""

    def __init__(self) -> None:
        here()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "colossal_nb.cluster.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True)
        atexit.register(self.close)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.stdout.close()
        if not line:
            raise RuntimeError(f"the supervisor ended at once (exit code {self._process.wait()}): try "
                               f"`{sys.executable} -m colossal_nb.cluster.supervisor` in a terminal")
        greeting = json.loads(line)
        self.directory = Path(greeting["directory"])
        self.cores = int(greeting["cores"])
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = connect(self._context, Address(**greeting["address"]), "kernel")
        self.send("hello")

    @property
    def context(self) -> zmq.Context[Any]:
        return self._context

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, kind: str, **body: Any) -> None:
        self.socket.send_multipart(pack(kind, body))

    def receive(self) -> list[Frame]:
        """What has arrived."""
        frames = []
        while arrived(self.socket):
            frames.append(unpack(self.socket.recv_multipart()))
        return frames

    def close(self) -> None:
        """Take the cluster down and wait until it has gone (well under the limit)."""
        atexit.unregister(self.close)
        assert self._process.stdin is not None
        self._process.stdin.close()                    # the end of the pipe is the order
        try:
            self._process.wait(_STOP_LIMIT_S)
        except BaseException as error:                 # it is late, or Stop was pressed
            self._process.kill()                       # its children watch it and end too
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)  # of one that did not end by itself
            self._context.destroy(0)                   # left to the garbage collector it would wait for its sockets
