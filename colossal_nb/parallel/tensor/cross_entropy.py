"""Vocabulary-parallel cross entropy: the loss of logits whose classes lie on P ranks, without gathering them.

Per sample, with z the logits (classes cut over the ranks), t the target and m = max over all classes of z:
    loss = log(sum over classes of exp(z - m)) - (z_t - m)
Volume: three all-reduces of one number per sample forward (max, picked logit, sum of exponentials), none backward:
    d loss / d z_c = exp(z_c - m) / sum - [c = t]   needs the rank's own classes and what it has already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colossal_nb.parallel.collectives import group_of
from colossal_nb.parallel.tensor.embedding1d import RowRange, check_range


class _Losses(Function):
    """(samples, local classes) logits, (samples,) targets -> (samples,) losses, 0 where ignored."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, rows: RowRange, ignore_index: int) -> Tensor:
        group = group_of(rows.mesh, rows.axis)
        highest = logits.amax(-1)
        group.run("all_reduce", [highest], of=rows.name, reduce="max")
        shifted = logits - highest.unsqueeze(-1)
        column = targets - rows.first
        foreign = (column < 0) | (column >= rows.count) | (targets == ignore_index)
        column = column.masked_fill_(foreign, 0).unsqueeze(-1)
        picked = shifted.gather(-1, column).squeeze(-1).masked_fill_(foreign, 0)
        group.run("all_reduce", [picked], of=rows.name)
        shifted.exp_()
        total = shifted.sum(-1)
        group.run("all_reduce", [total], of=rows.name)
        ctx.save_for_backward(shifted, total, column, foreign, targets == ignore_index)
        return total.log().sub_(picked).masked_fill_(targets == ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exponentials, total, column, foreign, ignored = ctx.saved_tensors
        per_sample = grads[0].masked_fill(ignored, 0)
        gradient = exponentials * (per_sample / total).unsqueeze(-1)
        gradient.scatter_add_(-1, column, -per_sample.masked_fill(foreign, 0).unsqueeze(-1))
        return gradient, None, None, None


def cross_entropy(local: Tensor, targets: Tensor, rows: RowRange, ignore_index: int, reduction: str) -> Tensor:
    """torch's cross_entropy of logits (samples, classes) of which this rank has the columns `rows`.

    Whole class indices as targets (samples,); `reduction` as in torch, a mean over nothing is nan. Low-precision
    logits are summed in float32. Raises IndexError for a target outside of the classes (on CPU).
    """
    check_range(targets, rows.size, f"Target is out of bounds: classes are 0..{rows.size - 1}", ignore_index)
    exact = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
    losses: Tensor = _Losses.apply(exact, targets, rows, ignore_index)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        losses = losses.sum() / (targets != ignore_index).sum()
    elif reduction == "sum":
        losses = losses.sum()
    return losses.to(local.dtype)
