"""How a rank runs one cell.

Settings come with the source as JSON: cell (its number in the notebook), strategy, ranks (of the cell), threads,
heard (output, see `flow`), random (rank 0's states, when this rank's may differ), record, verify. What goes back with
the reply: the error with the user's line, the digest of the random states, what was recorded and is not sent yet.
"""
from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import torch

from colossal_nb.engine import loops, randomness
from colossal_nb.parallel import distributed
from colossal_nb.plan.strategy import Strategy

if TYPE_CHECKING:
    from colossal_nb.engine.flow import Flow
    from colossal_nb.engine.interrupts import Interrupts
    from colossal_nb.engine.side import Side
    from colossal_nb.parallel.world import World

INJECTED = ("rank", "world_size", "mesh")


class Cells:
    """Runs the cells of one rank, one after another, in the main thread."""

    def __init__(self, world: World, side: Side, interrupts: Interrupts, flow: Flow) -> None:
        self.world = world
        self.ranks: tuple[int, ...] = world.ranks
        self.number = 0
        self.flow = flow
        self._side = side
        self._interrupts = interrupts
        self._injected: dict[str, Any] = {}
        self._threads = 0
        self._digest = ""

    def run(self, shell: Any, source: str, settings: dict[str, Any], *, silent: bool,
            store_history: bool) -> dict[str, Any]:
        """Run a cell to its end, whatever that is; returns the content of the reply."""
        self._prepare(shell, settings)
        if "distributed" in source:
            distributed.expect()
        begin, records_gradients = time.perf_counter(), torch.is_grad_enabled()
        try:
            try:
                self._interrupts.begin(self.number)
                result = loops.apart(lambda: shell.run_cell(source, store_history=store_history, silent=silent))
                if self.world.verified is not None:
                    _say_verdict(shell, result)
            finally:
                self._interrupts.end()
            reply = _reply(shell, result, self._interrupts.landed)
            _let_go(result.error_in_exec)
            if self.world.verify and reply["status"] == "ok":
                self.world.notes.append("--verify: no forward_backward in this cell, so nothing was compared")
        except KeyboardInterrupt:                      # it came before the first line, or after the last
            self._interrupts.end()
            reply = {"status": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": [], "line": None}
        if self._interrupts.landed:                    # it may have landed in the exit of a no_grad block
            torch.set_grad_enabled(records_gradients)
        reply["execution_count"] = self.number
        reply["raised_at"] = time.perf_counter()
        reply["seconds"] = reply["raised_at"] - begin
        reply.update(self._finish())
        return reply

    def _prepare(self, shell: Any, settings: dict[str, Any]) -> None:
        world = self.world
        self.number = int(settings["cell"])
        self.ranks = tuple(settings["ranks"])
        self.flow.begin(settings.get("heard"))
        shell.execution_count = self.number
        text = settings.get("strategy")
        world.strategy = None if text is None else Strategy.parse(text)
        world.subset = None if len(self.ranks) == world.world_size else frozenset(self.ranks)
        world.recorder.enabled = bool(settings.get("record", True))
        world.verify, world.verified = bool(settings.get("verify")), None
        if settings.get("random"):
            randomness.restore(randomness.from_text(settings["random"]))
        threads = int(settings.get("threads", 0))
        if threads and threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads
        size = len(self.ranks) if world.strategy is not None else world.world_size
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
        self._stand_somewhere()
        distributed.start()                            # at once where nothing changed; a regroup may have
        world.ledger.reset_peak()                      # a cell's peak is its own, not that of an earlier cell
        self._define(shell.user_ns, size, (world.strategy or Strategy()).mesh(size))

    def _stand_somewhere(self) -> None:
        """Leave a folder that has been deleted: native libraries abort a process that asks where it is."""
        try:
            os.getcwd()
        except FileNotFoundError:
            home = os.path.expanduser("~")
            os.chdir(home)
            self.world.notes.append(f"the folder of the ranks has been deleted; they are in {home} now")

    def _define(self, names: dict[str, Any], size: int, mesh: Any) -> None:
        """rank, world_size and mesh, unless the user has names of their own."""
        for name, value in zip(INJECTED, (self.world.rank, size, mesh), strict=True):
            if name not in names or (name in self._injected and names[name] is self._injected[name]):
                names[name] = self._injected[name] = value

    def _finish(self) -> dict[str, Any]:
        states = randomness.states()
        digest = randomness.digest(states)
        lead = self.world.rank == 0 and digest != self._digest
        self._digest = digest
        rest, frames = self._side.take_events()
        if self.world.saving is not None and (said := self.world.saving.trouble()):
            self.world.note(said)
        notes, self.world.notes[:] = list(self.world.notes), []
        return {"random": digest, "states": randomness.to_text(states) if lead else "", "frames": frames,
                "events": base64.b64encode(rest).decode(), "notes": notes}

    @property
    def interrupted(self) -> bool:
        """Whether the last cell was."""
        return self._interrupts.landed

    @property
    def defined(self) -> dict[str, Any]:
        """The names that we put into the namespace, with our values."""
        return self._injected


def _reply(shell: Any, result: Any, landed: bool) -> dict[str, Any]:
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        if not getattr(shell, "_last_traceback_during_displayhook", False):
            return {"status": "ok"}
        error = getattr(sys, "last_value", None)       # of showing the cell's value
    name = type(error).__name__
    if landed and isinstance(error, asyncio.CancelledError):
        name = "KeyboardInterrupt"                     # how an interrupt reaches a cell that awaits
    try:
        value = str(error)
    except Exception as trouble:
        value = f"<the error's own text failed: {type(trouble).__name__}>"
    lines = [str(line) for line in getattr(shell, "_last_traceback", None) or []]
    return {"status": "error", "ename": name, "evalue": value, "traceback": lines, "line": _line(shell, error)}


def _say_verdict(shell: Any, result: Any) -> None:
    """That of --verify, at the end of its cell, which may have undone it."""
    from colossal_nb.parallel.verify import end_of_cell

    try:
        end_of_cell(whole=result.success)
    except BaseException as error:
        result.error_in_exec = error
        shell.showtraceback()


def _let_go(error: BaseException | None) -> None:
    """What the functions that an error came through still hold: tensors, and iterators with processes behind them.

    Python keeps the last error for a debugger; nobody can type into one here.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        for frame, _ in traceback.walk_tb(error.__traceback__):
            frame.f_locals                             # noqa: B018  a copy that IPython has made is brought up to date
        error = error.__cause__ or error.__context__


def _line(shell: Any, error: BaseException | None) -> int | None:
    """The line of the cell from which the error came: the innermost frame that belongs to the cell."""
    if isinstance(error, SyntaxError) and error.__traceback__ is None:
        return error.lineno
    names = [name for name, number in shell.compile._filename_map.items() if number == shell.execution_count - 1]
    found = None
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in names:
            found = trace.tb_lineno
        trace = trace.tb_next
    return found if found is not None else (error.lineno if isinstance(error, SyntaxError) else None)

