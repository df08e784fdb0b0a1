"""What a model and its optimizers are made of, by names that no strategy changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import optimizers as rules
from colossal_nb.parallel.handle import Parallel, find, holds, require_cell
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.tree import require_known
from colossal_nb.parallel.world import World
from colossal_nb.plan import Layout, On

Optimizers = list[torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class Contents:
    """`parameters`, `buffers` (those of the state_dict): each tensor once, under its first name. `aliases`: the other
    names of tied ones. `outside`: what the optimizers hold besides, numbered in their order."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    aliases: dict[str, str]
    optimizers: Optimizers
    outside: dict[str, Tensor]

    @property
    def parallel(self) -> Parallel | None:
        return find(self.model)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.parameters, **self.buffers}

    @property
    def names(self) -> set[str]:
        """All names of the model's state_dict."""
        return {*self.parameters, *self.buffers, *self.aliases}

    def name_of(self) -> dict[int, str]:
        """What optimizers hold, by identity."""
        return {id(p): name for name, p in (*self.parameters.items(), *self.outside.items())}


def contents(model: nn.Module, optimizer: Any) -> Contents:
    """Raises ValueError on what is no model, on optimizers of another model, on state that has no tensors."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the second argument is the model, a torch.nn.Module, not {type(model).__name__}")
    parallel = find(model)
    if parallel is not None:
        require_cell(parallel)
        require_known(parallel)
    given = rules.as_list(optimizer)
    rules.check(given, model)
    found: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    buffers: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in _entries(model):
        if id(tensor) in found:
            aliases[name] = found[id(tensor)]
        elif isinstance(tensor, nn.Parameter):
            parameters[name] = tensor
        else:
            buffers[name] = tensor
        found.setdefault(id(tensor), name)
    outside = [p for each in given for group in each.param_groups for p in group["params"] if id(p) not in found]
    others = {f"outside of the model {number}": p for number, p in enumerate({id(p): p for p in outside}.values())}
    return Contents(model, parameters, buffers, aliases, given, others)


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"{prefix or type(module).__name__} has extra state that is no tensor (get_extra_state): give it by a "
                "name of its own, save(path, model, my_state=module.get_extra_state())"
            )
        for key, p in module._parameters.items():
            if p is not None:
                yield dot + key, p
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield dot + key, buffer


def here(tensor: Tensor) -> tuple[Layout | None, bool]:
    """The layout of a tensor and whether this rank holds some of it."""
    return layout_of(tensor), holds(tensor, World.current().rank)


def owner(layout: Layout) -> int:
    """The first rank that holds something of a tensor."""
    coordinates = {
        axis: placement.coordinate
        for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True)
        if isinstance(placement, On)
    }
    return layout.mesh.rank(coordinates)


def is_part(value: Any, p: Tensor) -> bool:
    """Whether a value of an optimizer's state lies as its parameter does, element by element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == p.shape
