"""Whether a checkpoint fits a model and its optimizers, told before anything is touched."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.saving.contents import Contents

_MOST = 6  # names in one reason


def resolved(content: dict[str, Any], name: str) -> str:
    """The name under which a tensor lies in the checkpoint: tied weights lie there once."""
    found: str = content["aliases"].get(name, name)
    return found


def check_fits(content: dict[str, Any], everything: Contents) -> None:
    """Raises one ValueError with every reason why this checkpoint is not of this model and these optimizers."""
    wrong = [*_names(content, everything), *_optimizers(content, everything)]
    if wrong:
        kind = type(everything.model).__name__
        raise ValueError("\n".join([f"the checkpoint does not fit this {kind}:", *(f"  - {each}" for each in wrong)]))


def _names(content: dict[str, Any], everything: Contents) -> list[str]:
    stored = {*content["names"], *content["aliases"]}
    own = everything.names
    wrong = []
    if own - stored:
        wrong.append(f"missing in the checkpoint: {_listed(own - stored)}")
    if stored - own:
        wrong.append(f"unexpected in the checkpoint: {_listed(stored - own)}")
    for name, tensor in everything.tensors.items():
        if name in stored:
            found = content["tensors"][f"model.{resolved(content, name)}"]["shape"]
            if found != _shape(tensor):
                wrong.append(f"{name} is {found} in the checkpoint and {_shape(tensor)} in the model")
    for alias, name in everything.aliases.items():
        if {alias, name} <= stored and resolved(content, alias) != resolved(content, name):
            wrong.append(f"{alias} and {name} are one weight in the model and two in the checkpoint")
    return wrong


def _shape(tensor: Tensor) -> list[int]:
    layout = layout_of(tensor)
    return list(tensor.shape if layout is None else layout.global_shape)


def _optimizers(content: dict[str, Any], everything: Contents) -> list[str]:
    saved, own = content["optimizers"], everything.optimizers
    if not own:
        return []
    if len(own) != len(saved):
        return [f"it was saved with {len(saved)} optimizers, and load got {len(own)}"]
    wrong = []
    for there, optimizer in zip(saved, own, strict=True):
        kind = type(optimizer).__name__
        if there["kind"] != kind:
            wrong.append(f"the optimizer is a {there['kind']} in the checkpoint and a {kind} here")
            continue
        groups = [[everything.name_of()[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        wrong += _groups(content, kind, [group["parameters"] for group in there["groups"]], groups)
    for name, p in everything.outside.items():
        stored = content["tensors"].get(f"model.{name}")
        if stored is not None and stored["shape"] != _shape(p):
            wrong.append(f"{name} is {stored['shape']} in the checkpoint and {_shape(p)} in the optimizer")
    return wrong


def _groups(content: dict[str, Any], kind: str, saved: list[list[str]], own: list[list[str]]) -> list[str]:
    if len(saved) != len(own):
        return [f"{kind} has {len(saved)} param groups in the checkpoint and {len(own)} here"]
    wrong = []
    for number, (there, names) in enumerate(zip(saved, own, strict=True)):
        mine = [resolved(content, name) for name in names]
        if set(mine) != set(there) or len(mine) != len(there):
            odd = {*mine} ^ {*there}
            wrong.append(
                f"param group {number} of {kind} has {len(there)} parameters in the checkpoint and {len(mine)} here"
                + (f"; not in both: {_listed(odd)}" if odd else "")
            )
    return wrong


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_MOST]) + (f" and {len(shown) - _MOST} more" if len(shown) > _MOST else "")
