"""`ranks(n)`: a pool of n warm processes, each a rank of a World.

A fork server imports torch once; a pool is forked from it in a fraction of a second and kept for the session. Functions
travel by value, results and errors come back, and a call that hangs is ended with a report of what each rank was in.
"""

import itertools
import json
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import cloudpickle

LIMIT_S = 60.0
GRACE_S = 1.0
HERE = Path(__file__).resolve().parent


class RankFailure(AssertionError):
    """A rank died or hung; the text holds every rank's open slices and stacks."""


def send_message(where: socket.socket, value: bytes) -> None:
    where.sendall(len(value).to_bytes(8, "little") + value)


def recv_message(where: socket.socket) -> bytes:
    """One message; raises EOFError when the other side is gone."""
    return _exactly(where, int.from_bytes(_exactly(where, 8), "little"))


def _exactly(where: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = where.recv(min(count, 1 << 20))
        except ConnectionResetError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class ForkServer:
    """One process with torch imported, that forks ranks, reaps them, and kills none but them."""

    def __init__(self) -> None:
        self.here, there = socket.socketpair()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]])}
        command = [sys.executable, str(HERE / "ranks_server.py"), str(there.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[there.fileno()], env=env, start_new_session=True)
        there.close()

    def fork(self, port: int, rank: int, count: int) -> tuple[int, socket.socket, socket.socket]:
        """A new process: its id, the socket for calls and the one for control."""
        mine = [socket.socketpair() for _ in range(2)]
        order = json.dumps({"verb": "fork", "rank": rank, "count": count, "port": port}).encode()
        socket.send_fds(self.here, [order], [pair[1].fileno() for pair in mine])
        pid = int(recv_message(self.here))
        for pair in mine:
            pair[1].close()
        return pid, mine[0][0], mine[1][0]

    def kill(self, pid: int) -> None:
        """End one forked process and return when it is reaped."""
        socket.send_fds(self.here, [json.dumps({"verb": "kill", "pid": pid}).encode()], [])
        recv_message(self.here)

    def close(self) -> None:
        self.here.close()
        self.process.wait(20)


class Pool:
    """n ranks. `run` gives each a World with a fresh epoch, calls the function there and returns all results."""

    def __init__(self, server: ForkServer, store: Any, count: int) -> None:
        self.server, self.store, self.count = server, store, count
        self.members: list[tuple[int, socket.socket, socket.socket]] = []
        self.answers: dict[int, Any] = {}  # of the last call: (kind, value or traceback, error)

    def run(self, function: Any, *args: Any, limit_s: float = LIMIT_S, **keywords: Any) -> list[Any]:
        """Call `function(*args, **keywords)` on every rank; raises the first rank's error with its traceback."""
        if not self.members:
            self.members = [self.server.fork(self.store.port, rank, self.count) for rank in range(self.count)]
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            order = cloudpickle.dumps((next(_EPOCHS), function, args, keywords))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        for _, calls, _ in self.members:
            send_message(calls, order)
        return self._collect(time.monotonic() + limit_s)

    def _collect(self, end: float) -> list[Any]:
        answers = self.answers = {}
        failed: list[int] = []
        reports: list[str] = []
        while len(answers) < self.count:
            waiting = {self.members[rank][1]: rank for rank in range(self.count) if rank not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            if not ready:
                reports = self._end(sorted(waiting.values()), answers)
                break
            for rank in sorted(waiting[each] for each in ready):
                try:
                    answers[rank] = pickle.loads(recv_message(self.members[rank][1]))
                except EOFError:
                    answers[rank] = ("died", f"rank {rank} died", None)
                if answers[rank][0] != "ok":
                    failed.append(rank)
                    end = min(end, time.monotonic() + GRACE_S)
        died = [rank for rank in failed if answers[rank][0] == "died"]
        if died or len(answers) < self.count:
            self.close()
        for rank in [*died, *failed]:
            self._raise(answers[rank], rank)
        if reports:
            raise RankFailure("\n".join(["the ranks did not finish in time", *reports]))
        return [answers[rank][1] for rank in range(self.count)]

    def _end(self, stuck: list[int], answers: dict[int, Any]) -> list[str]:
        """Ask the stuck ranks where they are, free them, and take what they then say."""
        reports = [f"--- rank {rank}\n{self._control(rank, b'look')}" for rank in stuck]
        for rank in stuck:
            self._control(rank, b"abort")
        end = time.monotonic() + 2 * GRACE_S
        for rank in stuck:
            calls = self.members[rank][1]
            if select.select([calls], [], [], max(0.0, end - time.monotonic()))[0]:
                try:
                    answers[rank] = pickle.loads(recv_message(calls))
                except EOFError:
                    continue
        return reports

    def _control(self, rank: int, verb: bytes) -> str:
        control = self.members[rank][2]
        try:
            send_message(control, verb)
            if select.select([control], [], [], 5.0)[0]:
                return recv_message(control).decode()
        except (EOFError, OSError):
            return "gone"
        return "no answer"

    def _raise(self, answer: Any, rank: int) -> None:
        kind, text, error = answer
        if kind == "died" or error is None:
            raise RankFailure(f"rank {rank}: {text}")
        error.add_note(f"on rank {rank}:\n{text}")
        raise error

    def close(self) -> None:
        """Kill the pool's processes; the next call forks new ones."""
        for pid, calls, control in self.members:
            self.server.kill(pid)
            calls.close()
            control.close()
        self.members = []


_EPOCHS = itertools.count(1)


class Ranks:
    """`ranks(n)` -> Pool; pools live until the end of the session."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}
        self._server: ForkServer | None = None
        self._store: Any = None

    def __call__(self, count: int) -> Pool:
        if self._server is None:
            import torch.distributed as dist

            self._server = ForkServer()
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if count not in self._pools:
            self._pools[count] = Pool(self._server, self._store, count)
        return self._pools[count]

    def close(self) -> None:
        for pool in self._pools.values():
            try:
                pool.close()
            except (EOFError, OSError):
                traceback.print_exc()
        if self._server is not None:
            self._server.close()
