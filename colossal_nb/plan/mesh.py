"""The mesh: which rank stands where. Names axes and counts ranks; holds no process and no group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

AXES = ("dp", "pp", "sp", "tp")


@dataclass(frozen=True, init=False)
class Mesh:
    """Ranks 0..size-1 laid out row-major over the axes dp, pp, sp, tp (outer to inner).

    All four axes are always present; one that is not given has size 1.

    >>> Mesh({"pp": 2, "tp": 2}).ranks("pp", 1)
    (1, 3)
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        sizes = dict(sizes or {})
        for name, size in sizes.items():
            if name not in AXES:
                raise ValueError(f"a mesh has the axes {', '.join(AXES)}; {name!r} is none of them")
            if size < 1:
                raise ValueError(f"axis {name} needs at least 1 rank, not {size}")
        object.__setattr__(self, "axes", AXES)
        object.__setattr__(self, "shape", tuple(sizes.get(axis, 1) for axis in AXES))

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks per axis."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """Number of ranks in each group of an axis."""
        return self.shape[self._index(axis)]

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        self._require(rank)
        place: dict[str, int] = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; an axis that is not named stands at 0."""
        number = 0
        for axis, size in zip(self.axes, self.shape, strict=True):
            at = coordinate.get(axis, 0)
            if not 0 <= at < size:
                raise ValueError(f"{axis} has coordinates 0..{size - 1}; {at} is none of them")
            number = number * size + at
        return number

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on `axis`, `rank` itself included, in the axis's order."""
        self._require(rank)
        index = self._index(axis)
        stride = prod(self.shape[index + 1 :])
        size = self.shape[index]
        first = rank - (rank // stride % size) * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups along an axis: every rank is in exactly one."""
        return [self.ranks(axis, rank) for rank in range(self.size) if self.ranks(axis, rank)[0] == rank]

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """The coordinates of ranks 0, 1, 2, ... as tuples in the order of `axes`."""
        return product(*(range(size) for size in self.shape))

    def __str__(self) -> str:
        named = [f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True) if size > 1]
        return " ".join(named) or "one rank"

    def _index(self, axis: str) -> int:
        if axis not in self.axes:
            raise ValueError(f"this mesh has the axes {', '.join(self.axes)}; {axis!r} is none of them")
        return self.axes.index(axis)

    def _require(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"the mesh ({self}) has ranks 0..{self.size - 1}; {rank} is none of them")
