"""The supervisor: knows who is alive, counts epochs, keeps the rendezvous; one per cluster, no torch, no cells.

`python -m colossal_nb.cluster.supervisor` lives as long as the pipe on its stdin is open: when the kernel ends, in
whatever way, the pipe ends, and the supervisor takes everything down and removes its folder.

From the kernel: start(engines), restart(rank), interrupt(cell, ranks), release(reason, ranks), regroup(ranks),
credit(ranks, heard), look, stop. To the kernel: warm, rank(rank, phase, ...), death(rank, how, ...), state, events,
regrouped(epoch), fault.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from colossal_nb.cluster.children import Child, ForkServer, start_controller, tail
from colossal_nb.cluster.door import forget
from colossal_nb.cluster.host import threads_per_engine, usable_cores
from colossal_nb.cluster.rendezvous import Rendezvous
from colossal_nb.cluster.wire import Frame, Listener, arrived

KERNEL = b"kernel"
_TICK_MS = 200
_REGROUP_LIMIT_S = 5.0


@dataclass
class Rank:
    """One rank as the supervisor knows it. `life` counts the processes that have had this number."""

    life: int
    phase: str = "asked"
    pid: int = 0
    started: float = 0.0


class Supervisor:
    """One poll loop; nothing in it blocks."""

    def __init__(self) -> None:
        self.umask = os.umask(0o077)                   # for what is ours; the ranks get the user's back
        self.directory = Path(tempfile.mkdtemp(prefix="colossal_nb-"))
        self.listener = Listener()
        self.rendezvous = Rendezvous(lambda identity, body, blobs: self.listener.send(identity, "store", body, blobs))
        self.ranks: dict[int, Rank] = {}
        self.engines = 0
        self.folder = ""                               # the kernel's, in which the ranks begin
        self.epoch = 0
        self.seed = int.from_bytes(os.urandom(4), "big")
        self._awaited: set[int] = set()
        self._regroup_end = 0.0
        self._asked: list[int] = []
        self._connection: dict[str, Any] = {}
        self._running = True
        self.server = ForkServer(self.directory, _environment())   # first: everything waits for its imports
        self.controller = start_controller(self.directory)

    def serve(self) -> None:
        """Until the kernel's pipe ends or it says stop."""
        poller = zmq.Poller()
        for source in (self.listener.socket, self.listener.zap, sys.stdin.fileno(), self.server.output):
            poller.register(source, zmq.POLLIN)
        parent = os.getppid()
        while self._running and os.getppid() == parent:
            ready = dict(poller.poll(_TICK_MS if self._connection else 10))
            if self.listener.zap in ready:
                self.listener.admit()
            if self.listener.socket in ready:
                self._drain()
            if self.server.output in ready:
                for answer in self.server.answers():
                    self._from_server(answer)
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
                break
            self._tick(poller)

    def close(self) -> None:
        """End every process of the cluster and remove its folder."""
        self.controller.process.kill()
        for entry in self.ranks.values():
            if entry.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(entry.pid, signal.SIGKILL)       # a rank leads a group with all that it started
        self.server.end()
        self.controller.kill()
        self.listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _tick(self, poller: zmq.Poller) -> None:
        if not self._connection:
            path = self.directory / "profile" / "security" / "ipcontroller-client.json"
            if path.exists() and (text := path.read_text()).rstrip().endswith("}"):
                self._connection = json.loads(text)
                self._tell("controller", connection=self._connection)
                self._fork_asked()
        for child in (self.controller, self.server):
            if not child.alive:
                self._fault(child, poller)
        if self._awaited and time.monotonic() > self._regroup_end:
            self._regrouped(sorted(self._awaited))

    def _fault(self, child: Child, poller: zmq.Poller) -> None:
        if child is self.server:
            poller.unregister(self.server.output)
        self._tell("fault", process=child.name, code=child.process.returncode, log=tail(child.log))
        self._running = False

    def _drain(self) -> None:
        while arrived(self.listener.socket):
            received = self.listener.receive()
            if received is None:
                continue
            identity, frame = received
            if frame.kind == "store":
                self.rendezvous.handle(identity, frame)
            elif identity == KERNEL:
                getattr(self, f"_on_{frame.kind}")(frame)
            else:
                self._from_rank(identity, frame)

    def _tell(self, kind: str, **body: Any) -> None:
        self.listener.send(KERNEL, kind, body)

    # from the kernel
    def _on_hello(self, frame: Frame) -> None:
        if self._connection:
            self._tell("controller", connection=self._connection)

    def _on_start(self, frame: Frame) -> None:
        self.engines = max(self.engines, int(frame.body["engines"]))
        self.folder = frame.body["folder"]
        for rank in range(self.engines):
            if rank not in self.ranks:
                self.ranks[rank] = Rank(life=1)
                self._asked.append(rank)
        self._fork_asked()

    def _on_restart(self, frame: Frame) -> None:
        self.server.ask("kill", ranks=frame.body["ranks"])     # the death that follows brings the replacement

    def _on_interrupt(self, frame: Frame) -> None:
        self._each("interrupt", frame.body["ranks"], cell=frame.body["cell"], press=frame.body.get("press", 1))

    def _on_release(self, frame: Frame) -> None:
        self._each("release", frame.body["ranks"], reason=frame.body["reason"])

    def _on_credit(self, frame: Frame) -> None:
        self._each("credit", frame.body["ranks"], heard=frame.body["heard"])

    def _on_look(self, frame: Frame) -> None:
        self._each("look", frame.body["ranks"])

    def _on_regroup(self, frame: Frame) -> None:
        ranks = [rank for rank in frame.body["ranks"] if rank in self.ranks]
        self.epoch += 1
        self.rendezvous.keep_epoch(self.epoch)
        self._awaited = set(ranks)
        self._regroup_end = time.monotonic() + _REGROUP_LIMIT_S
        lives = {rank: self.ranks[rank].life for rank in ranks}
        self._each("regroup", ranks, epoch=self.epoch, ranks=ranks, lives=lives,
                   threads=threads_per_engine(self.engines))
        if not ranks:
            self._regrouped([])

    def _on_stop(self, frame: Frame) -> None:
        self._running = False

    def _each(self, verb: str, to: list[int], **body: Any) -> None:
        for rank in to:
            if rank in self.ranks:
                self.listener.send(_identity(rank, self.ranks[rank].life), verb, body)

    # from the fork server
    def _fork_asked(self) -> None:
        if self._connection and self._asked:
            orders = [{"rank": rank, "life": self.ranks[rank].life} for rank in self._asked]
            self.server.ask("fork", ranks=orders, world_size=self.engines, epoch=self.epoch, seed=self.seed,
                            umask=self.umask, folder=self.folder,
                            threads=threads_per_engine(self.engines), address=self.listener.address.to_json())
            self._asked = []

    def _from_server(self, answer: dict[str, Any]) -> None:
        if answer["what"] == "warm":
            self._tell("warm", seconds=answer["seconds"])
        elif answer["what"] == "forked":
            entry = self.ranks[answer["rank"]]
            entry.pid, entry.started = answer["pid"], time.monotonic()
            self._phase(answer["rank"], "forked")
        elif answer["what"] == "exit":
            self._death(answer)

    def _death(self, answer: dict[str, Any]) -> None:
        rank, entry = answer["rank"], self.ranks[answer["rank"]]
        if answer["life"] != entry.life:
            return
        was_ready = entry.phase == "ready"
        self._tell("death", rank=rank, life=entry.life, pid=answer["pid"], how=answer["how"], phase=entry.phase,
                   log=tail(self.directory / f"rank{rank}.log"))
        if rank in self._awaited:
            self._acknowledge(rank)
        forget(self.listener.context, self._connection, rank)
        if was_ready:                                          # one that dies while it starts is not tried again
            self.ranks[rank] = Rank(life=entry.life + 1)
            self._asked.append(rank)
            self._fork_asked()
        else:
            del self.ranks[rank]

    # from the ranks
    def _from_rank(self, identity: bytes, frame: Frame) -> None:
        _kind, number, life = identity.split(b":")
        rank = int(number)
        entry = self.ranks.get(rank)
        if entry is None or entry.life != int(life):
            return                                             # the last words of a process that has been replaced
        if frame.kind == "ready":
            self._acknowledge(rank, int(frame.body["epoch"]))
        elif frame.kind == "phase":
            self._phase(rank, frame.body["phase"], frame.body.get("engine", ""))
        else:
            self.listener.send(KERNEL, frame.kind, {**frame.body, "rank": rank, "life": entry.life}, frame.blobs)

    def _phase(self, rank: int, phase: str, engine: str = "") -> None:
        entry = self.ranks[rank]
        entry.phase = phase
        self._tell("rank", rank=rank, phase=phase, pid=entry.pid, life=entry.life, engine=engine)

    def _acknowledge(self, rank: int, epoch: int | None = None) -> None:
        if rank in self._awaited and epoch in (None, self.epoch):
            self._awaited.discard(rank)
            if not self._awaited:
                self._regrouped([])

    def _regrouped(self, missing: list[int]) -> None:
        self._awaited = set()
        self._tell("regrouped", epoch=self.epoch, missing=missing)


def _identity(rank: int, life: int) -> bytes:
    return b"side:%d:%d" % (rank, life)


def _environment() -> dict[str, str]:
    """The ranks' environment: one hash seed, plots inline, no CUDA and no pool of threads in the fork server."""
    seed = os.environ.get("PYTHONHASHSEED", "")
    mine = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}   # stops capture
    return {**mine, "PYTHONHASHSEED": seed if seed.isdigit() else str(int.from_bytes(os.urandom(3), "big")),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1", "OPENBLAS_NUM_THREADS": "1"}


def main() -> None:
    supervisor = Supervisor()
    with (supervisor.directory / "supervisor.log").open("ab") as log:
        os.dup2(log.fileno(), 2)
    greeting = {"address": supervisor.listener.address.to_json(), "directory": str(supervisor.directory),
                "cores": usable_cores()}
    try:
        sys.stdout.write(json.dumps(greeting) + "\n")
        sys.stdout.flush()
        supervisor.serve()
    except BrokenPipeError:                            # the kernel has gone before it could hear of us
        sys.stdout = None
    finally:
        supervisor.close()


if __name__ == "__main__":
    main()
