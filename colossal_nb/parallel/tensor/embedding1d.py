"""The vocabulary-parallel embedding on P ranks of one mesh axis.

Mathematics: W (vocabulary, hidden) is cut by rows; rank r looks up the ids that it holds, puts 0 for the others, and
the sum over the ranks is the whole lookup. Volume: one all-reduce of the output forward, none backward: the gradient
of row i is needed where row i lies, and every rank has the whole output gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.tensor.sums import sum_
from colossal_nb.plan.mesh import Mesh


@dataclass(frozen=True)
class RowRange:
    """The rows [first, first + count) of `size` that this rank of the axis holds; `bounds` has those of all ranks."""

    mesh: Mesh
    axis: str
    rank: int
    bounds: tuple[tuple[int, int], ...]
    name: str

    @property
    def first(self) -> int:
        """First row here."""
        return self.bounds[self.rank][0]

    @property
    def count(self) -> int:
        """Number of rows here."""
        return self.bounds[self.rank][1]

    @property
    def size(self) -> int:
        """Rows of the whole weight."""
        return sum(count for _, count in self.bounds)

    def __str__(self) -> str:
        return f"{self.first}:{self.first + self.count} of {self.size} on {self.axis} {self.rank}"


class Embedding1D(nn.Embedding):
    """nn.Embedding that holds some rows of its weight: ids (...) -> (..., embedding_dim), whole on every rank.

    `num_embeddings` stays the whole number. Raises IndexError for an id outside of it, as nn.Embedding does (on CPU;
    on a GPU the check would wait for the device).
    """

    rows: RowRange

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Embedding's own name
        """Ids (...) -> (..., embedding_dim)."""
        rows = self.rows
        check_range(input, rows.size, "index out of range in self")
        local = input - rows.first
        foreign = (local < 0) | (local >= rows.count)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - rows.first if 0 <= padding - rows.first < rows.count else None
        found = F.embedding(local.masked_fill_(foreign, 0), self.weight, padding)
        return sum_(found.masked_fill_(foreign.unsqueeze(-1), 0), rows.mesh, rows.axis, rows.name)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rows {self.rows}"

    def _fill_padding_idx_with_zero(self) -> None:
        row = self.rows.count if self.padding_idx is None else self.padding_idx - self.rows.first
        if 0 <= row < self.rows.count:
            with torch.no_grad():
                self.weight[row].fill_(0)


def check_range(ids: Tensor, size: int, message: str, allowed: int | None = None) -> None:
    """IndexError unless all ids are in [0, size) or equal to `allowed`; asked on CPU only."""
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = ids.aminmax()
    if low >= 0 and high < size:
        return
    if allowed is None or (((ids < 0) | (ids >= size)) & (ids != allowed)).any():
        raise IndexError(message)
