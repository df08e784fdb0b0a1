"""Pruning: a stage keeps the parameters that it needs; of the others only name, shape and identity remain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from colossal_nb.parallel.absent import absent_like
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.pipeline.split import Split
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
    """Replace the values of what a stage does not hold by NaN that costs next to no memory. Objects stay the same."""
    for name, parameter in model.named_parameters():
        if stage not in split.holders[name]:
            parameter.data = absent_like(parameter)
            parameter.grad = None


@contextmanager
def pruned(model: nn.Module, split: Split, stage: int) -> Iterator[None]:
    """Inside, the model is as `prune` leaves it on that stage. Every Parameter stays the object that it is: whoever
    keeps a reference to one, in a list or elsewhere, sees what the stage sees."""
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        prune(model, split, stage)
        yield
    finally:
        for parameter, value in values:
            parameter.data = value


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Inside, parameters have no `.grad` and no hooks (of the user, of the ledger); afterwards those from before."""
    before = [(p, p.grad, p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    try:
        for p, _, _, on_accumulated in before:
            p.grad = p._backward_hooks = None
            if on_accumulated is not None:
                p._post_accumulate_grad_hooks = OrderedDict()  # torch goes on calling the old ones after None
        yield
    finally:
        for p, gradient, on_backward, on_accumulated in before:
            p.grad, p._backward_hooks = gradient, on_backward
            if on_accumulated is not None:
                p._post_accumulate_grad_hooks = on_accumulated


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, for the parameters that have one; they have none afterwards."""
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken
