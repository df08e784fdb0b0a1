"""The weights with which both programs begin, against those that `parallelize` was given.

The sequential program takes its weights from the ranks, so slices that lie on wrong ranks would go unseen there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from colossal_nb.parallel import objects, origin
from colossal_nb.parallel.handle import Parallel, holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part, put
from colossal_nb.parallel.verify.result import Row
from colossal_nb.parallel.verify.twins import WAITS, Twin
from colossal_nb.plan import Layout, Shard


def start(parallel: Parallel, whole: Twin | None) -> tuple[list[Row], list[str]]:
    """What is wrong, and what is only worth a note. Only weights are looked at that nobody has written into since.

    Collective.
    """
    group, known = parallel.group(), parallel.origin
    mine = {n for n, p in parallel.parameters.items() if holds(p, parallel.rank) and known.changed(n, p)}
    changed: set[str] = set().union(*objects.all_gather(mine, group, "verify"))
    found: tuple[list[Row], list[str]] = [], []
    if whole is not None:
        for name in [name for name in known.rows if name not in changed]:
            weight = whole.parameters[name].detach()
            if weight.shape[0] == len(known.rows[name]) and not origin.alike(origin.rows(weight), known.rows[name]):
                row = _misplaced(name, weight, known.rows[name], layout_of(parallel.parameters[name]))
                if row is not None:
                    found[0].append(row)
                else:
                    found[1].append(f"{name} is not as parallelize was given it, and nobody has written into it")
    told: tuple[list[Row], list[str]] = objects.broadcast(found, group, WAITS, "verify")
    return told


def _misplaced(name: str, weight: Tensor, rows: Tensor, layout: Layout | None) -> Row | None:
    """Two ranks that have each other's part, or one that has another's."""
    if layout is None:
        return None
    difference = float((origin.rows(weight) - rows).abs().max() / rows.abs().max())
    for a, b in _pairs(layout):
        part_a, part_b = local_part(weight, layout, a), local_part(weight, layout, b)
        assert part_a is not None
        assert part_b is not None
        if torch.equal(part_a, part_b) and part_a.any():
            return Row("start", name, difference, origin.CLOSE, (a, b), f"ranks {a} and {b} have the same part")
        if part_a.shape == part_b.shape:
            other = weight.clone()
            put(other, layout, a, part_b)
            put(other, layout, b, part_a)
            if origin.alike(origin.rows(other), rows):
                said = f"ranks {a} and {b} have each other's part ({_part(layout, a)} and {_part(layout, b)})"
                return Row("start", name, difference, origin.CLOSE, (a, b), f"{said}: slices exchanged")
    return None


def _pairs(layout: Layout) -> Iterator[tuple[int, int]]:
    """Ranks that hold different parts; of replicas the first."""
    first: dict[str, int] = {}
    for rank in range(layout.mesh.size):
        slices = layout.slices(rank)
        if slices is not None:
            first.setdefault(str(slices), rank)
    return combinations(sorted(first.values()), 2)


def _part(layout: Layout, rank: int) -> str:
    slices = layout.slices(rank)
    assert slices is not None
    dim = next((each.dim for each in layout.placements if isinstance(each, Shard)), 0)
    held = list(slices[dim])
    what = {0: "rows", 1: "columns"}.get(dim, f"dim {dim},")
    run = held and held[-1] - held[0] == len(held) - 1
    return f"{what} {held[0]}..{held[-1]}" if run else f"{len(held)} {what}"
