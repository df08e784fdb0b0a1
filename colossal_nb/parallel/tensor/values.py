"""What the tensor pass decides and reports: values only, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossal_nb.plan.mesh import Mesh

Parts = tuple[tuple[int, ...], ...]
"""Per rank of the axis: the features it holds, in ascending order. Features may be held by several ranks."""


def even_parts(size: int, ranks: int) -> Parts:
    """Contiguous parts that differ by at most one, the larger ones first.

    >>> even_parts(5, 2)
    ((0, 1, 2), (3, 4))
    """
    small, larger = divmod(size, ranks)
    starts = [rank * small + min(rank, larger) for rank in range(ranks + 1)]
    return tuple(tuple(range(starts[rank], starts[rank + 1])) for rank in range(ranks))


@dataclass(frozen=True)
class Change:
    """An integer attribute that a module believes and that must say the local number (heads, a split size)."""

    module: str
    attribute: str
    whole: int
    local: int


@dataclass(frozen=True)
class Pair:
    """Column-parallel linears whose outputs meet nothing but one row-parallel linear.

    `region` is the module whose forward leads from the columns to the row. `groups` counts what may be dealt to
    ranks as a unit: attention heads, key/value groups, single features of an MLP. Under `narrow` the region reads its
    width from its first argument, which is shown cut to one rank's width. `entrances`: the columns by the tensor they
    read, so that its gradient is summed once.
    """

    region: str
    columns: tuple[tuple[str, Parts], ...]
    row: str
    row_parts: Parts
    groups: int
    changes: tuple[Change, ...] = ()
    narrow: bool = False
    entrances: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class VocabularyShard:
    """Modules that read one weight of shape (vocabulary, hidden) by rows: an embedding, a head, or both when tied."""

    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    parts: Parts

    @property
    def size(self) -> int:
        """Rows of the whole weight."""
        return sum(len(part) for part in self.parts)


@dataclass(frozen=True)
class TensorPlan:
    """What `plan` decided on the whole model; equal on every rank of the axis.

    `partial` names the parameters whose gradient on a rank is an addend of the whole gradient. `whole` names what
    stays whole, with the reason. `share` is the part of the model's parameters that is cut, 0 to 1.
    """

    mesh: Mesh
    axis: str = "tp"
    pairs: tuple[Pair, ...] = ()
    vocabulary: tuple[VocabularyShard, ...] = ()
    partial: tuple[str, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()
    share: float = 0.0

    @property
    def ranks(self) -> int:
        """Ranks on the axis."""
        return self.mesh.axis_size(self.axis)


@dataclass(frozen=True)
class Report:
    """What was done, for people (`str`) and for the passes that follow.

    `partial`: the parameters whose gradients are summed over the axis by a hook that `apply` set: nobody else sums
    them over that axis again.
    """

    plan: TensorPlan

    @property
    def partial(self) -> tuple[str, ...]:
        """Names of parameters that are whole, or copied, on several ranks and whose gradients a hook sums."""
        return self.plan.partial

    def lines(self) -> list[str]:
        """One line per kind of decision; equal lines of repeated blocks are folded."""
        from colossal_nb.parallel.tensor.text import report_lines

        return report_lines(self.plan)

    def __str__(self) -> str:
        return "\n".join(self.lines())
