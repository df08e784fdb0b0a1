"""The user's optimizer goes on working on shards: which ones can, and how existing state is cut like its parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel.handle import holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part
from colossal_nb.plan import Strategy

# Optimizers whose update of one element needs that element's history alone: a shard's update is a part of the whole's.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
_REASONS = {
    "LBFGS": "searches along a direction made of all parameters at once",
    "Adafactor": "keeps row and column sums of each whole matrix",
    "Muon": "makes each whole matrix orthogonal",
    "SparseAdam": "takes sparse gradients, which are not summed over ranks here",
}


def check(optimizer: Any, model: nn.Module, cut: bool) -> None:
    """Raise ValueError where the optimizer does not belong to the model or (`cut`) could not update shards."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        hint = ""
        if isinstance(optimizer, type):
            hint = f": the class, so make one, {optimizer.__name__}(model.parameters(), ...)"
        elif isinstance(optimizer, str | Strategy):
            hint = f': a strategy goes by name, strategy="{optimizer}"'
        elif isinstance(optimizer, list | tuple):
            hint = ": one at a time, cnb.parallelize(model, first), then cnb.parallelize(model, second)"
        raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}{hint}")
    own = {id(p) for p in model.parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in own for p in given)
    if foreign == len(given):
        raise ValueError(
            f"the optimizer holds none of the model's parameters ({len(given)} others): was it made for an earlier "
            f"model? make it anew: torch.optim.{type(optimizer).__name__}(model.parameters(), ...)"
        )
    if foreign:
        raise ValueError(
            f"the optimizer holds {foreign} tensors that are no parameters of the model: give each parallel model an "
            "optimizer of its own"
        )
    if cut:
        _require_elementwise(optimizer)


def _require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    known = [getattr(torch.optim, name) for name in ELEMENTWISE if hasattr(torch.optim, name)]
    if any(issubclass(kind, each) and kind.step is each.step for each in known):
        return
    why = _REASONS.get(kind.__name__, "is not known to update every element by itself, as a shard of a tensor needs")
    raise ValueError(f"{kind.__name__} {why}, so it cannot run on parts of tensors: take {', '.join(ELEMENTWISE)}")


def shapes(optimizer: torch.optim.Optimizer | None) -> dict[int, torch.Size]:
    """The shape of each parameter with state, before the model is cut."""
    return {} if optimizer is None else {id(p): p.shape for p in optimizer.state if isinstance(p, Tensor)}


def whole_shapes(parameters: Iterable[nn.Parameter]) -> dict[int, torch.Size]:
    """The shape of each parameter in the whole model, which has been cut already."""
    layouts = ((p, layout_of(p)) for p in parameters)
    return {id(p): torch.Size(p.shape if layout is None else layout.global_shape) for p, layout in layouts}


def cut_state(optimizer: torch.optim.Optimizer, before: dict[int, torch.Size], rank: int) -> None:
    """Cut every state tensor that had its parameter's shape; drop the state of parameters that lie elsewhere."""
    for p in [p for p in optimizer.state if isinstance(p, Tensor)]:
        layout = layout_of(p)
        if layout is None:
            continue
        if not holds(p, rank):
            del optimizer.state[p]
            continue
        entry = optimizer.state[p]
        for key, value in list(entry.items()):
            if isinstance(value, Tensor) and value.dim() and value.shape == before[id(p)] != p.shape:
                entry[key] = local_part(value, layout, rank)


def tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[Tensor, str]]:
    """Every state tensor with a name for the record."""
    return [
        (value, key)
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    ]
