"""The two conjugate sums of 1D tensor parallelism, in place on tensors that nobody else holds.

`collectives.copy_to` and `reduce_from` do the same for any tensor and copy it first; a linear's fresh output, and the
gradient of an input that only linears read, need no copy.
"""

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


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, of: str) -> Tensor:
        ctx.where = mesh, axis, of
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        grad = grads[0].contiguous()
        group_of(mesh, axis).run("all_reduce", [grad], of=of)
        return grad, None, None, None


def sum_(x: Tensor, mesh: Mesh, axis: str, of: str) -> Tensor:
    """The sum of every rank's contiguous `x`, written into it. Backward: the gradient as it is."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        group_of(mesh, axis).run("all_reduce", [x], of=of)
        return x
    return _Sum.apply(x, mesh, axis, of)  # type: ignore[no-any-return, no-untyped-call]


def sum_gradient(x: Tensor, mesh: Mesh, axis: str, of: str) -> Tensor:
    """`x` as it is. Backward: the sum of every rank's gradient, written into it."""
    return _SumGradient.apply(x, mesh, axis, of)  # type: ignore[no-any-return, no-untyped-call]
