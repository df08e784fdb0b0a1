"""A schedule played with given times: the same record that a run writes, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from colossal_nb.plan.schedule import Action, Orders, home, inputs
from colossal_nb.record import Mark, Record, Slice

UNIT = {"F": 1.0, "B": 2.0}


def simulate(
    orders: Orders, times: Mapping[str, float] | Callable[[Action], float] = UNIT, *, link_s: float = 0.0
) -> Record:
    """Play a valid schedule: every action begins when its rank is free and its inputs are there.

    `times`: seconds by kind, or by action (uneven stages). `link_s`: seconds from the end of an action on one rank to
    its use on another; sending keeps no rank busy. The record has one step, from 0.
    """
    seconds = times if callable(times) else lambda action: times[action.kind]
    starts, ends = _play(orders, seconds, link_s)
    chunk = _chunks(orders)
    slices = [
        Slice(rank, "compute", a.kind, a.stage, chunk[a.stage], a.microbatch, starts[a], ends[a])
        for rank, order in enumerate(orders)
        for a in order
    ]
    last = max(ends.values(), default=0.0)
    marks = [Mark(rank, t, 0, phase) for rank in range(len(orders)) for t, phase in ((0.0, "begin"), (last, "end"))]
    return Record.of(slices=slices, marks=marks)


def _play(
    orders: Orders, seconds: Callable[[Action], float], link_s: float
) -> tuple[dict[Action, float], dict[Action, float]]:
    place = home(orders)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(i in ends for i in inputs(order[at[rank]], len(place))):
                action = order[at[rank]]
                arrived = (ends[i] + link_s * (place[i.stage] != rank) for i in inputs(action, len(place)))
                starts[action] = max(free[rank], *arrived, 0.0)
                ends[action] = free[rank] = starts[action] + seconds(action)
                at[rank] += 1
                moved = True
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        raise ValueError("this schedule cannot be played to its end: validate(orders) says why")
    return starts, ends


def _chunks(orders: Orders) -> dict[int, int]:
    """The number of each virtual stage on its rank."""
    mine = ((rank, sorted({action.stage for action in order})) for rank, order in enumerate(orders))
    return {stage: chunk for _, stages in mine for chunk, stage in enumerate(stages)}
