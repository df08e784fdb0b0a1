"""Whether ranks that should hold the same weights do: one pass over the local weights, one small exchange.

A program that changes gradients or weights by rank tears the replicas, and nothing in a step would show it. On the CPU
equal replicas are equal bit by bit; other devices may add up in another order on every rank, which is rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import ranks_text
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.plan import On, Replicate

SAMPLED = 1 << 12  # elements of a tensor by which the size of a difference is judged
ROUNDING = 64  # units in the last place of the largest entry, on devices whose sums have no fixed order
MOST_ROUNDING = 1e-2
Key = tuple[str, str]  # a parameter, and which of its states ("" for the weight)


@dataclass(frozen=True)
class Apart:
    """Replicas of one tensor that differ: on `ranks` from those on `first`, by a part of its size."""

    name: str
    first: int
    ranks: tuple[int, ...]
    difference: float
    is_state: bool = False

    def __str__(self) -> str:
        size = f" (by {self.difference:.1e} of its size)" if self.difference else ""
        return f"replicas of {self.name} differ between {ranks_text(sorted((self.first, *self.ranks)))}{size}"


def sentence(found: list[Apart]) -> str:
    """Which weight (or, if none, which state) differs most, from which others may differ too; what that comes from."""
    more = f", so do those of {len(found) - 1} more" if len(found) > 1 else ""
    most = max(found, key=lambda each: (not each.is_state, each.difference))
    return f"{most}{more}: something in the program changes gradients, weights or optimizer states by rank"


def differing(parallel: Parallel) -> list[Apart]:
    """In the model's order, the same on all ranks. Collective."""
    group = parallel.group()
    if group.size == 1:
        return []
    own = dict(_copied(parallel))
    sums = {key: _sum(tensor) for key, tensor in own.items()}
    told: list[dict[Key, int]] = objects.all_gather(sums, group, "replicas")
    odd = _odd(parallel, dict(zip(group.ranks, told, strict=True)))
    if not odd:
        return []
    samples: list[dict[Key, Tensor]] = objects.all_gather(
        {key: _sample(own[key]) for key in odd if key in own}, group, "replicas"
    )
    by_rank, found = dict(zip(group.ranks, samples, strict=True)), []
    for key, (first, ranks) in odd.items():
        size = max(float(by_rank[first][key].abs().max()), torch.finfo(torch.float32).tiny)
        difference = max(float((by_rank[rank][key] - by_rank[first][key]).abs().max()) / size for rank in ranks)
        if parallel.device == "cpu" or not difference <= _rounding(parallel, key[0]):
            what = " of ".join(each for each in reversed(key) if each)
            found.append(Apart(what, first, tuple(ranks), difference, is_state=bool(key[1])))
    return found


def _odd(parallel: Parallel, sums: dict[int, dict[Key, int]]) -> dict[Key, tuple[int, list[int]]]:
    """The first of two ranks that should hold the same, and those that hold something else."""
    odd: dict[Key, tuple[int, list[int]]] = {}
    for key in dict.fromkeys(key for each in sums.values() for key in each):
        first: dict[tuple[int, ...], int] = {}
        for rank in (rank for rank, each in sums.items() if key in each):
            other = first.setdefault(_part(parallel, key[0], rank), rank)
            if sums[rank][key] != sums[other][key] and odd.setdefault(key, (other, []))[0] == other:
                odd[key][1].append(rank)
    return odd


def _copied(parallel: Parallel) -> Iterator[tuple[Key, Tensor]]:
    """What this rank holds and another too: weights first, then the optimizers' states."""
    copied = {name: p for name, p in parallel.held().items() if p.numel() and _has_copies(parallel, p)}
    for name, p in copied.items():
        yield (name, ""), p.detach()
    for number, tensor in enumerate(parallel.outside):
        yield (f"tensor {number} outside the model", ""), tensor.detach()
    for optimizer in parallel.optimizers:
        kind = type(optimizer).__name__
        for name, p in copied.items():
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.numel():
                    yield (name, f"{kind}'s {key}"), value.detach()


def _sum(tensor: Tensor) -> int:
    """Of the bits, eight bytes as one number: several times as fast as a checksum, and where the tensor is."""
    octets = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    end = len(octets) // 8 * 8
    return int(octets[:end].view(torch.int64).sum()) ^ int(octets[end:].sum())


def _has_copies(parallel: Parallel, p: Tensor) -> bool:
    layout = layout_of(p)
    if layout is None:
        return True
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return any(
        bool(each.copies) if isinstance(each, On) else isinstance(each, Replicate) and parallel.mesh.axis_size(axis) > 1
        for axis, each in pairs
    )


def _part(parallel: Parallel, name: str, rank: int) -> tuple[int, ...]:
    """Equal for ranks that hold the same part: the coordinates along the axes that cut the tensor."""
    layout = layout_of(parallel.parameters[name]) if name in parallel.parameters else None
    if layout is None:
        return ()
    place = layout.mesh.coordinate(rank)
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return tuple(place[axis] for axis, each in pairs if not isinstance(each, Replicate | On))


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLED)].cpu().double()


def _rounding(parallel: Parallel, name: str) -> float:
    p = parallel.parameters.get(name)
    kind = torch.float32 if p is None or not p.is_floating_point() else p.dtype
    return min(ROUNDING * torch.finfo(kind).eps, MOST_ROUNDING)
