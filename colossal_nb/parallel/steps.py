"""How far a rank has come in a training step: what has begun, what has ended. Compared over ranks after trouble."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Marks = tuple[int, int, int]


@dataclass
class Steps:
    """Since the ranks last were in one state. Optimizers go by their number in `Parallel.optimizers`.

    `entered`: how many forward_backward have begun (`Parallel.calls` have ended). `since`: where the count of calls
    stood then. `era`: of the world in which the ranks were last found in one state. `replacing`: what began to
    put other weights and states in place and has not ended; "" if nothing.
    """

    era: Any = None
    entered: int = 0
    since: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    open: dict[int, Marks] = field(default_factory=dict)
    replacing: str = ""

    def begin(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step() begins."""
        self.open[number] = marks(optimizer)

    def finish(self, number: int) -> None:
        """It has ended, whole."""
        self.open.pop(number, None)
        self.finished[number] += 1

    def half_done(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Whether a step() ended before its end, and not before it had changed something."""
        return any(marks(optimizers[number]) != before for number, before in self.open.items())


def marks(optimizer: torch.optim.Optimizer) -> Marks:
    """Other numbers as soon as a parameter or a state has been written to, which torch counts."""
    weights = sum(p._version for group in optimizer.param_groups for p in group["params"])
    entries = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return weights, sum(value._version for value in entries), len(entries)
