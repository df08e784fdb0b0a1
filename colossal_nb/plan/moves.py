"""From one layout to another: which rank sends which block to which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from colossal_nb.plan.indices import Indices, intersect, subtract
from colossal_nb.plan.layout import Layout, Partial

Box = tuple[Indices, ...]


@dataclass(frozen=True)
class Move:
    """One block from one rank to another. `add`: the target sums it into what arrives from others or is its own."""

    source: int
    target: int
    slices: Box  # global indices per dim
    payload_bytes: int
    add: bool = False


def moves(old: Layout, new: Layout) -> list[Move]:
    """What must travel, by target rank; what a rank has already stays where it is and is no move.

    A rank takes what it can from itself, then from the ranks that follow it. Sums that `new` wants finished take one
    addend from every coordinate of the partial axes.
    """
    if old.global_shape != new.global_shape or old.dtype != new.dtype:
        raise ValueError(
            f"a move keeps shape and dtype: {old.dtype} {list(old.global_shape)}"
            f" cannot become {new.dtype} {list(new.global_shape)}"
        )
    return [move for target in range(new.mesh.size) for move in _arriving(old, new, target)]


def _arriving(old: Layout, new: Layout, target: int) -> Iterator[Move]:
    needed = new.slices(target)
    if needed is None or _is_zero_addend(old, new, target):
        return
    addends = list(_addends(old, new, target))
    for sources in addends:
        sources.sort(key=lambda rank: (rank - target) % max(old.mesh.size, new.mesh.size))
        open_boxes = [needed]
        for source in sources:
            held = old.slices(source)
            if held is None:
                continue
            remaining: list[Box] = []
            for box in open_boxes:
                common = tuple(intersect(a, b) for a, b in zip(box, held, strict=True))
                if not all(common):
                    remaining.append(box)
                    continue
                remaining += _difference(box, common)
                if source != target:
                    size = prod(len(indices) for indices in common) * old.item_bytes
                    yield Move(source, target, common, size, add=len(addends) > 1)
            open_boxes = remaining


def _difference(box: Box, hole: Box) -> list[Box]:
    """A box without a box inside it, as disjoint boxes."""
    pieces: list[Box] = []
    for dim, (whole, part) in enumerate(zip(box, hole, strict=True)):
        rest = subtract(whole, part)
        if rest:
            pieces.append((*hole[:dim], rest, *box[dim + 1 :]))
    return pieces


def _addends(old: Layout, new: Layout, target: int) -> Iterator[list[int]]:
    """Groups of source ranks: the tensor on `target` is the sum over the groups, each of which holds one addend."""
    kept = _kept(old, new)
    choices = [
        [new.mesh.coordinate(target)[axis]] if axis in kept else range(old.mesh.axis_size(axis))
        for axis in old.partial_axes
    ]
    for place in product(*choices):
        wanted = dict(zip(old.partial_axes, place, strict=True))
        yield [
            rank
            for rank in range(old.mesh.size)
            if all(old.mesh.coordinate(rank)[axis] == at for axis, at in wanted.items())
        ]


def _kept(old: Layout, new: Layout) -> set[str]:
    """Axes whose sum stays open: partial before and after on the same mesh."""
    return set(old.partial_axes) & set(new.partial_axes) if old.mesh == new.mesh else set()


def _is_zero_addend(old: Layout, new: Layout, target: int) -> bool:
    """A newly partial axis keeps the value at coordinate 0; its other ranks hold zeros and need nothing."""
    place = new.mesh.coordinate(target)
    return any(
        isinstance(placement, Partial) and axis not in _kept(old, new) and place[axis] > 0
        for axis, placement in zip(new.mesh.axes, new.placements, strict=True)
    )
