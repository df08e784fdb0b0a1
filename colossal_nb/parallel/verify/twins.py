"""The two programs that are compared, both on copies: the user's model, optimizers and gradients are not touched."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import objects, plain
from colossal_nb.parallel.handle import NAME, UNSPLIT, Parallel, find
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.outcome import alike
from colossal_nb.parallel.saving.contents import is_part, owner
from colossal_nb.parallel.state import gathered

Optimizers = list[torch.optim.Optimizer]
States = dict[str, dict[str, Any]]
CALM_SCALE = 2.0**8
WAITS = 0  # index in the group of the rank that runs the sequential program while the others wait


@dataclass
class Twin:
    """A program of its own, with what `parallelize` knows of its model; the sequential one's model itself carries
    nothing of it. `outside`: what it trains outside the model, which is the user's own, lent to it."""

    parallel: Parallel
    optimizers: Optimizers
    outside: dict[str, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return self.parallel.model

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {**self.parallel.parameters, **self.outside}

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def parallel_twin(parallel: Parallel) -> Twin:
    """A copy of the parallel program. Collective; raises ValueError on all ranks where a model cannot be copied."""
    model = alike(lambda: _copied(parallel.model), parallel.group(), "verify")
    twin = find(model)
    assert twin is not None
    twin.accumulating, twin.calls_in_step = False, 0
    _calm(twin)
    optimizers = [_like(each, parallel, twin.parameters, _own_states(each, parallel)) for each in parallel.optimizers]
    twin.optimizers = list(optimizers)
    return Twin(twin, optimizers)


def _calm(twin: Parallel) -> None:
    """A loss scale at which nothing overflows: no step of the two programs is skipped."""
    if twin.precision.scale is not None:
        twin.precision.scale.value = min(twin.precision.scale.value, CALM_SCALE)


def _copied(model: nn.Module) -> nn.Module:
    memo: dict[Any, Any] = {UNSPLIT: True}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"verify works on a copy of the model, and copy.deepcopy fails on this {type(model).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def sequential_twin(parallel: Parallel) -> Twin | None:
    """The whole model without a word of ours, on the group's first rank; None on the others. Collective.

    Its weights are the parallel model's, its buffers those of their owners, its optimizers have the whole states.
    """
    here = parallel.group().index == WAITS
    model = _copied(parallel.model) if here else None
    twin = None if model is None else find(model)
    for name, p in parallel.parameters.items():
        whole = _whole(p.detach(), p)
        if twin is not None:
            twin.parameters[name].data = whole.cpu()
            set_layout(twin.parameters[name], None)
    for name, value in _buffers(parallel).items():
        if model is not None:
            buffer = model.get_buffer(name)
            buffer.data = value.cpu()
            set_layout(buffer, None)
    states = [_whole_states(each, parallel) for each in parallel.optimizers]
    if model is None or twin is None:
        return None
    _forget(twin)
    optimizers = [
        _like(each, parallel, twin.parameters, own) for each, own in zip(parallel.optimizers, states, strict=True)
    ]
    return Twin(twin, optimizers)


def _forget(twin: Parallel) -> None:
    """Take back what `parallelize` did to a model that is whole."""
    twin.changes.undo(twin.model)
    twin.changed()
    _calm(twin)
    if twin.dropout is not None:
        twin.dropout.sites, twin.dropout.features, twin.dropout.index = None, (), 0
    own = twin.model.__dict__
    with plain.removed(twin):
        kept = own.get("forward")
    own.pop("forward", None)
    own.pop(NAME, None)
    if kept is not None:
        own["forward"] = kept


def _whole(part: Tensor, p: Tensor) -> Tensor:
    layout = layout_of(p)
    return part.clone() if layout is None else gathered(part, layout)


def _buffers(parallel: Parallel) -> dict[str, Tensor]:
    """Buffers by name, as their owners have them. Collective."""
    found = {}
    group = parallel.group()
    for name, buffer in parallel.model.named_buffers():
        layout, value = layout_of(buffer), buffer.detach().clone()
        if layout is not None and group.size > 1:
            group.run("broadcast", [value], root=group.ranks.index(owner(layout)), of="verify")
        found[name] = value
    return found


def _whole_states(optimizer: torch.optim.Optimizer, parallel: Parallel) -> States:
    """By parameter and key, whole on every rank while it is put together; kept on the first rank alone. Collective."""
    group = parallel.group()
    own = {name: optimizer.state[p] for name, p in parallel.held().items() if p in optimizer.state}
    mine = {
        name: {key: value.dtype if is_part(value, parallel.parameters[name]) else value for key, value in state.items()}
        for name, state in own.items()
    }
    told: States = {}
    for other in objects.all_gather(mine, group, "verify"):
        told |= {name: state for name, state in other.items() if name not in told}
    for name, state in told.items():
        p = parallel.parameters[name]
        for key, value in state.items():
            if isinstance(value, torch.dtype):
                part = own[name][key] if name in own else torch.empty((), dtype=value, device=p.device)
                whole = _whole(part, p)
                state[key] = whole.cpu() if group.index == WAITS else None
            elif isinstance(value, Tensor):
                state[key] = value.clone()
    return told


def _own_states(optimizer: torch.optim.Optimizer, parallel: Parallel) -> States:
    """By parameter and key, as they are on this rank."""
    return {
        name: {key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
        for name, p in parallel.parameters.items()
        if p in optimizer.state
    }


def _like(
    optimizer: torch.optim.Optimizer, parallel: Parallel, parameters: dict[str, nn.Parameter], states: States
) -> torch.optim.Optimizer:
    """An optimizer of the same kind and settings for other parameters of the same names, without hooks of anybody.

    What it holds outside the model it goes on holding, with a copy of the state.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    for key in [key for key in twin.__dict__ if key.endswith("_hooks")]:
        twin.__dict__[key] = OrderedDict()
    twin.__dict__.pop("step", None)  # a learning rate scheduler counts the calls there
    other = {p: parameters[name] for name, p in parallel.parameters.items()}
    twin.param_groups = [
        {
            key: [other.get(p, p) for p in value] if key == "params" else copy.deepcopy(value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict, {parameters[name]: state for name, state in states.items()})
    twin.state |= {p: copy.deepcopy(state) for p, state in optimizer.state.items() if p not in other}
    return twin
