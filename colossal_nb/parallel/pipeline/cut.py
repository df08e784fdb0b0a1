"""Where a row of units is cut into stages: balanced by FLOPs, few crossing tensors, never through an escape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

CROSSING_PRICE = 0.01  # one crossing tensor is worth this part of the step's work
SLACK = 0.02  # how much heavier than necessary the heaviest stage may become to save crossings


def best_cuts(
    costs: Sequence[float], weights: Sequence[float], allowed: Sequence[bool], crossings: Sequence[int]
) -> tuple[int, ...] | None:
    """The first units of stages 1, 2, ...; None where no allowed choice exists.

    costs: work per unit; weights: share of the work that each stage should have; allowed[c], crossings[c]: whether
    stages may meet before unit c, and how many tensors pass there. First the heaviest stage is made as light as it
    can be, then, within SLACK of that, squares of the shares plus the price of crossing tensors are minimized.
    """
    load = _loads(costs, weights)
    most, _ = _fold(len(costs), len(weights), allowed, load, max)
    if most == inf:
        return None

    def price(stage: int, first: int, end: int) -> float:
        work = load(stage, first, end)
        if work > most + SLACK:
            return inf
        return work * work / 4 + (CROSSING_PRICE * crossings[first] if first else 0.0)

    _, cuts = _fold(len(costs), len(weights), allowed, price, lambda so_far, new: so_far + new)
    return cuts


def heaviest(costs: Sequence[float], weights: Sequence[float], cuts: Sequence[int]) -> float:
    """The work of the stage that has most of it for its weight; 1 / stages where all are equal."""
    load = _loads(costs, weights)
    return max(load(stage, *ends) for stage, ends in enumerate(pairwise([0, *cuts, len(costs)])))


def stages_of(cuts: Sequence[int], units: int) -> tuple[int, ...]:
    """The stage of every unit."""
    bounds = [0, *cuts, units]
    return tuple(stage for stage, (first, end) in enumerate(pairwise(bounds)) for _ in range(first, end))


def _loads(costs: Sequence[float], weights: Sequence[float]) -> Callable[[int, int, int], float]:
    """load(stage, first, end): the part of all work in units first..end-1, over the stage's relative weight."""
    total = sum(costs) or 1.0
    upto = [0.0, *accumulate(cost / total for cost in costs)]
    relative = [weight * len(weights) / sum(weights) for weight in weights]
    return lambda stage, first, end: (upto[end] - upto[first]) / relative[stage]


def _fold(
    units: int,
    stages: int,
    allowed: Sequence[bool],
    price: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cheapest way to cut 0..units into non-empty stages, prices joined from left to right, and its cuts."""
    best: list[tuple[float, tuple[int, ...]]] = [(price(0, 0, end), ()) for end in range(units + 1)]
    best[0] = (inf, ())
    for stage in range(1, stages):
        following: list[tuple[float, tuple[int, ...]]] = [(inf, ())] * (units + 1)
        for end in range(stage + 1, units + 1):
            for first in range(stage, end):
                if not allowed[first] or best[first][0] == inf:
                    continue
                cost = join(best[first][0], price(stage, first, end))
                if cost < following[end][0]:
                    following[end] = (cost, (*best[first][1], first))
        best = following
    return best[units]
