"""The user's optimizer goes on working on shards: which ones can, and how existing state is cut like its parameter."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from colossal_nb.parallel import hyperparameters
from colossal_nb.parallel.handle import holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part
from colossal_nb.plan import Mesh, Strategy

# Optimizers whose update of one element needs that element's history alone: a shard's update is a part of the whole's.
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip
_REASONS = {
    "LBFGS": "searches along a direction made of all parameters at once",
    "Adafactor": "keeps row and column sums of each whole matrix",
    "Muon": "makes each whole matrix orthogonal",
}
_BY_TENSOR = ("Adafactor", "Muon")
_STEPPED: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = weakref.WeakKeyDictionary()


def as_list(optimizer: Any) -> list[torch.optim.Optimizer]:
    """None, one optimizer or several, as a list."""
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def check(optimizer: Any, model: nn.Module, mesh: Mesh | None = None) -> None:
    """Raise ValueError where an optimizer, or one of a list, does not belong to the model or could not work on a mesh.

    Beside the model's parameters it may hold others, of the loss; of several one may hold those alone.
    """
    given: list[Any] = as_list(optimizer)
    for each in given:
        if not isinstance(each, torch.optim.Optimizer):
            hint = ""
            if isinstance(each, type):
                hint = f": the class, so make one, {each.__name__}(model.parameters(), ...)"
            elif isinstance(each, str | Strategy):
                hint = f': a strategy goes by name, strategy="{each}"'
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(each).__name__}{hint}")
    own = {id(p) for p in model.parameters()}
    outside = [[p for group in each.param_groups for p in group["params"] if id(p) not in own] for each in given]
    if given and all(len(others) == _count(each) for each, others in zip(given, outside, strict=True)):
        raise ValueError(
            f"the optimizer holds none of the model's parameters ({len(outside[0])} others): was it made for an "
            f"earlier model? make it anew: torch.optim.{type(given[0]).__name__}(model.parameters(), ...); one of the "
            "loss's parameters alone is given with the model's, in a list"
        )
    shared = [p for others in outside for p in others if layout_of(p) is not None]
    if shared:
        raise ValueError(
            f"the optimizer holds {len(shared)} parameters of another parallel model: give each parallel model an "
            "optimizer of its own"
        )
    if mesh is not None:
        for each in given:
            require_able(each, mesh)


def _count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def require_able(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Raise ValueError for an optimizer that cannot update parts of a model, where a mesh makes parts.

    Under dp alone every rank has whole weights and whole gradients, so that any is right; without tp every tensor is
    whole. A class of the user's says that it updates every element by itself with `elementwise = True`.
    """
    kind = type(optimizer)
    if kind.__name__ == "SparseAdam" and mesh.size > 1:
        raise ValueError("SparseAdam takes sparse gradients, which are not summed over ranks here: take Adam")
    if mesh.size == mesh.axis_size("dp"):
        return
    known = [getattr(torch.optim, name) for name in ELEMENTWISE if hasattr(torch.optim, name)]
    if any(issubclass(kind, each) and kind.step is each.step for each in known) or getattr(kind, "elementwise", False):
        return
    by_tensor = kind in [getattr(torch.optim, name, None) for name in _BY_TENSOR]
    if by_tensor and mesh.size == mesh.axis_size("dp") * mesh.axis_size("pp"):
        return
    why, hint = _REASONS.get(kind.__name__), ""
    if why is None:
        why = "is not known to update every element by itself, as a part of a model needs"
        hint = f". If it does (no norm of a tensor, no sum over several), say so: {kind.__name__}.elementwise = True"
    raise ValueError(
        f"{kind.__name__} {why}, so it cannot run under tp{'' if by_tensor else ' or pp'}: take "
        f"{', '.join(ELEMENTWISE)}, or dp alone{hint}"
    )


@functools.cache
def watch() -> None:
    """From now on also an optimizer that nobody gave to parallelize is asked whether it is able, as it steps."""
    register_optimizer_step_pre_hook(_require_able_now)


def _require_able_now(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    held = (p for group in optimizer.param_groups for p in group["params"])
    first = next((p for p in held if layout_of(p) is not None), None)
    if first is not None and (layout := layout_of(first)) is not None:
        require_able(optimizer, layout.mesh)
        _STEPPED[optimizer] = None
        hyperparameters.stepped(optimizer, first)


def stepped() -> list[torch.optim.Optimizer]:
    """Those alive that have stepped and hold parallel parameters, in the order of their first steps."""
    return list(_STEPPED)


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
