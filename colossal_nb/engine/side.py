"""The side thread of a rank: answers the supervisor while the main thread is anywhere.

Down: interrupt(cell), release(reason), regroup(epoch, ranks), credit(heard), look. Up: phase, state (what the rank
waits in), events (recorded, five times a second), ready(epoch), stack.
"""
from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import zmq

from colossal_nb.cluster.wire import Address, Frame, connect, pack, unpack
from colossal_nb.engine.interrupts import Interrupts, of_a_cell
from colossal_nb.engine.recorder import RankRecorder

if TYPE_CHECKING:
    from colossal_nb.engine.flow import Flow
    from colossal_nb.engine.store import Store
    from colossal_nb.parallel.world import World

_PERIOD_S = 0.2
_MOST_FAILURES, _AFTER_FAILURE_S = 100, 0.03
_SHOWN_AFTER_S = 0.4          # a wait shorter than this is not worth a word


class Side(threading.Thread):
    """Owns the socket to the supervisor. The main thread asks nothing of it except through plain attributes."""

    def __init__(self, context: zmq.Context[Any], address: Address, identity: str, recorder: RankRecorder,
                 interrupts: Interrupts, store: Store, flow: Flow) -> None:
        super().__init__(name="colossal-side", daemon=True)
        self._socket = connect(context, address, identity)
        self._address = address
        self._recorder = recorder
        self._interrupts = interrupts
        self._store = store
        self._main = threading.main_thread()
        self._flow = flow
        self._phases: list[dict[str, Any]] = []
        self._drain_lock = threading.Lock()
        self._frames = 0
        self._due = 0.0
        self._reported: tuple[int, str, str] = (0, "", "")
        self._regroup: Frame | None = None
        self._reason = ""
        self.world: World | None = None

    def phase(self, phase: str, **fields: Any) -> None:
        """Report how far the start has come (from the main thread, sent by this one)."""
        self._phases.append({"phase": phase, **fields})

    def take_events(self) -> tuple[bytes, int]:
        """At the end of a cell, from the main thread: what is not yet sent, and how many frames were sent before."""
        with self._drain_lock:
            rest = self._recorder.drain() if self._recorder.pending else b""
            sent, self._frames = self._frames, 0
        return rest, sent

    def run(self) -> None:
        """For ever. What a cell has broken (a builtin name, a library) may be whole again when the cell has ended; a
        rank whose side thread fails and fails can be told nothing any more, and ends."""
        failures = 0
        while failures < _MOST_FAILURES:
            try:
                self._turn()
                failures = 0
            except Exception:
                failures += 1
                time.sleep(_AFTER_FAILURE_S)
        os._exit(os.EX_SOFTWARE)

    def _turn(self) -> None:
        wait_s = 0.01 if self._phases or not self.world else max(0.0, self._due - time.monotonic())
        wait_s = min(wait_s, self._interrupts.settle())
        if cell := self._interrupts.overdue:
            self._press(cell)
        if self._socket.poll(int(wait_s * 1000) + 1):
            self._obey(unpack(self._socket.recv_multipart()))
        while self._phases:
            self._send("phase", self._phases.pop(0))
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PERIOD_S
            self._tick()

    def _send(self, kind: str, body: dict[str, Any] | None = None, *blobs: bytes) -> None:
        self._socket.send_multipart(pack(kind, body, blobs))

    def _tick(self) -> None:
        if self._recorder.pending:
            with self._drain_lock:
                data = self._recorder.drain()
                self._frames += 1
            self._send("events", {}, data)
        self._report()
        if self._reason and self._interrupts.running and self._waits():
            self._abort(self._reason)
        self._try_regroup()

    def _obey(self, frame: Frame) -> None:
        if frame.kind == "interrupt":
            self._interrupt(int(frame.body["cell"]))
        elif frame.kind == "release":
            self._reason = frame.body["reason"]
            self._abort(self._reason)
        elif frame.kind == "regroup":
            self._regroup = frame
            self._try_regroup()
        elif frame.kind == "look":
            self._send("stack", {"lines": self._stack(), "cell": self._interrupts.running, "where": self._where(),
                                 "since": self._interrupts.begun})
        elif frame.kind == "credit":
            self._flow.credit(int(frame.body["heard"]))

    def _interrupt(self, cell: int) -> None:
        world = self.world
        if world is None:
            return
        if cell >= self._interrupts.running > 0:
            world.interrupted = True
        if not self._interrupts.holds(cell):
            self._press(cell)

    def _press(self, cell: int) -> None:
        if self._interrupts.interrupt(cell):
            self._state("waiting" if self._waits() else "computing", self._waits())
            self._reason = "interrupted"
            if self._waits():
                self._abort(self._reason)

    def _abort(self, reason: str) -> None:
        self._store.release(reason)
        if self.world is not None:
            self.world.abort(reason)

    def _try_regroup(self) -> None:
        """Rebuild as soon as no cell runs: the main thread must not be inside a group that is taken apart."""
        if self._regroup is None or self._interrupts.running or self.world is None:
            return
        body, self._regroup = self._regroup.body, None
        if body["epoch"] > self.world.epoch:
            lives = {int(rank): int(life) for rank, life in body.get("lives", {}).items()}
            self.world.regroup(body["epoch"], tuple(body["ranks"]), lives=lives)
            self._store.renew()
            self.world.tell_positions()
            self._recorder.forget_open()
            self.world.interrupted = False
            self._reason = ""
        self._send("ready", {"epoch": body["epoch"]})

    def _waits(self) -> str:
        """What the main thread waits in, "" when it computes."""
        for piece in self._recorder.waits():
            number = f" #{piece.seq}" if piece.seq >= 0 else ""
            return f"{piece.kind}{number}" + (f" of group {piece.group}" if piece.group else "")
        return f"the rendezvous ({self._store.waiting})" if self._store.waiting else ""

    def _report(self) -> None:
        running = self._interrupts.running
        what = self._waits() if running else ""
        state = ("waiting" if what else "computing") if running else "idle"
        first = min((piece.t0 for piece in self._recorder.waits()), default=0.0)
        if what and first and time.perf_counter() - first < _SHOWN_AFTER_S:
            return
        told = self._reported if self._reported[0] == running else (running, "", "")
        if (running, state, what) == told or (state != "waiting" and told[1] != "waiting"):
            return
        self._state(state, what, first)

    def _state(self, state: str, what: str, since: float = 0.0) -> None:
        self._reported = (self._interrupts.running, state, what)
        self._send("state", {"state": state, "what": what, "cell": self._interrupts.running,
                             "since": max(since or time.perf_counter(), self._interrupts.begun),
                             "where": self._where()})

    def _where(self) -> str:
        """The user's line: the innermost frame of a cell in the main thread."""
        frame = sys._current_frames().get(self._main.ident or 0)
        while frame is not None:
            name = frame.f_code.co_filename
            if of_a_cell(name):
                return f"line {frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main.ident or 0)
        return traceback.format_stack(frame) if frame is not None else []
