"""What a rank contributes to a checkpoint: the plain part of what it owns, and the tensors that it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.batch import checksum
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.saving import rng
from colossal_nb.parallel.saving.contents import Contents, here, is_part, owner
from colossal_nb.parallel.saving.shards import Piece
from colossal_nb.parallel.saving.values import encode
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.world import World


@dataclass
class Draft:
    """`plain` can be written by `json`."""

    plain: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


def draft_of(everything: Contents, extra: dict[str, Any], first: bool) -> Draft:
    """This rank's; `first`: whether it writes what all ranks have alike. Raises ValueError on what cannot be kept."""
    draft = Draft()
    for name, tensor in (*everything.tensors.items(), *everything.outside.items()):
        _add(draft, f"model.{name}", tensor, tensor, first)
    draft.plain = {
        "strategy": "" if everything.parallel is None else str(everything.parallel.strategy),
        "torch": str(torch.__version__),
        "names": {name: f"model.{name}" for name in everything.tensors},
        "aliases": everything.aliases,
        "optimizers": [_optimizer(draft, everything, number, first) for number in range(len(everything.optimizers))],
        "random": rng.states(),
        "position": _position(everything.parallel),
    }
    stored: list[Tensor] = []

    def keep(tensor: Tensor) -> str:
        stored.append(tensor)
        return f"extra.{len(stored) - 1}"

    draft.plain["extra"] = {name: encode(value, name, keep) for name, value in extra.items()}
    draft.plain["sums"] = {name: checksum(leaves(value)) for name, value in extra.items()}
    if first:
        draft.pieces += [Piece(f"extra.{number}", None, tensor) for number, tensor in enumerate(stored)]
    return draft


def _add(draft: Draft, name: str, p: Tensor, value: Tensor, first: bool) -> None:
    """A tensor that lies as `p` does."""
    layout, is_here = here(p)
    if layout is None:
        is_here = first
    draft.pieces.append(Piece(name, layout, value.detach() if is_here else None))


def _optimizer(draft: Draft, everything: Contents, number: int, first: bool) -> dict[str, Any]:
    optimizer, name_of = everything.optimizers[number], everything.name_of()
    kind = type(optimizer).__name__
    groups = []
    for each in optimizer.param_groups:
        values = {key: value for key, value in each.items() if key != "params"}
        plain = encode(values, f"{kind}.param_groups", _no_tensor)
        groups.append({"parameters": [name_of[id(p)] for p in each["params"]], "values": plain})
    states = {}
    for p in [p for p in optimizer.state if isinstance(p, Tensor)]:
        name = name_of[id(p)]
        layout, is_here = here(p)
        owns = first if layout is None else is_here and owner(layout) == World.current().rank
        state = {}
        for key, value in optimizer.state[p].items():
            stored = f"optimizer.{number}.{name}.{key}"
            if is_part(value, p):
                _add(draft, stored, p, value, first)
                state[key] = {"~tensor": stored}
            elif owns:
                state[key] = encode(value, f"{kind}'s {key} of {name}", _Whole(draft, stored))
        if owns:
            states[name] = state
    return {"kind": kind, "groups": groups, "states": states}


@dataclass
class _Whole:
    """Keeps tensors of a state that no rank has in parts: this rank writes them."""

    draft: Draft
    name: str
    count: int = 0

    def __call__(self, tensor: Tensor) -> str:
        name = f"{self.name}.{self.count}"
        self.count += 1
        self.draft.pieces.append(Piece(name, None, tensor))
        return name


def _no_tensor(tensor: Tensor) -> str:
    raise ValueError(
        f"a setting of an optimizer is a tensor {list(tensor.shape)}: settings are numbers or 0-dim tensors"
    )


def _position(parallel: Parallel | None) -> dict[str, Any] | None:
    """Where the run stands in the sequence of masks and steps."""
    if parallel is None:
        return None
    seed = None if parallel.dropout is None else parallel.dropout.seed
    scale = parallel.precision.position()
    return {"calls": parallel.calls, "step": parallel.step, "seed": seed, "scale": scale}


def check_alike(drafts: list[dict[str, Any]], group: Group) -> None:
    """Raises ValueError where the ranks give other names, or other tensors under a name."""
    for name in sorted({name for draft in drafts for name in draft["sums"]}):
        sums = {draft["sums"].get(name) for draft in drafts}
        if None in sums:
            having = [rank for rank, draft in zip(group.ranks, drafts, strict=True) if name in draft["sums"]]
            raise ValueError(f"{name} was given to save on ranks {', '.join(map(str, having))} alone: give it on all")
        if len(sums) > 1:
            raise ValueError(
                f"the tensors in {name} differ between the ranks, and a checkpoint keeps one value for all: give what "
                "is whole and equal everywhere (cnb.full(p) of a parameter, cnb.full_grad(p) of its gradient)"
            )


def merged(drafts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's plain part, with the optimizers' states of all ranks."""
    content = {key: value for key, value in drafts[0].items() if key != "sums"}
    for number, optimizer in enumerate(content["optimizers"]):
        states = {name: state for draft in drafts for name, state in draft["optimizers"][number]["states"].items()}
        order = [name for group in optimizer["groups"] for name in group["parameters"]]
        optimizer["states"] = {name: states[name] for name in order if name in states}
    return content
