"""The sum at the end of a row-parallel region, in place: `collectives.reduce_from` without its copy, which a layer's
fresh output does not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colossal_nb.parallel.collectives import group_of
from colossal_nb.plan.mesh import Mesh


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, of: str) -> Tensor:
        group_of(mesh, axis).run("all_reduce", [x], of=of)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, None


def sum_(x: Tensor, mesh: Mesh, axis: str, of: str) -> Tensor:
    """The sum of every rank's contiguous `x`, written into it. Backward: the gradient as it is."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        group_of(mesh, axis).run("all_reduce", [x], of=of)
        return x
    return _Sum.apply(x, mesh, axis, of)  # type: ignore[no-any-return, no-untyped-call]
