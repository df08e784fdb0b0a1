"""Changes the model in place as the plan says: each parameter keeps its identity and gets its part and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from colossal_nb.parallel.absent import absent
from colossal_nb.parallel.collectives import group_of
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.parameter_hooks import register_first
from colossal_nb.parallel.tensor.embedding1d import Embedding1D, RowRange
from colossal_nb.parallel.tensor.linear1d import (
    ColumnLinear1D,
    Entrance,
    LinearCut,
    NarrowColumnLinear1D,
    RowLinear1D,
    narrow_input,
)
from colossal_nb.parallel.tensor.values import Pair, Parts, Report, TensorPlan, VocabularyShard
from colossal_nb.parallel.tensor.vocabulary import HeadLinear1D
from colossal_nb.parallel.world import World
from colossal_nb.plan.layout import Layout, Shard

Module = TypeVar("Module", bound=nn.Module)


def apply(model: nn.Module, plan: TensorPlan) -> Report:
    """Shards `model` in place; `plan` was made of the same model before any pass changed it.

    Parameters that a pipeline pass left on other stages get their layout and a placeholder of the local shape.
    """
    if plan.ranks > 1:
        index = plan.mesh.coordinate(World.current().rank)[plan.axis]
        for pair in plan.pairs:
            _apply_pair(model, plan, pair, index)
        for shard in plan.vocabulary:
            _apply_vocabulary(model, plan, shard, index)
        parameters = dict(model.named_parameters())
        for name in plan.partial:
            _sum_gradients(parameters[name], plan, index, name)
    return Report(plan)


def _apply_pair(model: nn.Module, plan: TensorPlan, pair: Pair, index: int) -> None:
    parts_of = dict(pair.columns)
    for readers in pair.entrances:
        entrance = Entrance(plan.mesh, plan.axis, readers[0], len(readers))
        for name in readers:
            column = cast("nn.Linear", model.get_submodule(name))
            for parameter in (column.weight, column.bias):
                cut_parameter(parameter, 0, parts_of[name], plan, index)
            twin = _become(column, NarrowColumnLinear1D if pair.narrow else ColumnLinear1D)
            twin.cut = LinearCut(plan.mesh, plan.axis, index, parts_of[name], name, entrance)
    row = cast("nn.Linear", model.get_submodule(pair.row))
    cut_parameter(row.weight, 1, pair.row_parts, plan, index)
    _become(row, RowLinear1D).cut = LinearCut(plan.mesh, plan.axis, index, pair.row_parts, pair.row)
    layer = model.get_submodule(pair.row.rpartition(".")[0])
    if isinstance(layer, nn.TransformerEncoderLayer):
        layer.activation_relu_or_gelu = 0  # its fused kernel, which would take the parts for whole weights, is closed
    for change in pair.changes:
        setattr(model.get_submodule(change.module), change.attribute, change.local)
    if pair.narrow:
        model.get_submodule(pair.region).register_forward_pre_hook(_Narrow(plan.ranks))


class _Narrow:
    """A pre-hook: shows a region its first argument in one rank's width."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (narrow_input(args[0], args[0].shape[-1] // self.ranks), *args[1:])


def _apply_vocabulary(model: nn.Module, plan: TensorPlan, shard: VocabularyShard, index: int) -> None:
    bounds = tuple((part[0], len(part)) for part in shard.parts)
    weights: dict[int, Tensor] = {}
    for name in (*shard.embeddings, *shard.heads):
        module = model.get_submodule(name)
        weights |= {id(p): p for p in (module.weight, module._parameters.get("bias")) if isinstance(p, Tensor)}
    for parameter in weights.values():
        cut_parameter(parameter, 0, shard.parts, plan, index)
    for name in shard.embeddings:
        _become(model.get_submodule(name), Embedding1D).rows = RowRange(plan.mesh, plan.axis, index, bounds, name)
    for name in shard.heads:
        head = _become(model.get_submodule(name), HeadLinear1D)
        head.rows = RowRange(plan.mesh, plan.axis, index, bounds, name)
        head.entrance = Entrance(plan.mesh, plan.axis, name, 1)


def _become(module: nn.Module, twin: type[Module]) -> Module:
    """The same object with the twin's forward; it stays an instance of its own class."""
    module.__class__ = _twin_class(cast("Any", twin), cast("Any", type(module)))
    return cast("Module", module)


@cache
def _twin_class(twin: type[Any], own: type[Any]) -> type[nn.Module]:
    return twin if issubclass(twin, own) else type(twin.__name__, (twin, own), {})


def cut_parameter(parameter: Tensor | None, dim: int, parts: Parts, plan: TensorPlan, index: int) -> None:
    """Puts one rank's part under the same Parameter (its gradient too), and says so in its layout.

    Where every rank holds all of it (the keys of multi-query attention) it stays as it is.
    """
    if parameter is None or all(len(part) == parameter.shape[dim] for part in parts):
        return
    layout = layout_of(parameter)
    if layout is None:
        layout = Layout.of(parameter.shape, str(parameter.dtype).removeprefix("torch."), plan.mesh)
    placements = list(layout.placements)
    placements[plan.mesh.axes.index(plan.axis)] = Shard(dim, parts)
    layout = Layout(layout.global_shape, layout.dtype, plan.mesh, tuple(placements))
    set_layout(parameter, layout)
    with torch.no_grad():
        if layout.slices(World.current().rank) is None:
            shape = list(layout.global_shape)
            shape[dim] = len(parts[index])
            parameter.data = absent(tuple(shape), parameter.dtype, parameter.device)
            return
        gradient, parameter.grad = parameter.grad, None
        parameter.data = take(parameter.data, dim, parts[index])
        if gradient is not None:
            parameter.grad = take(gradient, dim, parts[index])


def take(tensor: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    """A contiguous copy of some indices of one dim."""
    first, count = (indices[0], len(indices)) if len(indices) else (0, 0)
    if count and indices[-1] - first == count - 1:
        return tensor.narrow(dim, first, count).clone(memory_format=torch.contiguous_format)
    return tensor.index_select(dim, torch.tensor(indices, dtype=torch.int64, device=tensor.device))


def _sum_gradients(parameter: Tensor, plan: TensorPlan, index: int, name: str) -> None:
    """Every backward adds the sum over the axis to `.grad`: this rank's own gradient is an addend of it."""
    layout = layout_of(parameter)
    placement = layout.placement(plan.axis) if layout is not None else None

    def summed(gradient: Tensor) -> Tensor:
        group = group_of(plan.mesh, plan.axis)
        if not isinstance(placement, Shard):
            whole = gradient.clone(memory_format=torch.contiguous_format)
            group.run("all_reduce", [whole], of=name)
            return whole
        assert layout is not None
        assert placement.parts is not None
        mine = torch.tensor(placement.parts[index], dtype=torch.int64, device=gradient.device)
        shape = list(gradient.shape)
        shape[placement.dim] = layout.global_shape[placement.dim]
        whole = gradient.new_zeros(shape).index_copy_(placement.dim, mine, gradient)
        group.run("all_reduce", [whole], of=name)
        return whole.index_select(placement.dim, mine)

    if parameter.requires_grad:
        register_first(parameter, summed)
