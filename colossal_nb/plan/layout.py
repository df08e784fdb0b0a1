"""Who holds what of one tensor: a placement per mesh axis. Arithmetic only; holds no tensor and no group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from colossal_nb.plan.indices import Indices, cut, from_runs, intersect, normal, to_runs
from colossal_nb.plan.mesh import Mesh

if TYPE_CHECKING:
    from colossal_nb.plan.moves import Move

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds an addend; the value is their sum."""


@dataclass(frozen=True)
class On:
    """Only the ranks at this coordinate of the axis hold it (a pipeline stage's tensors).

    `copies`: further coordinates that hold the same (a weight tied between the first and the last stage).
    """

    coordinate: int
    copies: tuple[int, ...] = ()

    @property
    def coordinates(self) -> tuple[int, ...]:
        """All coordinates that hold it, the owner first."""
        return (self.coordinate, *self.copies)


@dataclass(frozen=True)
class Shard:
    """The axis's ranks hold parts of one tensor dim.

    Without `parts`: contiguous, sizes differ by at most one, larger ones first. With `parts`: the global indices
    that each rank of the axis holds, in local order (a fused qkv weight, heads shared by several ranks).
    """

    dim: int
    parts: tuple[Indices, ...] | None = None

    def __post_init__(self) -> None:
        if self.parts is not None:
            object.__setattr__(self, "parts", tuple(normal(part) for part in self.parts))


Placement = Replicate | Partial | On | Shard


@dataclass(frozen=True)
class Layout:
    """One tensor over a mesh: `placements[i]` says what mesh axis `mesh.axes[i]` does with it.

    Where several axes shard one dim, explicit parts cut first (they name global indices); the even ones then cut
    what is left, outer axis first.
    """

    global_shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(self.global_shape))
        object.__setattr__(self, "placements", tuple(self.placements))
        wrong = _wrong(self)
        if wrong:
            raise ValueError(f"layout of a {self.dtype} tensor {list(self.global_shape)}: " + "; ".join(wrong))

    @classmethod
    def of(cls, global_shape: Sequence[int], dtype: str, mesh: Mesh, **placements: Placement) -> Layout:
        """A layout by axis name; axes that are not named replicate.

        >>> str(Layout.of((8, 4), "float32", Mesh({"tp": 2}), tp=Shard(0)))
        'float32 [8, 4], tp: Shard(0)'
        """
        unknown = [axis for axis in placements if axis not in mesh.axes]
        if unknown:
            raise ValueError(f"this mesh has the axes {', '.join(mesh.axes)}; {', '.join(unknown)} is none of them")
        return cls(tuple(global_shape), dtype, mesh, tuple(placements.get(axis, Replicate()) for axis in mesh.axes))

    def placement(self, axis: str) -> Placement:
        """What one mesh axis does with the tensor."""
        return self.placements[self.mesh.axes.index(axis)]

    def slices(self, rank: int) -> tuple[Indices, ...] | None:
        """The global indices that a rank holds, per dim in local order; None if it holds nothing of the tensor.

        An empty shard is held: it has indices, none of them.
        """
        place = self.mesh.coordinate(rank)
        pairs = list(zip(self.placements, self.mesh.axes, strict=True))
        if any(isinstance(p, On) and place[axis] not in p.coordinates for p, axis in pairs):
            return None
        held: list[Indices] = [range(size) for size in self.global_shape]
        for placement, axis in pairs:
            if isinstance(placement, Shard) and placement.parts is not None:
                held[placement.dim] = intersect(placement.parts[place[axis]], held[placement.dim])
        for placement, axis in pairs:
            if isinstance(placement, Shard) and placement.parts is None:
                held[placement.dim] = cut(held[placement.dim], self.mesh.axis_size(axis), place[axis])
        return tuple(held)

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape of the tensor on a rank; None if it holds nothing of it."""
        slices = self.slices(rank)
        return None if slices is None else tuple(len(indices) for indices in slices)

    def local_bytes(self, rank: int) -> int:
        """Bytes on a rank, padding not counted."""
        shape = self.local_shape(rank)
        return 0 if shape is None else prod(shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which the ranks' values are still to be summed."""
        return tuple(a for a, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, Partial))

    def owners(self, index: Sequence[int]) -> tuple[int, ...]:
        """The ranks that hold one element (of a partial tensor: an addend of it), by its global index."""
        if len(index) != len(self.global_shape) or any(
            not 0 <= i < size for i, size in zip(index, self.global_shape, strict=True)
        ):
            raise ValueError(f"index {list(index)} is outside of a tensor {list(self.global_shape)}")
        return tuple(rank for rank in range(self.mesh.size) if self._holds(rank, index))

    def moves(self, to: Layout) -> list[Move]:
        """What must travel so that the tensor lies as `to` says: see `plan.moves`."""
        from colossal_nb.plan.moves import moves

        return moves(self, to)

    def to_json(self) -> str:
        """One line of text that `from_json` reads; index parts are written as runs."""
        placements = [_to_plain(placement) for placement in self.placements]
        plain = {"shape": self.global_shape, "dtype": self.dtype, "mesh": self.mesh.sizes, "placements": placements}
        return json.dumps(plain, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote."""
        plain = json.loads(text)
        placements = tuple(_from_plain(placement) for placement in plain["placements"])
        return cls(tuple(plain["shape"]), plain["dtype"], Mesh(plain["mesh"]), placements)

    def __str__(self) -> str:
        """For people: `float32 [256, 128], tp: Shard(0)`."""
        named = [
            f"{axis}: {_short(placement)}"
            for axis, placement in zip(self.mesh.axes, self.placements, strict=True)
            if not isinstance(placement, Replicate) and self.mesh.axis_size(axis) > 1
        ]
        return ", ".join([f"{self.dtype} {list(self.global_shape)}", *(named or ["replicated"])])

    def _holds(self, rank: int, index: Sequence[int]) -> bool:
        slices = self.slices(rank)
        return slices is not None and all(i in held for i, held in zip(index, slices, strict=True))


def _wrong(layout: Layout) -> list[str]:
    """Everything that makes a layout meaningless."""
    mesh, placements = layout.mesh, layout.placements
    if len(placements) != len(mesh.axes):
        return [f"{len(placements)} placements for the {len(mesh.axes)} mesh axes {', '.join(mesh.axes)}"]
    wrong = [] if layout.dtype in ITEM_BYTES else [f"dtype {layout.dtype!r} is none of {', '.join(ITEM_BYTES)}"]
    for axis, size, placement in zip(mesh.axes, mesh.shape, placements, strict=True):
        if isinstance(placement, On):
            outside = [at for at in placement.coordinates if not 0 <= at < size]
            wrong += [f"{axis} has coordinates 0..{size - 1}, not {at}" for at in outside]
        if isinstance(placement, Shard):
            wrong += [f"{axis}: {reason}" for reason in _wrong_shard(placement, size, layout.global_shape)]
    return wrong


def _wrong_shard(shard: Shard, ranks: int, shape: tuple[int, ...]) -> list[str]:
    if not 0 <= shard.dim < len(shape):
        return [f"Shard({shard.dim}) of a tensor with {len(shape)} dims"]
    if shard.parts is None:
        return []
    wrong = [] if len(shard.parts) == ranks else [f"{len(shard.parts)} parts for {ranks} ranks"]
    size = shape[shard.dim]
    for number, part in enumerate(shard.parts):
        if part and (min(part) < 0 or max(part) >= size):
            wrong.append(f"part {number} reaches from {min(part)} to {max(part)}, dim {shard.dim} from 0 to {size - 1}")
        if not isinstance(part, range) and len(set(part)) < len(part):
            wrong.append(f"part {number} names an index twice")
    return wrong


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})" if placement.parts is None else f"Shard({placement.dim}, by index)"
    if isinstance(placement, On):
        return f"On({', '.join(map(str, placement.coordinates))})"
    return type(placement).__name__


def _to_plain(placement: Placement) -> list[Any]:
    if isinstance(placement, Shard):
        parts = None if placement.parts is None else [to_runs(part) for part in placement.parts]
        return ["Shard", placement.dim, parts]
    return ["On", *placement.coordinates] if isinstance(placement, On) else [type(placement).__name__]


def _from_plain(plain: list[Any]) -> Placement:
    kind, *rest = plain
    if kind == "Shard":
        dim, parts = rest
        return Shard(dim, None if parts is None else tuple(from_runs(part) for part in parts))
    if kind == "On":
        return On(rest[0], tuple(rest[1:]))
    return Partial() if kind == "Partial" else Replicate()
