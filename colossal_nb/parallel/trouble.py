"""After a stop or an error: are the weights those of one step on all ranks? Said once; torn ones are not used.

Every stop and every error ends an era of the world (see `World.era`), on all ranks alike. As a new one begins, every
rank leaves in the store which steps it has ended, for uses that are no collective. At the first use that is one the
ranks tell each other, and compare the weights that should be equal.
"""

from __future__ import annotations

from collections import defaultdict

from colossal_nb.parallel import kept, objects, replicas
from colossal_nb.parallel.batch import ranks_text
from colossal_nb.parallel.handle import Parallel, tell
from colossal_nb.parallel.steps import Position
from colossal_nb.parallel.world import World
from colossal_nb.plan import Mesh


def settle(parallel: Parallel) -> None:
    """Before a use of the weights: look at them, if there was a stop or an error since the last look. Collective.

    Raises ValueError on all ranks alike where they are not those of one step.
    """
    era = World.current().era
    if parallel.steps.era is not era:
        told = _gathered(parallel)
        parallel.torn, parallel.source = _fault(told), _whole_replica(told, parallel.mesh)
        if not parallel.torn and not _apart(parallel):
            _join(parallel, told)
        parallel.steps.era = era
    if parallel.torn:
        raise ValueError(_advice(parallel))


def require_alike(parallel: Parallel) -> None:
    """Raise ValueError on all ranks alike where they have ended different steps, or replicas differ. Collective."""
    require_level(parallel)
    if _apart(parallel):
        raise ValueError(_advice(parallel))


def require_level(parallel: Parallel) -> None:
    """Raise ValueError on all ranks alike where a step() ended on some of them alone. Collective."""
    told = _gathered(parallel)
    if fault := _fault(told):
        parallel.torn, parallel.source = fault, _whole_replica(told, parallel.mesh)
        raise ValueError(_advice(parallel))


def look(parallel: Parallel) -> None:
    """The same as `settle` before a use that one rank may make alone: by what every rank has told when the era began.

    Sees where a step, a forward_backward or a load ended on some ranks alone; weights are not compared. Raises
    ValueError on every rank that calls it.
    """
    glance(parallel)
    if parallel.torn:
        raise ValueError(_advice(parallel))


def glance(parallel: Parallel) -> None:
    """Look, without raising."""
    steps, era = parallel.steps, World.current().era
    if steps.era is era or steps.looked is era:
        return
    told = _told(parallel)
    if fault := _fault(told):
        parallel.torn, parallel.source = fault, _whole_replica(told, parallel.mesh)
    elif not parallel.torn:
        parallel.end_step()
        if dropped := _drop(parallel, told):
            steps.entered = parallel.calls
            tell(f"the weights of step {parallel.step} are whole on all ranks{dropped}")
    steps.looked = era


def _told(parallel: Parallel) -> list[Position]:
    """All ranks' positions, as far as they have told them in this era; else this rank's alone."""
    own, world = parallel.position(), World.current()
    others = [rank for rank in range(parallel.mesh.size) if rank != own.rank]
    texts = world.told(parallel.number, others) if parallel.number and others else []
    return sorted([own, *map(Position.from_json, texts)], key=lambda each: each.rank)


def stopped(parallel: Parallel) -> None:
    """All ranks stop in the same forward_backward: say how they stand. Collective."""
    if not _fault(_gathered(parallel)) and not _apart(parallel):
        parallel.steps.entered = parallel.calls  # it leaves nothing behind
        left = ", .grad what it held before this forward_backward" if parallel.calls_in_step else ""
        tell(f"stopped between steps: the weights of step {parallel.step} are whole on all ranks{left}")


def replacing(parallel: Parallel, by: str) -> None:
    """Weights and states are about to be replaced in place: torn on a rank that does not come to `united`."""
    steps = parallel.steps
    steps.replacing, steps.era, steps.looked = by, None, None


def united(parallel: Parallel) -> None:
    """The ranks are in one state, by what has just been done to all of them alike."""
    steps = parallel.steps
    steps.era, steps.entered, steps.since = World.current().era, parallel.calls, parallel.calls
    steps.finished.clear()
    for marks in (steps.open, steps.over, steps.wrote):
        marks.clear()
    parallel.stepped.clear()
    steps.replacing = steps.known = ""
    parallel.torn = ""


def _gathered(parallel: Parallel) -> list[Position]:
    told: list[Position] = objects.all_gather(parallel.position(), parallel.group(), "steps")
    return told


def _apart(parallel: Parallel) -> bool:
    """Whether ranks that should hold the same weights and states do not; then they are torn. Collective."""
    found = replicas.differing(parallel)
    if found:
        odd = {parallel.mesh.coordinate(rank)["dp"] for each in found for rank in each.ranks}
        parallel.torn = replicas.sentence(found)
        parallel.source = 0 if parallel.replicas > 1 and 0 not in odd else None
    return bool(found)


def _fault(told: list[Position]) -> str:
    """What is wrong with where the ranks are; "" if nothing is."""
    if known := [each.known for each in told if each.known]:
        return known[0]
    if cut := [each for each in told if each.replacing]:
        return f"{cut[0].replacing} was cut short on {ranks_text([each.rank for each in cut])}"
    half = [each.rank for each in told if _half(each, told)]
    if half:
        return f"optimizer.step() was cut short on {ranks_text(half)}"
    places: dict[tuple[int, ...], list[Position]] = defaultdict(list)
    for each in told:
        places[each.finished].append(each)
    if len(places) > 1:
        said = [
            f"{ranks_text([each.rank for each in some])} {'is' if len(some) == 1 else 'are'} at step {some[0].step}"
            for some in places.values()
        ]
        return "a step ended on some ranks only: " + ", ".join(said)
    return ""


def _half(position: Position, told: list[Position]) -> bool:
    """Whether a rank is in the middle of a step; in its post-hooks it is where these write to the weights anywhere."""
    return position.half or (position.hooks and any(each.wrote for each in told))


def _whole_replica(told: list[Position], mesh: Mesh) -> int | None:
    """The replica all of whose ranks have ended the same steps, the most of them; None if there is none."""
    replicas: dict[int, set[tuple[tuple[int, ...], bool]]] = defaultdict(set)
    for each in told:
        replicas[mesh.coordinate(each.rank)["dp"]].add((each.finished, _half(each, told)))
    if any(each.replacing or each.known for each in told):
        return None  # a random state may be missing too: what was replaced is to be replaced again
    whole = {dp: next(iter(found)) for dp, found in replicas.items() if len(found) == 1}
    good = {dp: finished for dp, (finished, half) in whole.items() if not half}
    return max(good, key=lambda dp: (good[dp], -dp)) if good and mesh.axis_size("dp") > 1 else None


def _join(parallel: Parallel, told: list[Position]) -> None:
    """The weights are of one step: bring the rest into one state too, and say so where something was under way."""
    cut_short = any(each.entered > each.calls for each in told)
    was_used = any(each.entered > parallel.steps.since for each in told)
    parallel.end_step()
    left = _drop(parallel, told)
    if not left and any(each.in_step for each in told):
        left = "; the gradients of what was done of the next are in .grad: optimizer.zero_grad() to begin it anew"
    united(parallel)
    if was_used and (cut_short or left):
        tell(f"the weights of step {parallel.step} are whole on all ranks{left}")


def _drop(parallel: Parallel, told: list[Position]) -> str:
    """Where some ranks have come to the end of a forward_backward alone, it leaves nothing behind; says so."""
    calls = min(each.calls for each in told)
    if all(each.calls == calls for each in told):
        return ""
    for p in (*parallel.parameters.values(), *parallel.outside):
        p.grad = None
    parallel.calls_in_step = 0
    if parallel.calls > calls:
        kept.put_back(parallel)
    parallel.calls = calls
    return "; gradients that some ranks had and others not were dropped"


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
