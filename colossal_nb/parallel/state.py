"""Whole tensors out of a parallel model, and whole tensors into it: full, full_grad, state_dict, load_state_dict."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import trouble
from colossal_nb.parallel.handle import Parallel, find, group_along, holds, require_whole
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan import Layout, On, Shard
from colossal_nb.validation import called_as


@called_as("cnb.full(model.head.weight)")
def full(p: Tensor) -> Tensor:
    """The whole parameter on every rank, detached, in host or device memory of its own. Collective."""
    _check_tensor("full", p)
    _require_owner(p)
    return _full(p)


def _full(p: Tensor) -> Tensor:
    layout = layout_of(p)
    return p.detach().clone() if layout is None else gathered(p.detach(), layout)


@called_as("cnb.full_grad(model.head.weight)")
def full_grad(p: Tensor) -> Tensor | None:
    """The whole gradient of a parameter on every rank; None if it has none anywhere. Collective."""
    _check_tensor("full_grad", p)
    layout = layout_of(p)
    if layout is None:
        return None if p.grad is None else p.grad.clone()
    _require_owner(p)
    group = group_along(layout.mesh, layout.mesh.axes)
    present = torch.tensor([float(p.grad is not None)])
    group.run("all_reduce", [present], of="gradient")
    if not present:
        return None
    return gathered(p.grad if p.grad is not None else torch.zeros_like(p), layout)


def _require(parallel: Parallel) -> None:
    """Raise ValueError for a model that lost a part, and for torn weights."""
    require_whole(parallel)
    trouble.look(parallel)


def _require_owner(p: Tensor) -> None:
    """The same for the model of a parameter."""
    for parallel in World.current().parallels:
        if any(p is each for each in parallel.parameters.values()):
            _require(parallel)


def _check_tensor(name: str, p: Any) -> None:
    if not isinstance(p, Tensor):
        hint = ": model.state_dict() has all of them whole" if isinstance(p, nn.Module) else ""
        raise ValueError(f"{name} takes one parameter, such as model.head.weight, not {type(p).__name__}{hint}")


def gathered(part: Tensor, layout: Layout) -> Tensor:
    """The whole tensor on every rank of its mesh, from each rank's part (ignored where a rank holds none)."""
    world = World.current()
    held = layout.slices(world.rank) is not None
    whole = joined(part, layout, of="full") if held else part.new_empty(layout.global_shape)
    for axis in layout.mesh.axes:
        placement = layout.placement(axis)
        if isinstance(placement, On):
            world.group(layout.mesh, axis).run("broadcast", [whole], root=placement.coordinate, of="full")
    return whole


def joined(part: Tensor, layout: Layout, of: str) -> Tensor:
    """The whole tensor on the ranks that hold parts of it, in memory of its own. Collective among these."""
    rank = World.current().rank
    whole = part.new_empty(layout.global_shape)
    axes = tuple(axis for axis in layout.mesh.axes if isinstance(layout.placement(axis), Shard))
    if not axes:
        put(whole, layout, rank, part)
        return whole
    group = group_along(layout.mesh, axes)
    parts = [part.new_empty(prod(layout.local_shape(each) or (0,))) for each in group.ranks]
    group.run("all_gather", [*parts, part.contiguous().reshape(-1)], of=of)
    for each, piece in zip(group.ranks, parts, strict=True):
        put(whole, layout, each, piece)
    return whole


def put(whole: Tensor, layout: Layout, rank: int, part: Tensor) -> None:
    """Write a rank's part, of any shape with as many elements, to its place in the whole tensor."""
    local = layout.local_shape(rank)
    assert local is not None, f"rank {rank} holds nothing of {layout}"
    if prod(local):
        whole[_places(layout, rank, whole.device)] = part.reshape(local)


def local_part(whole: Tensor, layout: Layout, rank: int) -> Tensor | None:
    """What a rank holds of a whole tensor, in memory of its own; None if nothing."""
    if layout.slices(rank) is None:
        return None
    return whole[_places(layout, rank, whole.device)].clone(memory_format=torch.contiguous_format)


def _places(layout: Layout, rank: int, device: torch.device) -> tuple[Any, ...]:
    """An index expression: slices, and open grids of numbers as soon as one dim is not a run."""
    slices = layout.slices(rank)
    assert slices is not None
    if all(isinstance(held, range) and held.step == 1 for held in slices):
        return tuple(slice(held[0], held[-1] + 1) if held else slice(0, 0) for held in slices)
    grids = []
    for dim, held in enumerate(slices):
        shape = [1] * len(slices)
        shape[dim] = -1
        grids.append(torch.tensor(list(held), dtype=torch.int64, device=device).view(shape))
    return tuple(grids)


def hook_state_dicts(model: nn.Module) -> None:
    """Make `model.state_dict()` whole (and collective), and let `load_state_dict` take whole tensors."""
    model.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


def _save(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    done: dict[int, Tensor] = {}
    parallel = find(model)
    if parallel is not None:
        _require(parallel)
    for name, tensor in _entries(model):
        key = prefix + name
        if key in state and layout_of(tensor) is not None:
            if id(tensor) not in done:
                done[id(tensor)] = _full(tensor)
            state[key] = done[id(tensor)]


def _load(model: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would replace parameters that parallelize knows: leave assign out, and the "
            "weights go into them; or load before parallelize"
        )
    rank = World.current().rank
    for name, tensor in _entries(model):
        layout, value = layout_of(tensor), state.get(prefix + name)
        if layout is None or not isinstance(value, Tensor) or tuple(value.shape) != layout.global_shape:
            continue
        if holds(tensor, rank):
            state[prefix + name] = local_part(value, layout, rank)
        elif isinstance(tensor, nn.Parameter):  # of another stage's buffers every rank has all
            state[prefix + name] = tensor.detach()


def show_layouts() -> None:
    """From now on the text of a distributed parameter ends with what this rank holds of it."""
    if nn.Parameter.__repr__ is not _text:
        nn.Parameter.__repr__ = _text  # type: ignore[assignment]


_PLAIN_TEXT: Callable[[Tensor], str] = nn.Parameter.__repr__


def _text(p: nn.Parameter) -> str:
    layout, text = layout_of(p), _PLAIN_TEXT(p)
    if layout is None or layout.mesh.size == 1:
        return text
    rank = World.current().rank
    part = list(p.shape) if holds(p, rank) else "nothing"
    return f"{text}\nrank {rank} holds {part} of {layout}"


def _entries(model: nn.Module) -> list[tuple[str, Tensor]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, tensor) for name, tensor in named]
