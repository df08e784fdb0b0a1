"""What a checkpoint holds goes into a model and its optimizers, one tensor at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import memory
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.saving.contents import Contents, here
from colossal_nb.parallel.saving.fitting import resolved
from colossal_nb.parallel.saving.shards import Reader
from colossal_nb.parallel.saving.values import decode


def fill(everything: Contents, content: dict[str, Any], reader: Reader, rank: int) -> Any:
    """Read into the model and the optimizers; returns the decoded extra."""
    extra = decode(content["extra"], reader.whole)
    for name, p in everything.parameters.items():
        layout, is_here = here(p)
        if is_here:
            reader.into(p, f"model.{resolved(content, name)}", layout, rank)
    for name, buffer in everything.buffers.items():
        reader.into(buffer, f"model.{resolved(content, name)}", None, rank)  # every rank has all of it
    for name, tensor in everything.outside.items():
        reader.into(tensor, f"model.{name}", None, rank)
    for optimizer, saved in zip(everything.optimizers, content["optimizers"], strict=False):
        _fill_optimizer(optimizer, everything, saved, content, reader, rank)
    return extra


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    everything: Contents,
    saved: dict[str, Any],
    content: dict[str, Any],
    reader: Reader,
    rank: int,
) -> None:
    name_of = everything.name_of()
    for own, group in zip(optimizer.param_groups, saved["groups"], strict=True):
        parameters = own["params"]
        own.clear()
        own.update({"params": parameters, **decode(group["values"], reader.whole)})
    optimizer.state.clear()
    for p in [p for own in optimizer.param_groups for p in own["params"]]:
        name = resolved(content, name_of[id(p)])
        if name in saved["states"] and here(p)[1]:
            optimizer.state[p] = {
                key: _state(value, p, reader, rank, f"model.{name}") for key, value in saved["states"][name].items()
            }


def _state(value: Any, p: Tensor, reader: Reader, rank: int, weights: str) -> Any:
    """One value of a parameter's state; a tensor that is as large as the whole parameter lies as this does."""
    layout = layout_of(p)
    shape = tuple(p.shape) if layout is None else layout.global_shape
    name = value.get("~tensor") if isinstance(value, dict) else None
    stored = None if name is None else reader.index.tensors[name]
    if name is None or stored is None or tuple(stored.size) != shape:
        return decode(value, reader.whole)
    kind = stored.properties.dtype
    if kind == reader.index.tensors[weights].properties.dtype:
        kind = p.dtype  # as the weights, which may be loaded in another precision
    target = torch.empty(p.shape, dtype=kind, device=p.device)
    reader.into(target, name, layout, rank)
    return target


def go_on(parallel: Parallel, position: dict[str, Any] | None) -> None:
    """Stand where the saved run stood."""
    if position is not None:
        parallel.calls, parallel.step, parallel.calls_in_step = position["calls"], position["step"], 0
        if parallel.dropout is not None and position["seed"] is not None:
            parallel.dropout.seed = position["seed"]
        parallel.precision.go_on(position.get("scale"))
    memory.watch(parallel)
