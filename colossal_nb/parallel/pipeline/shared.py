"""Gradients of parameters that several stages hold: tied, shared, or read between units. Their sum is everyone's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh


@contextmanager
def summed(
    parameters: Mapping[str, nn.Parameter], holders: Mapping[str, tuple[int, ...]], used: frozenset[str], mesh: Mesh
) -> Iterator[None]:
    """Inside, backwards add to fresh gradients of this stage's shared parameters; at the end these are summed over
    their stages and added to what was there before. `used`: those known to get a gradient somewhere."""
    stage = mesh.coordinate(World.current().rank)["pp"]
    mine = {name: p for name, p in parameters.items() if stage in holders[name] and len(holders[name]) > 1}
    before = {name: p.grad for name, p in mine.items()}
    for p in mine.values():
        p.grad = None
    try:
        yield
    except BaseException:
        for name, p in mine.items():
            p.grad = before[name]
        raise
    for stages in sorted({holders[name] for name in mine}):
        _sum(sorted(name for name in mine if holders[name] == stages), mine, stages, used, mesh)
    for name, p in mine.items():
        old = before[name]
        if old is not None:
            p.grad = old if p.grad is None else old.add_(p.grad)


def _sum(
    names: list[str], parameters: Mapping[str, nn.Parameter], stages: tuple[int, ...], used: frozenset[str], mesh: Mesh
) -> None:
    """One all-reduce per dtype; before it, where the proof saw parameters unused, a small one: have they gradients?"""
    group = World.current().group(mesh, "pp")
    if len(stages) < group.size:
        group = World.current().some("pp", tuple(group.ranks[at] for at in stages))
    names = [name for name in names if parameters[name].requires_grad]
    unsure = [name for name in names if name not in used]
    if unsure:
        flags = torch.tensor([float(parameters[name].grad is not None) for name in unsure])
        group.run("all_reduce", [flags], of="shared gradients")
        absent = {name for name, flag in zip(unsure, flags.tolist(), strict=True) if not flag}
        names = [name for name in names if name not in absent]
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in names:
        by_dtype.setdefault(parameters[name].dtype, []).append(name)
    for same in by_dtype.values():
        parts = [_gradient(parameters[name]).reshape(-1) for name in same]
        flat = torch.cat(parts)
        group.run("all_reduce", [flat], of="shared gradients")
        for name, piece in zip(same, torch.split(flat, [part.numel() for part in parts]), strict=True):
            parameters[name].grad = piece.view_as(parameters[name])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
