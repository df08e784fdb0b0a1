"""The fork server: `python -m colossal_nb.engine.fork_server DIR PARENT`. Imports once what every rank needs,
forks ranks in milliseconds, reaps them and says how they ended.

Rules it keeps: it only imports (no pool of threads, no CUDA, no zmq context, no event loop is ever open across a fork);
its ranks are their own sessions; only processes that it forked are signalled. JSON lines in on stdin, out on stdout.
"""
from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from colossal_nb.cluster.host import describe_exit, die_with

FIRST = ("torch", "torch.distributed", "numpy", "cloudpickle", "ipykernel.ipkernel", "ipyparallel.engine.app",
         "colossal_nb.engine.bootstrap")
LATER = ("torch.optim", "colossal_nb.engine.rehearsal", "torch._dynamo", "matplotlib_inline.config")
"""Wanted by most cells (the first optimizer imports `_dynamo`), imported after the server can already fork."""
_QUIET_S = 5.0


class ForkServer:
    """Ranks by process id; one loop over stdin and the ends of children."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._out = os.dup(1)
        os.dup2(2, 1)                                  # what an import prints goes to the log, not into the protocol
        self._partial = b""
        self._children: dict[int, tuple[int, int]] = {}            # pid -> (rank, life)
        self._open = True
        self._reaping = False
        self._forked = -_QUIET_S
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())     # also in the middle of a long import
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self.orphaned())
        self._start_folder = os.getcwd()
        os.chdir(directory)                            # the user's folder may be deleted; libraries ask for theirs

    def orphaned(self) -> None:
        """The supervisor has gone without a word, perhaps in the middle of a long import."""
        self._reaping = True
        for pid in self._children:
            _kill(pid)
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)

    def tell(self, what: str, **fields: Any) -> None:
        try:
            os.write(self._out, json.dumps({"what": what, **fields}).encode() + b"\n")
        except BrokenPipeError:
            self._open = False

    def serve(self, timeout_s: float | None = None) -> bool:
        """Handle what is there, waiting up to `timeout_s` (None: until something comes). False when all is over."""
        ready, _, _ = select.select([0, self._woken], [], [], timeout_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        self._reap()
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:                               # the supervisor has gone without a word
                shutil.rmtree(self.directory, ignore_errors=True)
                self._open = False
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._obey(json.loads(line))
        return self._open

    def quiet(self) -> bool:
        """Serve until no rank has been forked for a while: a first cell needs the cores. False when all is over."""
        while self.serve(0) and (rest_s := self._forked + _QUIET_S - time.monotonic()) > 0:
            self.serve(rest_s)
        return self._open

    def _obey(self, order: dict[str, Any]) -> None:
        if order["verb"] == "fork":
            self._forked = time.monotonic()
            gc.freeze()                                # pages shared with the ranks stay shared
            for each in order["ranks"]:
                self._fork(each["rank"], each["life"], order)
        elif order["verb"] == "kill":
            with self._none_reaped():
                for pid, (rank, _life) in self._children.items():
                    if rank in order["ranks"]:
                        _kill(pid)
            self._reap()
        elif order["verb"] == "stop":
            self._open = False

    def _fork(self, rank: int, life: int, order: dict[str, Any]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = (rank, life)
            self.tell("forked", rank=rank, life=life, pid=pid)
            return
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in (self._out, self._woken, self._wake):
                os.close(descriptor)
            self._go_to(order["folder"])
            from colossal_nb.engine import bootstrap
            bootstrap.live(rank, life, parent, self.directory, order)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _go_to(self, folder: str) -> None:
        """A rank begins in the kernel's folder and imports from there; where that has been deleted, in ours."""
        with suppress(OSError):
            os.chdir(folder)
        sys.path[:] = [folder if path == self._start_folder else path for path in sys.path]

    def _reap(self) -> None:
        if self._reaping:
            return
        with self._none_reaped():
            for pid, (rank, life) in list(self._children.items()):
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _kill(pid)                             # what the rank had started; its number is not reused before
                _, status = os.waitpid(pid, 0)
                del self._children[pid]
                self.tell("exit", rank=rank, life=life, pid=pid, how=describe_exit(status))

    @contextmanager
    def _none_reaped(self) -> Iterator[None]:
        """The end of a child, of which a signal tells at any moment, takes nobody out meanwhile: the ranks stay as
        they are, and a process id that is signalled is still theirs."""
        self._reaping = True
        try:
            yield
        finally:
            self._reaping = False

    def close(self) -> None:
        """End every rank and wait for it."""
        self._reaping = True                           # from here on nobody else waits for them
        for pid in self._children:
            _kill(pid)
        for pid in self._children:
            os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    """End a rank and all in its session's group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):      # it had not become a group of its own yet
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main(directory: str, parent: int) -> None:
    begin = time.perf_counter()
    server = ForkServer(directory)
    if os.getppid() != parent:
        server.orphaned()
    die_with(parent, signal.SIGTERM)
    for name in FIRST:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    server.tell("warm", seconds=time.perf_counter() - begin, threads=threads)
    for name in LATER:
        if not server.quiet():
            break
        try:
            importlib.import_module(name)
        except ImportError:
            traceback.print_exc()
    if server.quiet():
        importlib.import_module("colossal_nb.engine.rehearsal").rehearse()
        gc.collect()
    while server.serve():
        pass
    server.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
