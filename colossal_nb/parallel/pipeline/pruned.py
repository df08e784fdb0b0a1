"""Pruning: a stage keeps the parameters that it needs; of the others only name, shape and identity remain."""

from __future__ import annotations

from torch import nn

from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.pipeline.split import Split, absent_like
from colossal_nb.plan.layout import Layout, On, Placement, Replicate
from colossal_nb.plan.mesh import Mesh


def lay_out(model: nn.Module, split: Split, mesh: Mesh) -> None:
    """Write on every parameter on which stages it lives. What other axes do with it stays as it is."""
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        if layout is None:
            layout = Layout.of(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), mesh)
        placements = list(layout.placements)
        placements[mesh.axes.index("pp")] = placement(split, name)
        set_layout(parameter, Layout(layout.global_shape, layout.dtype, layout.mesh, tuple(placements)))


def placement(split: Split, name: str) -> Placement:
    """Where a parameter lives along pp."""
    first, *others = split.holders[name]
    return Replicate() if 1 + len(others) == split.stages else On(first, tuple(others))


def prune(model: nn.Module, split: Split, stage: int) -> None:
    """Replace the values of what a stage does not hold by NaN, one element of memory each. Objects stay the same."""
    for name, parameter in model.named_parameters():
        if stage not in split.holders[name]:
            parameter.data = absent_like(parameter)
            parameter.grad = None
