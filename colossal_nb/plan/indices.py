"""Ordered index sets of one tensor dim: a range where they are consecutive, else a tuple."""

from __future__ import annotations

from collections.abc import Collection, Sequence

Indices = range | tuple[int, ...]


def normal(indices: Sequence[int]) -> Indices:
    """The one form of an index set: equal sets in equal order compare equal."""
    if len(indices) == 0:
        return range(0)
    if isinstance(indices, range) and indices.step == 1:
        return indices
    first, last = indices[0], indices[-1]
    if last - first + 1 == len(indices) and all(i == first + k for k, i in enumerate(indices)):
        return range(first, last + 1)
    return tuple(indices)


def cut(indices: Indices, parts: int, part: int) -> Indices:
    """One of `parts` contiguous pieces whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(len(indices), parts)
    start = part * size + min(part, larger)
    return normal(indices[start : start + size + (part < larger)])


def intersect(indices: Indices, other: Collection[int]) -> Indices:
    """The indices that are also in `other`, in their own order."""
    if isinstance(indices, range) and isinstance(other, range):
        return normal(range(max(indices.start, other.start), min(indices.stop, other.stop)))
    members = other if isinstance(other, range) else set(other)
    return normal([i for i in indices if i in members])


def subtract(indices: Indices, other: Collection[int]) -> Indices:
    """The indices that are not in `other`, in their own order."""
    members = other if isinstance(other, range) else set(other)
    return normal([i for i in indices if i not in members])


def to_runs(indices: Indices) -> list[list[int]]:
    """As `[start, stop]` runs of consecutive indices, in order."""
    runs: list[list[int]] = []
    for i in indices if not isinstance(indices, range) else ():
        if runs and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1])
    return [[indices.start, indices.stop]] if isinstance(indices, range) and indices else runs


def from_runs(runs: Sequence[Sequence[int]]) -> Indices:
    """The indices that `to_runs` wrote."""
    return normal([i for start, stop in runs for i in range(start, stop)])
