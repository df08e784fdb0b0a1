"""When a Stop raises KeyboardInterrupt in a rank: once, in the user's own code, and until it has come through.

A signal may arrive anywhere. It raises only where a frame of the cell is below, and not inside what must not be left
half-way or would swallow it: a finalizer, the exit of a `with`, our own bookkeeping, a question to the supervisor,
IPython's reporting of an error that is under way. Elsewhere it stays due, and the side thread knocks again (`settle`)
until it has landed; where it met our own code, a trace function waits at the next line of the code that called it.

What has landed may still be lost, in a callback of a weak reference (which Python only prints: `sys.unraisablehook`
tells us) or in a library's bare `except`. Then it is due again, at the next line of the code *below* the one that lost
it, where a trace function waits for it: in a loop that is nearly always in there no signal would find another place.
While a model is being trained the first press waits a moment for the ranks to agree (`parallel.stopping`): they then
raise it all at the same place, by `agreed`. An optimizer's step() is not left half-way either, if it ends soon.

An `except KeyboardInterrupt` of the user's, in the cell or in a module that is not installed, is final: what follows
it runs on, as it would in a plain kernel. Nothing is raised while a `finally` or `except` works on the first one; only
the next press ends that.
"""
from __future__ import annotations

import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from colossal_nb.engine.loops import PrivateLoop
from colossal_nb.parallel.stopping import HOLD_S, Stopping

QUICK_S = 0.3
"""Presses that follow each other faster are one."""
_AGAIN_S = 0.3                # after which one that has landed must have left the code that it interrupted
_PATIENCE_S = 1.0             # with finalizers and exits, and with IPython before the first line or after the last
_KNOCK_S = 0.02
_COMES_S = 2.0                # after which this rank's press has come where another's has landed on all
_EXITS = frozenset({"__del__", "__exit__", "__aexit__"})
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BOOKKEEPING = tuple(_OURS + os.path.join(*place) for place in (
    ("parallel", "ledger.py"), ("record", ""), ("engine", "asking.py")))
_SHELL = frozenset(getattr(InteractiveShell, name).__code__ for name in (
    "run_cell", "_run_cell", "run_cell_async", "run_ast_nodes", "run_code"))
_LOOP = PrivateLoop.__call__.__code__
_STEP = os.path.join("torch", "optim", "optimizer.py")
_INSTALLED = tuple(path + os.sep for path in {
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), os.path.dirname(os.__file__)} if path)


def of_a_cell(name: str) -> bool:
    """Whether a file name is that of a notebook cell."""
    return "ipykernel_" in name or name.startswith("<ipython-input")


class Interrupts:
    """A gate for KeyboardInterrupt in the main thread, opened by a cell, knocked at by the side thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread()
        self._lock = threading.Lock()
        self._open = False
        self._cell = 0
        self._until = 0
        self._due = False                              # a press has not landed
        self._pressed_at = 0.0
        self._raised: BaseException | None = None      # the one that has landed and is on its way out
        self._raised_at = float("-inf")
        self._loser: CodeType | None = None            # the library's code that has lost one
        self._traced = False                           # a trace function waits to raise what is due
        self._before: list[BaseException] = []         # what the main thread already handled at the press
        self._held_until = 0.0                         # a press waits for the ranks to agree
        self._follows_until = 0.0                      # the press that belongs to an agreed one is on its way
        self.stopping = Stopping()
        self.begun = 0.0
        """When the cell began, by this process's performance counter."""
        self.landed = False
        """Whether the cell that runs, or ran last, has been interrupted."""

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._signal)
        sys.unraisablehook = self._swallowing(sys.unraisablehook)

    def begin(self, number: int) -> None:
        """The user's code of cell `number` follows; raises at once if this cell was interrupted before it began."""
        with self._lock:
            self._cell = number
            self._due, self._raised, self._traced, self._loser = False, None, False, None
            self._held_until = self._follows_until = 0.0
            self.stopping.asked = False
            self._raised_at = float("-inf")            # a press in the cell before is another press
            self.landed = number <= self._until
        self.begun = time.perf_counter()
        self._open = True
        if self.landed:                                # the signal may have come while the gate was closed
            raise KeyboardInterrupt

    def end(self) -> None:
        """The cell is over, however it went; harmless again and again."""
        self._open = False
        with self._lock:
            self._cell = 0
            self._due, self._raised, self._before = False, None, []
            self._held_until = 0.0
            self.stopping.asked = False
        if self._traced:
            self._traced = False
            sys.settrace(None)

    @property
    def running(self) -> int:
        """The number of the cell whose code runs, 0 between cells."""
        return self._cell

    # in the main thread
    def _signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._open or (not self._due and now - self._raised_at < QUICK_S):
            return
        if not self._due:                              # nobody pressed Stop: the cell has sent it to itself
            self._due, self._pressed_at, self._raised = True, now, None
            self._before = list(_chain(sys.exc_info()[1]))
        met = [error for error in _chain(sys.exc_info()[1])
               if isinstance(error, KeyboardInterrupt) and not _among(error, self._before)]
        if met:                                        # a collective that was freed has raised it already
            self._due, self._raised, self._raised_at = False, met[0], now
        elif (below := _below(frame, self._loser) or _caller_of_ours(frame)) is not None and not self._traced:
            self._wait_in(below)
        elif ((late := now - self._pressed_at > _PATIENCE_S) or not self._traced) and self._may_land(frame, late):
            raise self._landing()

    def _landing(self) -> KeyboardInterrupt:
        error = KeyboardInterrupt()
        self._due, self._raised, self._raised_at, self._loser = False, error, time.monotonic(), None
        return error

    def agreed(self) -> KeyboardInterrupt:
        """All ranks raise now, whether this one's press has come or not."""
        with self._lock:
            if not self._held_until:
                self._follows_until = time.monotonic() + _COMES_S
            self._held_until, self.landed = 0.0, True
            self._before = list(_chain(sys.exc_info()[1]))
            return self._landing()

    def _wait_in(self, frame: FrameType | None) -> None:
        """Raise what is due at the next line of this frame or of one below, unless somebody else is tracing."""
        if sys.gettrace() is not None:
            return

        def trace(at: FrameType, event: str, argument: Any) -> Any:
            if not self._due or self._may_land(at, late=False):
                sys.settrace(None)
                self._traced = False
                if self._due:
                    raise self._landing()
            return trace

        self._traced = True
        sys.settrace(lambda *_: None)                  # nothing for new frames
        while frame is not None and frame.f_code not in _SHELL:
            frame.f_trace = trace
            frame = frame.f_back

    def _may_land(self, frame: FrameType | None, late: bool) -> bool:
        if not late and _in_a_step(frame):
            return False
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(_BOOKKEEPING) or (code.co_name in _EXITS and not late):
                return False
            if of_a_cell(code.co_filename) or code is _LOOP:
                return True
            if code in _SHELL:
                return late and self._raised is None
            frame = frame.f_back
        return False

    def _swallowing(self, show: Callable[[Any], None]) -> Callable[[Any], None]:
        """A hook for errors that Python cannot raise: one of ours is due again instead of being printed."""
        def hook(what: Any) -> None:
            if self._open and isinstance(what.exc_value, KeyboardInterrupt):
                self._raised, self._due, self._pressed_at = None, True, time.monotonic()
                self._wait_in(sys._getframe(1))
            else:
                show(what)
        return hook

    # from the side thread
    def holds(self, cell: int) -> bool:
        """Whether a press on this cell need not land by itself: the ranks are about to agree on it, or have."""
        now = time.monotonic()
        with self._lock:
            if self._cell != cell:
                return False
            if now < self._follows_until:
                self._follows_until = 0.0
                return True
            if self._held_until:
                return now < self._held_until - HOLD_S + QUICK_S
            if self._due or self._raised is not None or not self.stopping.near:
                return False
            self._until = max(self._until, cell)
            self._held_until = now + HOLD_S
            self.stopping.asked = True
            return True

    @property
    def overdue(self) -> int:
        """The cell whose press has waited long enough, 0 if there is none."""
        return self._cell if 0 < self._held_until < time.monotonic() else 0

    def interrupt(self, cell: int) -> bool:
        """Interrupt this cell now, or when it begins. True if it runs now."""
        now = time.monotonic()
        with self._lock:
            self._until = max(self._until, cell)
            if self._cell != cell:
                return False
            self._held_until, self.stopping.asked = 0.0, False
            self.landed = True
            if self._due or now - self._raised_at < QUICK_S:
                return True
            self._before, self._raised, self._loser = list(_chain(self._handled())), None, None
            self._pressed_at, self._due = now, True
        if os.getpgrp() == os.getpid():                # what the cell has started hears it too, as in a terminal
            with suppress(OSError):
                os.killpg(os.getpid(), signal.SIGINT)
        self._knock()
        return True

    def settle(self) -> float:
        """Look after a press that has not come through; returns in how many seconds to look again."""
        if self._due:
            self._knock()
            return _KNOCK_S
        error = self._raised
        if error is None:
            return _KNOCK_S if self._held_until else float("inf")
        if time.monotonic() - self._raised_at >= _AGAIN_S and not _among(error, _chain(self._handled())):
            self._judge(error)
        return _AGAIN_S / 3

    def _judge(self, error: BaseException) -> None:
        """It has landed, and nobody works on it any more: is the cell going on because the user wants it to?"""
        frame = sys._current_frames().get(self._main.ident or 0)
        if not self._may_land(frame, late=False):      # it goes out right now, or something short is under way
            return
        caught = error.__traceback__.tb_frame.f_code if error.__traceback__ is not None else None
        with self._lock:
            if self._raised is error:
                self._raised = None                    # it holds the frames that it came through
                if caught is not None and _of_a_library(caught):
                    self._loser, self._pressed_at, self._due = caught, time.monotonic(), True

    def _handled(self) -> BaseException | None:
        """What an `except` or `finally` of the main thread works on now."""
        found: Any = sys._current_exceptions().get(self._main.ident or 0)
        error: BaseException | None = found[1] if isinstance(found, tuple) else found
        return error

    def _knock(self) -> None:
        assert self._main.ident is not None
        signal.pthread_kill(self._main.ident, signal.SIGINT)


def _in_a_step(frame: FrameType | None) -> bool:
    """Whether an optimizer updates its weights: torch wraps every step() in a function of this name."""
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.endswith(_STEP):
            return True
        frame = frame.f_back
    return False


def _below(frame: FrameType | None, code: CodeType | None) -> FrameType | None:
    """The frame below the outermost one that runs this code; None if none does."""
    found = None
    while code is not None and frame is not None:
        if frame.f_code is code:
            found = frame.f_back
        frame = frame.f_back
    return found


def _caller_of_ours(frame: FrameType | None) -> FrameType | None:
    """The frame that called what must not be left half-way; None where none of it runs."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(_BOOKKEEPING):
            found = frame.f_back
        frame = frame.f_back
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those during whose handling it came."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__context__


def _among(error: BaseException, others: Any) -> bool:
    return any(error is each for each in others)


def _of_a_library(code: CodeType) -> bool:
    name = code.co_filename
    if of_a_cell(name) or code is _LOOP:
        return False
    return name.startswith((*_INSTALLED, _OURS, "<frozen "))
