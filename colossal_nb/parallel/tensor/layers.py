"""The 1D linear as a layer to build with; `parallelize` makes its twins from plain linears instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.collectives import gather_from, split_to
from colossal_nb.parallel.tensor.apply import cut_parameter
from colossal_nb.parallel.tensor.linear1d import Entrance, LinearCut
from colossal_nb.parallel.tensor.sums import sum_
from colossal_nb.parallel.tensor.values import TensorPlan, even_parts
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh


class Linear1D(nn.Linear):
    """nn.Linear over the ranks of one mesh axis, with the weights that nn.Linear would draw.

    `kind`: "column" cuts the output features, "row" the input features. With `whole` the layer takes and returns
    whole tensors, (..., in_features) -> (..., out_features), on every rank; without it a column returns its own
    features and a row takes them, so that a column and the row behind it need nothing in between. `mesh`: tp over all
    ranks where none is given. Raises ValueError for another kind, or for more ranks than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        kind: str = "column",
        whole: bool = True,
        mesh: Mesh | None = None,
        axis: str = "tp",
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **options)
        if kind not in ("column", "row"):
            raise ValueError(f"kind={kind!r} is none of 'column', 'row'")
        world = World.current()
        mesh = Mesh({axis: world.world_size}) if mesh is None else mesh
        size = out_features if kind == "column" else in_features
        plan, index = TensorPlan(mesh, axis), mesh.coordinate(world.rank)[axis]
        if size < plan.ranks:
            raise ValueError(f"{size} features cannot be dealt to {axis}={plan.ranks} ranks: {axis}={size} or less")
        parts = even_parts(size, plan.ranks)
        self.kind, self.whole = kind, whole
        self.cut = LinearCut(mesh, axis, index, parts, "", Entrance(mesh, axis, "", 1))
        self.sizes = [len(part) for part in parts]
        if plan.ranks > 1:
            cut_parameter(self.weight, 0 if kind == "column" else 1, parts, plan, index)
            cut_parameter(self.bias if kind == "column" else None, 0, parts, plan, index)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """See the class for the shapes. Column: all-reduce backward; row: all-reduce forward."""
        mesh, axis, entrance = self.cut.mesh, self.cut.axis, self.cut.entrance
        if self.kind == "column":
            assert entrance is not None
            local = F.linear(entrance(input), self.weight, self.bias)
            return gather_from(local, mesh, axis, dim=-1, sizes=self.sizes) if self.whole else local
        local = split_to(input, mesh, axis, dim=-1, sizes=self.sizes) if self.whole else input
        summed = sum_(F.linear(local, self.weight), mesh, axis, self.cut.name)
        return summed if self.bias is None else summed.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind} {self.cut}"
