"""How far a rank has come in a training step: what has begun, what has ended. Compared over ranks after trouble."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Marks = tuple[int, int, int]


@dataclass(frozen=True)
class Position:
    """Where one rank stands with a model. `half`: a step() was cut short; `hooks`: its post-hooks were, after a whole
    update; `wrote`: post-hooks have written to the weights. `known`: why they were torn when the model was copied."""

    rank: int
    finished: tuple[int, ...]
    half: bool
    hooks: bool
    wrote: bool
    replacing: str
    known: str
    entered: int
    calls: int
    in_step: int
    step: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Position:
        fields = json.loads(text)
        return cls(**{**fields, "finished": tuple(fields["finished"])})


@dataclass
class Steps:
    """Since the ranks last were in one state. Optimizers go by their number in `Parallel.optimizers`.

    `entered`: how many forward_backward have begun (`Parallel.calls` have ended). `since`: where the count of calls
    stood then. `era`: of the world in which the ranks were last found in one state, `looked`: in which this rank has
    last read the others' positions. `replacing`: what began to put other weights and states in place and has not ended;
    "" if nothing. `over`: the marks of updates whose post-hooks have not all run. `wrote`: by optimizer, whether the
    hooks of its last step wrote to the weights.
    """

    era: Any = None
    looked: Any = None
    entered: int = 0
    since: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    open: dict[int, Marks] = field(default_factory=dict)
    over: dict[int, int] = field(default_factory=dict)
    wrote: dict[int, bool] = field(default_factory=dict)
    replacing: str = ""
    known: str = ""

    def begin(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's step() begins."""
        self.wrote.pop(number, None)
        self.open[number] = marks(optimizer)

    def finish(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Its update is whole; the user's post-hooks come."""
        self.over[number] = written(optimizer)
        self.open.pop(number, None)
        self.finished[number] += 1

    def close(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """They have run, too."""
        self.wrote[number] = self.over.get(number) not in (None, written(optimizer))

    def half_done(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Whether a step() ended before its end, and not before it had changed something."""
        return any(marks(optimizers[number]) != before for number, before in self.open.items())

    def hooks_wrote(self, optimizers: list[torch.optim.Optimizer]) -> bool:
        """Whether post-hooks of the last step() have written to the weights, be it cut short or not."""
        under_way = any(written(optimizers[number]) != before for number, before in self.over.items())
        return under_way or any(self.wrote.values())


def marks(optimizer: torch.optim.Optimizer) -> Marks:
    """Other numbers as soon as a parameter or a state has been written to, which torch counts."""
    entries = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    return written(optimizer), sum(value._version for value in entries), len(entries)


def written(optimizer: torch.optim.Optimizer) -> int:
    """Another number as soon as a parameter has been written to."""
    return sum(p._version for group in optimizer.param_groups for p in group["params"])
