"""One cell from the first message to the prompt: its output, what is told meanwhile, its summary, its error."""
from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from colossal_nb.notebook.fold import named
from colossal_nb.notebook.output import CellOutput
from colossal_nb.notebook.page import Page, say
from colossal_nb.run import Output, Pause, RankState, Run

_RANK = re.compile(r"\(rank \d+ of \d+\)")
_OVER = ("done", "error", "dead")
TURN_S = 0.03
TELL_S = 1.0
LONGEST_VALUE = 200


@dataclass
class Told:
    """What the user hears while a cell runs, each once: failures while others go on, waits without an end."""

    run: Run
    page: Page
    states: dict[int, RankState] = field(default_factory=dict)
    notes: int = 0
    said: set[str] = field(default_factory=set)

    def hear(self, state: RankState) -> None:
        before = self.states.get(state.rank)
        if before is None or before.state not in _OVER or state.state in _OVER:       # what comes late is old
            self.states[state.rank] = state

    def turn(self, seconds: float) -> None:
        """Say what is due `seconds` after the cell began."""
        for note in self.run.notes[self.notes:]:
            self._once(_RANK.sub("", note), note)  # each rank has its own copy of what happened to all
        self.notes = len(self.run.notes)
        over = [rank for rank, state in self.states.items() if state.state in _OVER]
        running = [rank for rank in self.run.ranks if rank not in over]
        if running and over:
            self._failure(running, seconds)
            self._endless([rank for rank in over if self.states[rank].state == "done"], running, seconds)

    def _failure(self, running: list[int], seconds: float) -> None:
        error = self.run.error
        # Those that wait for the failed one are released without being asked.
        busy = [rank for rank in running if rank not in self.states or self.states[rank].state != "waiting"]
        cause = error is not None and not error.consequence
        if error is not None and cause and busy and not self.run.interrupted and seconds - error.time_s >= TELL_S:
            line = f" (line {error.line})" if error.line else ""
            value = error.evalue.partition("\n")[0][:LONGEST_VALUE]
            self._once("failure", f"rank {error.rank} raised {error.ename}: {value}{line}; {named(busy)} still "
                                  f"run{'s' * (len(busy) == 1)}: Stop ends the cell")

    def _endless(self, done: list[int], running: list[int], seconds: float) -> None:
        """All that run wait for others, and somebody has ended the cell: nobody will come."""
        heard = [self.states[rank] for rank in running if rank in self.states]
        waiting = [state for state in heard if state.state == "waiting"]
        begun = max((self.states[rank].since_s for rank in (*done, *running) if rank in self.states), default=0.0)
        if done and len(waiting) == len(running) and seconds - begun >= TELL_S:
            where = f" ({waiting[0].where})" if waiting[0].where else ""
            self._once("endless", f"{named(running)} wait{'s' * (len(running) == 1)} in {waiting[0].what}{where} for "
                                  f"{named(done)}, which finished the cell: this has no end and will be stopped")

    def _once(self, key: str, text: str) -> None:
        if key not in self.said:
            self.said.add(key)
            say(self.page, text)


def follow(run: Run, output: CellOutput, page: Page) -> None:
    """Show a run until it ends, everything that it printed included. Raises nothing about the cell."""
    told = Told(run, page)
    told.turn(0.0)
    begin = turned = time.monotonic()
    for message in run:
        now = time.monotonic()
        if isinstance(message, Output):
            output.add(message, now)
        elif isinstance(message, RankState):
            told.hear(message)
        if isinstance(message, Pause) or now - turned >= TURN_S:
            output.turn(now)
            told.turn(now - begin)
            turned = now
    output.finish()
    told.turn(0.0)
