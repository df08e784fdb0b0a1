"""After a stop or an error: are the weights those of one step on all ranks? Said once; torn ones are not used.

Every stop and every error ends an era of the world (see `World.era`), on all ranks alike. At the first use of a model
in a new one its ranks tell each other which steps they have ended, and compare the weights that should be equal.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from colossal_nb.parallel import kept, objects
from colossal_nb.parallel.batch import checksum, ranks_text
from colossal_nb.parallel.handle import Parallel, holds, tell
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan import Mesh, Replicate

Place = tuple[int, ...]


@dataclass(frozen=True)
class Told:
    """What one rank tells. `shared`: a checksum of the weights that the ranks along tp hold alike; `outside`: of what
    is trained outside the model."""

    rank: int
    finished: tuple[int, ...]
    half: bool
    replacing: str
    entered: int
    calls: int
    in_step: int
    step: int
    weights: int
    shared: int
    outside: int


def settle(parallel: Parallel) -> None:
    """Before a use of the weights: look at them, if there was a stop or an error since the last look. Collective.

    Raises ValueError on all ranks alike where they are not those of one step.
    """
    era = World.current().era
    if parallel.steps.era is not era:
        told = objects.all_gather(_own(parallel), parallel.group(), "steps")
        parallel.torn = _fault(told, parallel.mesh)
        parallel.source = _whole_replica(told, parallel.mesh)
        if not parallel.torn:
            _join(parallel, told)
        parallel.steps.era = era
    if parallel.torn:
        raise ValueError(_advice(parallel))


def stopped(parallel: Parallel) -> None:
    """All ranks stop in the same forward_backward: say how they stand. Collective."""
    told = objects.all_gather(_own(parallel), parallel.group(), "steps")
    if not _fault(told, parallel.mesh):
        parallel.steps.entered = parallel.calls  # it leaves nothing behind
        left = ", .grad what it held before this forward_backward" if parallel.calls_in_step else ""
        tell(f"stopped between steps: the weights of step {parallel.step} are whole on all ranks{left}")


def replacing(parallel: Parallel, by: str) -> None:
    """Weights and states are about to be replaced in place: torn on a rank that does not come to `united`."""
    parallel.steps.replacing, parallel.steps.era = by, None


def united(parallel: Parallel) -> None:
    """The ranks are in one state, by what has just been done to all of them alike."""
    steps = parallel.steps
    steps.era, steps.entered, steps.since = World.current().era, parallel.calls, parallel.calls
    steps.finished.clear()
    steps.open.clear()
    steps.replacing = ""
    parallel.torn = ""


def _own(parallel: Parallel) -> Told:
    held = list(parallel.held().values())
    alike = [p for p in held if (layout := layout_of(p)) and isinstance(layout.placement("tp"), Replicate)]
    steps, rank = parallel.steps, parallel.rank
    finished = tuple(steps.finished[number] for number in range(len(parallel.optimizers)))
    half = steps.half_done(parallel.optimizers)
    numbers = steps.entered, parallel.calls, parallel.calls_in_step, parallel.step
    shared = checksum([p.detach() for p in alike if holds(p, rank)])
    outside = checksum(parallel.outside)
    return Told(rank, finished, half, steps.replacing, *numbers, checksum([p.detach() for p in held]), shared, outside)


def _fault(told: list[Told], mesh: Mesh) -> str:
    """What is wrong with the weights; "" if nothing is."""
    if cut := [each for each in told if each.replacing]:
        return f"{cut[0].replacing} was cut short on {ranks_text([each.rank for each in cut])}"
    half = [each.rank for each in told if each.half]
    if half:
        return f"optimizer.step() was cut short on {ranks_text(half)}"
    places: dict[tuple[int, ...], list[Told]] = defaultdict(list)
    for each in told:
        places[each.finished].append(each)
    if len(places) > 1:
        said = [
            f"{ranks_text([each.rank for each in some])} {'is' if len(some) == 1 else 'are'} at step {some[0].step}"
            for some in places.values()
        ]
        return "a step ended on some ranks only: " + ", ".join(said)
    odd = _odd(told, mesh)
    return f"the weights on {ranks_text(odd)} are not those of the other replicas" if odd else ""


def _odd(told: list[Told], mesh: Mesh) -> list[int]:
    """Ranks whose weights are not those of the first rank that should hold the same."""
    first: dict[tuple[str, Place], int] = {}
    odd = []
    for each in told:
        place = mesh.coordinate(each.rank)
        across = tuple(at for axis, at in place.items() if axis != "dp")
        along = tuple(at for axis, at in place.items() if axis != "tp")
        same = first.setdefault(("dp", across), each.weights) == each.weights
        same = same and first.setdefault(("all", ()), each.outside) == each.outside
        if not same or first.setdefault(("tp", along), each.shared) != each.shared:
            odd.append(each.rank)
    return odd


def _whole_replica(told: list[Told], mesh: Mesh) -> int | None:
    """The replica all of whose ranks have ended the same steps, the most of them; None if there is none."""
    replicas: dict[int, set[tuple[tuple[int, ...], bool]]] = defaultdict(set)
    for each in told:
        replicas[mesh.coordinate(each.rank)["dp"]].add((each.finished, each.half))
    if any(each.replacing for each in told):
        return None  # a random state may be missing too: what was replaced is to be replaced again
    whole = {dp: next(iter(found)) for dp, found in replicas.items() if len(found) == 1}
    good = {dp: finished for dp, (finished, half) in whole.items() if not half}
    return max(good, key=lambda dp: (good[dp], -dp)) if good and mesh.axis_size("dp") > 1 else None


def _join(parallel: Parallel, told: list[Told]) -> None:
    """The weights are of one step: bring the rest into one state too, and say so where something was under way."""
    cut_short = any(each.entered > each.calls for each in told)
    calls = min(each.calls for each in told)
    apart = any(each.calls > calls for each in told)
    was_used = any(each.entered > parallel.steps.since for each in told)
    left = ""
    if apart:
        for p in (*parallel.parameters.values(), *parallel.outside):
            p.grad = None
        left = "; gradients that some ranks had and others not were dropped"
        parallel.calls_in_step = 0
        if parallel.calls > calls:
            kept.put_back(parallel)
    elif any(each.in_step for each in told):
        left = "; the gradients of what was done of the next are in .grad: optimizer.zero_grad() to begin it anew"
    parallel.calls = calls
    united(parallel)
    if was_used and (cut_short or apart or left):
        tell(f"the weights of step {parallel.step} are whole on all ranks{left}")


def _advice(parallel: Parallel) -> str:
    if parallel.source is not None:
        ranks = [
            rank for rank in range(parallel.mesh.size) if parallel.mesh.coordinate(rank)["dp"] == parallel.source
        ]
        way = f"cnb.recover(model) gives all ranks the weights and optimizer states of {ranks_text(ranks)}"
    elif parallel.saved:
        way = f"cnb.load({parallel.saved!r}, model, optimizer) goes back to the last checkpoint"
    else:
        way = "cnb.load goes back to a checkpoint, if there is one; else run the cell that makes the model again"
    return f"the weights are torn: {parallel.torn}; {way}"
