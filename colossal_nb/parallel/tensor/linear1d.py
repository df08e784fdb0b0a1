"""1D tensor-parallel twins of nn.Linear, for P ranks on one mesh axis.

Mathematics, with x (..., h_in), W (h_out, h_in), r = 0..P-1:
    column: W is cut by rows,    y_r = x W_r^T + b_r            every rank holds all of x and its features of y
    row:    W is cut by columns, y = sum over r of x_r W_r^T + b every rank holds its features of x and all of y
A column followed by a row needs nothing in between: the row reads exactly the features that the column made.
Volume: a row's forward is one all-reduce of y, a column's backward one all-reduce of the gradient of x: the columns
that read one tensor (q, k and v) share it. The gradients of W and b need none: each rank has all they are made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.collectives import copy_to
from colossal_nb.parallel.tensor.sums import sum_
from colossal_nb.parallel.tensor.values import Parts
from colossal_nb.plan.mesh import Mesh


class Entrance:
    """Where a replicated tensor enters the columns: passes it on unchanged and sums its gradient over the ranks.

    `readers` columns that are called on the same tensor get the same copy, so that its gradient is summed once.
    """

    def __init__(self, mesh: Mesh, axis: str, of: str, readers: int) -> None:
        self.mesh, self.axis, self.of, self.readers = mesh, axis, of, readers
        self._seen: Tensor | None = None
        self._copy: Tensor | None = None
        self._version = self._left = 0

    def __call__(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        if self.readers == 1:
            return copy_to(x, self.mesh, self.axis, of=self.of)
        if self._seen is not x or self._version != x._version:
            self._seen, self._version, self._left = x, x._version, self.readers
            self._copy = copy_to(x, self.mesh, self.axis, of=self.of)
        copy = self._copy
        assert copy is not None
        self._left -= 1
        if not self._left:
            self._seen = self._copy = None
        return copy

    def __deepcopy__(self, memo: dict[int, object]) -> Entrance:
        twin = Entrance(self.mesh, self.axis, self.of, self.readers)
        memo[id(self)] = twin
        return twin


@dataclass(frozen=True)
class LinearCut:
    """How one linear is cut: its features per rank, this rank's number, the entrance of a column."""

    mesh: Mesh
    axis: str
    rank: int
    parts: Parts
    name: str
    entrance: Entrance | None = None

    def __str__(self) -> str:
        part = self.parts[self.rank]
        whole = 1 + max(max(one) for one in self.parts if one)
        run = len(part) and part[-1] - part[0] == len(part) - 1
        which = f"{part[0]}:{part[-1] + 1}" if run else f"{len(part)}"
        return f"{which} of {whole} on {self.axis} {self.rank}"


class ColumnLinear1D(nn.Linear):
    """nn.Linear that holds some of its output features: (..., in_features) -> (..., local out_features).

    `in_features` and `out_features` stay the whole numbers. Forward: no communication. Backward: all-reduce of the
    input's gradient.
    """

    cut: LinearCut

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """(..., in_features), whole on every rank -> this rank's output features."""
        entrance = self.cut.entrance
        assert entrance is not None
        return F.linear(entrance(input), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, out {self.cut}"


class NarrowColumnLinear1D(ColumnLinear1D):
    """A column inside a region that is shown a narrow input (`narrow_input`): reads the whole one behind it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """(..., narrow) with the whole input behind it -> this rank's output features."""
        return super().forward(getattr(input, "whole_input", input))


class RowLinear1D(nn.Linear):
    """nn.Linear that holds some of its input features: (..., local in_features) -> (..., out_features).

    Forward: all-reduce of the output, then the bias, once. Backward: no communication.
    """

    cut: LinearCut

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """This rank's input features -> (..., out_features), whole on every rank."""
        cut = self.cut
        summed = sum_(F.linear(input, self.weight), cut.mesh, cut.axis, cut.name)
        return summed if self.bias is None else summed.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in {self.cut}"


def narrow_input(x: Tensor, width: int) -> Tensor:
    """The first `width` features of x, for a module that reads its width from `x.shape`; columns read x itself."""
    narrow = x.detach()[..., :width]
    narrow.whole_input = x  # type: ignore[attr-defined]
    return narrow
