"""Pruning: a stage keeps the parameters that it needs; of the others only name, shape and identity remain."""

from __future__ import annotations

from torch import Tensor, nn

from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.pipeline.split import Split, absent_like
from colossal_nb.plan.layout import Layout, On, Placement, Replicate
from colossal_nb.plan.mesh import Mesh


def lay_out(model: nn.Module, split: Split, mesh: Mesh) -> None:
    """Write on parameters, and on buffers of units, where they live. What other axes do with them stays as it is."""
    for name, parameter in model.named_parameters():
        _place(parameter, mesh, placement(split, name))
    for name, buffer in model.named_buffers():
        if name in split.buffers:
            _place(buffer, mesh, On(split.buffers[name]))


def _place(tensor: Tensor, mesh: Mesh, along_pp: Placement) -> None:
    layout = layout_of(tensor)
    if layout is None:
        layout = Layout.of(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), mesh)
    placements = list(layout.placements)
    placements[mesh.axes.index("pp")] = along_pp
    set_layout(tensor, Layout(layout.global_shape, layout.dtype, layout.mesh, tuple(placements)))


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
