"""A pipeline schedule is data: what each rank computes, in order, and what it exchanges in between.

`schedule` makes it, `validate` proves it, and the same lists drive the executor, the simulation and the picture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from colossal_nb.plan.legal import BUILT
from colossal_nb.validation import called_as, shown, whole_number


class Action(NamedTuple):
    """One piece of computing: kind F (forward) or B (backward) of one microbatch on one virtual stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Transfer(NamedTuple):
    """What an action made, on its way: activations after F, their gradients after B."""

    made: Action
    source: int
    target: int


@dataclass(frozen=True)
class Exchange:
    """Sends and receives that are posted together; the rank goes on when all of them are done."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


Orders = Sequence[Sequence[Action]]
Step = Action | Exchange


@called_as('cnb.schedule("1f1b", p=4, m=8): what each of p stages computes for m microbatches')
def schedule(name: str, p: int, m: int, chunks: int | None = None) -> list[list[Action]]:
    """What each of `p` ranks computes for `m` microbatches, in order.

    gpipe: all forwards, then all backwards; m microbatches in flight; bubble (p-1)/(m+p-1).
    1f1b: rank r runs p-1-r forwards ahead, then alternates; min(m, p-r) in flight; the same bubble.
    """
    orders = _ORDERS.get(name) if isinstance(name, str) else None
    if orders is None:
        built = ", ".join(map(str, BUILT["schedule"]))
        near = get_close_matches(str(name), _ORDERS, n=1)
        raise ValueError(
            f"schedule {shown(name)} is not built; built: {built}" + (f"; did you mean {near[0]}?" if near else "")
        )
    p, m = (whole_number(each, value, least=1) for each, value in (("p", p), ("m", m)))
    if chunks not in (None, 1):
        raise ValueError(f"{name} has one chunk per rank, not {chunks}: leave chunks out")
    return [orders(p, m, rank) for rank in range(p)]


def _gpipe(p: int, m: int, rank: int) -> list[Action]:
    return [Action(kind, rank, microbatch) for kind in "FB" for microbatch in range(m)]


def _1f1b(p: int, m: int, rank: int) -> list[Action]:
    ahead = min(p - 1 - rank, m)
    forwards = [Action("F", rank, microbatch) for microbatch in range(m)]
    backwards = [Action("B", rank, microbatch) for microbatch in range(m)]
    pairs = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *pairs, *backwards[m - ahead :]]


_ORDERS = {"gpipe": _gpipe, "1f1b": _1f1b}


def home(orders: Orders) -> dict[int, int]:
    """Which rank runs each virtual stage."""
    return {action.stage: rank for rank, order in enumerate(orders) for action in order}


def inputs(action: Action, stages: int) -> tuple[Action, ...]:
    """The actions that must be done before this one can begin."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    own = Action("F", stage, microbatch)
    return (own, Action("B", stage + 1, microbatch)) if stage < stages - 1 else (own,)


def program(orders: Orders) -> list[list[Step]]:
    """Each rank's whole program: its actions with the exchanges between them.

    Before each action stands one exchange: it sends what the previous action made and receives what the next one
    needs, posted together. This pairing (1F1B's "send forward, receive backward") is what `validate` proves free of
    deadlock even when a send ends only once its receive is posted; an executor may wait for less, never for more.
    """
    place = home(orders)
    return [_rank_program(order, rank, place) for rank, order in enumerate(orders)]


def _rank_program(order: Sequence[Action], rank: int, place: dict[int, int]) -> list[Step]:
    steps: list[Step] = []
    made: Action | None = None
    for action in (*order, None):
        sends = _sends(made, rank, place) if made else ()
        receives = _receives(action, rank, place) if action else ()
        if sends or receives:
            steps.append(Exchange(sends, receives))
        if action:
            steps.append(action)
        made = action
    return steps


def _sends(made: Action, rank: int, place: dict[int, int]) -> tuple[Transfer, ...]:
    target = place.get(made.stage + (1 if made.kind == "F" else -1), rank)
    return (Transfer(made, rank, target),) if target != rank else ()


def _receives(action: Action, rank: int, place: dict[int, int]) -> tuple[Transfer, ...]:
    sources = ((needed, place.get(needed.stage, rank)) for needed in inputs(action, len(place)))
    return tuple(Transfer(needed, source, rank) for needed, source in sources if source != rank)


def in_flight(orders: Orders) -> list[int]:
    """The most microbatches (of one chunk each) that every rank holds at once between forward and backward."""
    peaks = []
    for order in orders:
        held = peak = 0
        for action in order:
            held += 1 if action.kind == "F" else -1
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def validate(orders: Orders) -> None:
    """Prove a schedule complete, ordered by its dependencies and free of deadlock; ValueError with what is wrong.

    Complete: every virtual stage lives on one rank and has each microbatch's F and B exactly once (or no B at all: a
    forward only). The rest is shown by running `program` with sends that end only when their receive is posted.
    """
    wrong = [*_incomplete(orders)] or [*_out_of_step(orders)] or [*_stuck(orders)]
    if wrong:
        raise ValueError("this schedule is not valid: " + "; ".join(wrong))


def _incomplete(orders: Orders) -> Iterator[str]:
    seen = Counter(action for order in orders for action in order)
    stages = sorted({action.stage for action in seen})
    microbatches = sorted({action.microbatch for action in seen})
    kinds = sorted({action.kind for action in seen}, reverse=True)
    if kinds not in (["F"], ["F", "B"]):
        yield f"it has the kinds {', '.join(kinds) or 'none'}, not F and B"
        return
    for what, numbers in (("stages", stages), ("microbatches", microbatches)):
        if numbers != list(range(len(numbers))):
            yield f"{what} are numbered {numbers}, not 0 to {len(numbers) - 1}"
    for stage in stages:
        ranks = [rank for rank, order in enumerate(orders) if any(action.stage == stage for action in order)]
        if len(ranks) > 1:
            yield f"stage {stage} is on ranks {ranks}"
    for action in (Action(kind, s, k) for s in stages for kind in kinds for k in microbatches):
        if seen[action] != 1:
            yield f"{action} is there {seen[action]} times"


def _out_of_step(orders: Orders) -> Iterator[str]:
    """Actions that stand before something on their own rank that they need, and links whose ends disagree on order."""
    place = home(orders)
    for rank, order in enumerate(orders):
        at = {action: position for position, action in enumerate(order)}
        for action in order:
            for needed in inputs(action, len(place)):
                if at.get(needed, -1) > at[action]:
                    yield f"rank {rank} has {action} before {needed}"
    sent, received = _by_link(orders, "sends"), _by_link(orders, "receives")
    for link in sorted({*sent, *received}):
        if sent.get(link) != received.get(link):
            yield f"rank {link[0]} sends to rank {link[1]} in another order than that receives"


def _by_link(orders: Orders, side: str) -> dict[tuple[int, int], list[Action]]:
    links: dict[tuple[int, int], list[Action]] = {}
    for steps in program(orders):
        for step in steps:
            for transfer in getattr(step, side, ()):
                links.setdefault((transfer.source, transfer.target), []).append(transfer.made)
    return links


def _stuck(orders: Orders) -> Iterator[str]:
    """Ranks that never finish when a send ends only once its receive is posted."""
    steps = program(orders)
    at = [0] * len(steps)
    posted: set[tuple[str, Transfer]] = set()
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(steps):
            while at[rank] < len(mine) and _done(mine[at[rank]], posted):
                at[rank] += 1
                moved = True
    for rank, mine in enumerate(steps):
        if at[rank] < len(mine):
            yield f"rank {rank} waits for ever in {_waiting(mine[at[rank]], posted)}"


def _done(step: Step, posted: set[tuple[str, Transfer]]) -> bool:
    """Post what an exchange has; it is done when the other ends are posted as well."""
    if isinstance(step, Action):
        return True
    posted.update(("send", transfer) for transfer in step.sends)
    posted.update(("recv", transfer) for transfer in step.receives)
    return not _waiting(step, posted)


def _waiting(step: Step, posted: set[tuple[str, Transfer]]) -> str:
    assert isinstance(step, Exchange)
    open_sends = [f"send of {t.made} to rank {t.target}" for t in step.sends if ("recv", t) not in posted]
    open_receives = [f"recv of {t.made} from rank {t.source}" for t in step.receives if ("send", t) not in posted]
    return ", ".join(open_sends + open_receives)
