"""Proves a plan before anybody trains: loss and all gradients of the sharded model against the whole one.

A loss alone is not enough: a wrong gradient of a whole parameter inside a sharded region leaves it right. The proof
runs on copies whose weights are moved off their starting values, so that a projection that starts at zero hides
nothing, in evaluation mode, so that dropout does not differ. Its collectives are left out of the record.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.collectives import group_of
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.tensor.apply import apply
from colossal_nb.parallel.tensor.values import TensorPlan
from colossal_nb.parallel.world import World
from colossal_nb.plan.layout import Shard

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
FLOOR = 1e-3
"""Gradients are compared on the scale of their own largest entry, but at least of this share of the model's largest:
one that is zero in exact arithmetic (a key's bias) is noise."""


@dataclass(frozen=True)
class Proof:
    """`wrong`: what differs, by name of parameter ("" for the loss), with the error on its scale."""

    plan: TensorPlan
    wrong: dict[str, float]


def prove(model: nn.Module, plan: TensorPlan, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Proof:
    """Collective over the plan's axis: every rank gets the same answer. The returned plan knows what is partial.

    A parameter that is whole on every rank but whose gradient differs between them lies inside a sharded region: its
    gradients are addends, and the plan says so if their sum is right. Model and random states stay as they are.
    """
    with aside():
        whole = _moved_copy(model)
        sharded = copy.deepcopy(whole)
        apply(sharded, plan)
        expected_loss = _loss_and_gradients(whole, plan, example)
        loss = _loss_and_gradients(sharded, plan, example)
        compare = _Comparison(plan, dict(whole.named_parameters()), dict(sharded.named_parameters()))
        partial = compare.partial()
        wrong = compare.wrong(partial)
        tolerance = TOLERANCE.get(loss.dtype, 5e-2)
        error = abs(float(loss) - float(expected_loss)) / max(1.0, abs(float(expected_loss)))
        if compare.agreed([error > tolerance])[0]:
            wrong[""] = error
    return Proof(replace(plan, partial=plan.partial + tuple(partial)), wrong)


class _Comparison:
    """This rank's gradients against its slices of the whole model's."""

    def __init__(self, plan: TensorPlan, whole: dict[str, nn.Parameter], sharded: dict[str, nn.Parameter]) -> None:
        self.plan = plan
        self.pairs = {
            name: (_slice(parameter.grad, sharded[name], plan), sharded[name].grad)
            for name, parameter in whole.items()
            if parameter.grad is not None
        }
        largest = max(
            (float(g.abs().max()) for g in (p.grad for p in whole.values()) if g is not None and g.numel()), default=0
        )
        self.floor = FLOOR * largest

    def agreed(self, flags: list[bool]) -> list[bool]:
        """True where any rank of the axis says so."""
        told = torch.tensor(flags, dtype=torch.int32)
        group_of(self.plan.mesh, self.plan.axis).run("all_reduce", [told], reduce="max")
        return [bool(flag) for flag in told]

    def partial(self) -> list[str]:
        """Parameters, whole here, whose gradients are right only as a sum; their gradients are summed."""
        names = [name for name in self.pairs if name not in self.plan.partial]
        differs = self.agreed([self._error(name) > self._tolerance(name) for name in names])
        found = []
        for name in (name for name, flag in zip(names, differs, strict=True) if flag):
            expected, gradient = self.pairs[name]
            if expected.shape != self.whole_shape(name):
                continue
            summed = (torch.zeros_like(expected) if gradient is None else gradient.clone()).contiguous()
            group_of(self.plan.mesh, self.plan.axis).run("all_reduce", [summed])
            self.pairs[name] = expected, summed
            found.append(name)
        return found

    def whole_shape(self, name: str) -> torch.Size | None:
        """The shape of a parameter that no rule cut, else None."""
        return None if name in _cut_names(self.plan) else self.pairs[name][0].shape

    def wrong(self, partial: list[str]) -> dict[str, float]:
        """What differs although it was summed where it had to be."""
        names = list(self.pairs)
        errors = [self._error(name) for name in names]
        flags = self.agreed([e > self._tolerance(n) for n, e in zip(names, errors, strict=True)])
        return {name: error for name, error, flag in zip(names, errors, flags, strict=True) if flag}

    def _error(self, name: str) -> float:
        expected, gradient = self.pairs[name]
        if not expected.numel():
            return 0.0
        difference = expected if gradient is None else gradient - expected
        scale = max(float(expected.abs().max()), self.floor, 1e-30)
        return float(difference.abs().max()) / scale

    def _tolerance(self, name: str) -> float:
        return TOLERANCE.get(self.pairs[name][0].dtype, 5e-2)


def _cut_names(plan: TensorPlan) -> set[str]:
    cut = {f"{name}.{kind}" for pair in plan.pairs for name, _ in pair.columns for kind in ("weight", "bias")}
    cut |= {f"{pair.row}.weight" for pair in plan.pairs}
    return cut | {
        f"{name}.{kind}" for v in plan.vocabulary for name in (*v.embeddings, *v.heads) for kind in ("weight", "bias")
    }


def _slice(gradient: Tensor | None, parameter: nn.Parameter, plan: TensorPlan) -> Tensor:
    assert gradient is not None
    layout = layout_of(parameter)
    placement = layout.placement(plan.axis) if layout is not None else None
    if not isinstance(placement, Shard) or placement.parts is None:
        return gradient
    index = plan.mesh.coordinate(World.current().rank)[plan.axis]
    mine = torch.tensor(placement.parts[index], dtype=torch.int64, device=gradient.device)
    return gradient.index_select(placement.dim, mine)


def _moved_copy(model: nn.Module) -> nn.Module:
    """A copy without layouts, in evaluation mode, every weight moved a little by a fixed amount of its own."""
    moved = copy.deepcopy(model).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.grad = None
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(noise.to(parameter), alpha=0.02)
    return moved


def _loss_and_gradients(model: nn.Module, plan: TensorPlan, example: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
    """One backward of a loss in which every output takes part: a mean of weighted values, cross entropy for logits."""
    args, kwargs = rebuild(example, lambda tensor: tensor.detach().clone())
    classes = {shard.size for shard in plan.vocabulary if shard.heads}
    torch.manual_seed(0)  # both models draw the same numbers, where a forward draws any
    with torch.enable_grad():
        output = model(*args, **kwargs)
        losses = [_loss_of(leaf, classes) for leaf in leaves(output) if leaf.is_floating_point() and leaf.requires_grad]
        if not losses:
            raise ValueError("the model's output has no tensor with a gradient: there is nothing to train")
        total: Tensor = torch.stack([loss.to(losses[0]) for loss in losses]).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total.detach()


def _loss_of(leaf: Tensor, classes: set[int]) -> Tensor:
    if leaf.ndim > 1 and leaf.shape[-1] in classes:
        samples = leaf.shape[:-1].numel()
        targets = torch.arange(samples, device=leaf.device) * 7 % leaf.shape[-1]
        return F.cross_entropy(leaf.flatten(0, -2), targets)
    weights = torch.linspace(-1, 2, leaf.numel(), device=leaf.device, dtype=leaf.dtype).view(leaf.shape)
    return (leaf * weights).sum() / math.sqrt(max(leaf.numel(), 1))


@contextmanager
def aside() -> Iterator[None]:
    """The proof is no part of the run: nothing is recorded, nobody is told, no random number is drawn."""
    world = World.current()
    before, notes = world.recorder.enabled, list(world.notes)
    world.recorder.enabled = False
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            world.recorder.enabled = before
            world.notes[:] = notes
