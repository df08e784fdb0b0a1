"""Collectives on tensors along a mesh axis, differentiable; each docstring names its backward.

The rule behind every backward: the loss is the sum of what all ranks of the group compute from the result. Where the
result is used alike on every rank (one loss, computed by all), take the conjugate pairs `copy_to`/`reduce_from` and
`split_to`/`gather_from` instead. An axis of one rank does nothing and records nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh

Axis = str | tuple[str, ...]


def group_of(mesh: Mesh, axis: Axis) -> Group:
    """The group of this rank along an axis (or several: `("dp", "sp")`) of the mesh."""
    return World.current().group(mesh, axis)


def parts_of(length: int, count: int) -> list[int]:
    """Sizes of `count` contiguous parts that differ by at most one, larger ones first."""
    return [length // count + (index < length % count) for index in range(count)]


def _reduced(x: Tensor, group: Group, of: str, reduce: str = "sum") -> Tensor:
    if group.size == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    group.run("all_reduce", [out], of=of, reduce=reduce)
    return out


def _gathered(x: Tensor, group: Group, of: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    if sizes is None and dim in (0, -x.dim()):
        whole = x.new_empty(group.size * x.shape[0], *x.shape[1:])
        group.run("all_gather", [whole, x.contiguous()], of=of)
        return whole
    sizes = [x.shape[dim]] * group.size if sizes is None else sizes
    shapes = [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in sizes]
    outs = [x.new_empty(shape) for shape in shapes]
    group.run("all_gather", [*outs, x.contiguous()], of=of)
    return torch.cat(outs, dim)


def _scattered(x: Tensor, group: Group, of: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    sizes = parts_of(x.shape[dim], group.size) if sizes is None else sizes
    parts = list(torch.split(x, list(sizes), dim))
    out = torch.empty_like(parts[group.index], memory_format=torch.contiguous_format)
    group.run("reduce_scatter", [out, *parts], of=of)
    return out


def _own_part(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Tensor:
    sizes = parts_of(x.shape[dim], group.size) if sizes is None else sizes
    return torch.split(x, list(sizes), dim)[group.index].contiguous()


# Every Function keeps mesh and axis, never the group: a backward after a regroup finds the new one.
class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, backward: bool) -> Tensor:
        ctx.where, ctx.reduces = (mesh, axis, of), backward
        return _reduced(x, group_of(mesh, axis), of)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        grad = _reduced(grads[0], group_of(mesh, axis), of) if ctx.reduces else grads[0]
        return grad, None, None, None, None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str) -> Tensor:
        ctx.where = mesh, axis, of
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        return _reduced(grads[0], group_of(mesh, axis), of), None, None, None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, dim: int, sizes: Sequence[int] | None, adds: bool
    ) -> Tensor:
        group = group_of(mesh, axis)
        ctx.where, ctx.adds = (mesh, axis, of), adds
        ctx.dim, ctx.sizes = dim, sizes if sizes is not None else [x.shape[dim]] * group.size
        return _gathered(x, group, of, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        group = group_of(mesh, axis)
        if ctx.adds:
            grad = _scattered(grads[0], group, of, ctx.dim, ctx.sizes)
        else:
            grad = _own_part(grads[0], group, ctx.dim, ctx.sizes)
        return grad, None, None, None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, dim: int, sizes: Sequence[int] | None, adds: bool
    ) -> Tensor:
        group = group_of(mesh, axis)
        sizes = parts_of(x.shape[dim], group.size) if sizes is None else sizes
        ctx.where, ctx.dim, ctx.sizes = (mesh, axis, of), dim, sizes
        return _scattered(x, group, of, dim, sizes) if adds else _own_part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        sizes = None if len(set(ctx.sizes)) == 1 else ctx.sizes
        grad = _gathered(grads[0], group_of(mesh, axis), of, ctx.dim, sizes)
        return grad, None, None, None, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, given: list[int], got: list[int]) -> Tensor:
        ctx.where, ctx.given, ctx.got = (mesh, axis, of), given, got
        return _exchanged(x, group_of(mesh, axis), of, given, got)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        grad = _exchanged(grads[0], group_of(mesh, axis), of, ctx.got, ctx.given)
        return grad, None, None, None, None, None


def _exchanged(x: Tensor, group: Group, of: str, given: list[int], got: list[int]) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    group.run("all_to_all", [out, x.contiguous()], of=of, given=given, got=got)
    return out


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, root: int) -> Tensor:
        ctx.where, ctx.root = (mesh, axis, of), root
        out = x.detach().clone(memory_format=torch.contiguous_format)
        group_of(mesh, axis).run("broadcast", [out], of=of, root=root)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        group = group_of(mesh, axis)
        grad = _reduced(grads[0], group, of)
        return grad if group.index == ctx.root else torch.zeros_like(grad), None, None, None, None


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: Axis, of: str, peer: int) -> Tensor:
        ctx.where, ctx.peer = (mesh, axis, of), peer
        ctx.form = x.shape, x.dtype, x.device
        group_of(mesh, axis).run("send", [x], of=of, peer=peer)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        shape, dtype, device = ctx.form
        grad = torch.empty(shape, dtype=dtype, device=device)
        group_of(mesh, axis).run("recv", [grad], of=of, peer=ctx.peer)
        return grad, None, None, None, None


class _Recv(Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, mesh: Mesh, axis: Axis, of: str, peer: int) -> Tensor:
        ctx.where, ctx.peer = (mesh, axis, of), peer
        out = torch.empty_like(like, memory_format=torch.contiguous_format)
        group_of(mesh, axis).run("recv", [out], of=of, peer=peer)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axis, of = ctx.where
        group_of(mesh, axis).run("send", [grads[0]], of=of, peer=ctx.peer)
        return None, None, None, None, None


def _across(function: Any, x: Tensor, mesh: Mesh, axis: Axis, *rest: Any) -> Tensor:
    if group_of(mesh, axis).size == 1:
        return x
    out: Tensor = function.apply(x, mesh, axis, *rest)
    return out


def all_reduce(x: Tensor, mesh: Mesh, axis: Axis, *, of: str = "", reduce: str = "sum") -> Tensor:
    """The sum of every rank's `x`, same shape. Backward: all-reduce of the gradient.

    `reduce` may be another of `forms.REDUCTIONS`; then there is no backward.
    """
    if reduce != "sum":
        return _reduced(x, group_of(mesh, axis), of, reduce)
    return _across(_AllReduce, x, mesh, axis, of, True)


def reduce_from(x: Tensor, mesh: Mesh, axis: Axis, *, of: str = "") -> Tensor:
    """The sum of every rank's `x`, used alike on every rank. Backward: the gradient as it is.

    The end of a row-parallel region (Megatron's g); its pair is `copy_to`.
    """
    return _across(_AllReduce, x, mesh, axis, of, False)


def copy_to(x: Tensor, mesh: Mesh, axis: Axis, *, of: str = "") -> Tensor:
    """`x`, alike on every rank, at the entry of a column-parallel region (Megatron's f). Backward: all-reduce."""
    return _across(_Copy, x, mesh, axis, of)


def all_gather(
    x: Tensor, mesh: Mesh, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None, of: str = ""
) -> Tensor:
    """Every rank's `x` along `dim`. Backward: reduce-scatter of the gradient.

    `sizes`: each rank's length of `dim`; None says that all are equal.
    """
    return _across(_Gather, x, mesh, axis, of, dim % x.dim(), sizes, True)


def gather_from(
    x: Tensor, mesh: Mesh, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None, of: str = ""
) -> Tensor:
    """Every rank's `x` along `dim`, used alike on every rank. Backward: the own part of the gradient."""
    return _across(_Gather, x, mesh, axis, of, dim % x.dim(), sizes, False)


def reduce_scatter(
    x: Tensor, mesh: Mesh, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None, of: str = ""
) -> Tensor:
    """The own part along `dim` of the sum of every rank's `x`. Backward: all-gather of the gradient.

    `sizes`: the parts; None cuts as evenly as possible, larger parts first.
    """
    return _across(_Scatter, x, mesh, axis, of, dim % x.dim(), sizes, True)


def split_to(
    x: Tensor, mesh: Mesh, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None, of: str = ""
) -> Tensor:
    """The own part along `dim` of `x`, which is alike on every rank. Backward: all-gather of the gradient."""
    return _across(_Scatter, x, mesh, axis, of, dim % x.dim(), sizes, False)


def all_to_all(
    x: Tensor,
    mesh: Mesh,
    axis: Axis,
    *,
    given: Sequence[int] | None = None,
    got: Sequence[int] | None = None,
    of: str = "",
) -> Tensor:
    """Rows of dim 0: the j-th part goes to rank j, the parts that come are in rank order. Backward: the way back.

    `given`, `got`: rows per rank that leave and come; None says equal parts.
    """
    given = parts_of(x.shape[0], group_of(mesh, axis).size) if given is None else list(given)
    got = list(given) if got is None else list(got)
    return _across(_AllToAll, x, mesh, axis, of, given, got)


def broadcast(x: Tensor, mesh: Mesh, axis: Axis, *, root: int = 0, of: str = "") -> Tensor:
    """The `x` of the group's rank `root`, on all. Backward: the sum of all gradients at the root, zero elsewhere."""
    return _across(_Broadcast, x, mesh, axis, of, root)


def send(x: Tensor, mesh: Mesh, axis: Axis, *, peer: int, of: str = "") -> Tensor:
    """Send to the group's rank `peer`; returns a zero that carries the way back. Backward: receives the gradient.

    Raises Mismatch on both sides where the receiver expects another shape or dtype.
    """
    out: Tensor = _Send.apply(x, mesh, axis, of, peer)  # type: ignore[no-untyped-call]
    return out


def recv(like: Tensor, mesh: Mesh, axis: Axis, *, peer: int, of: str = "") -> Tensor:
    """Receive a tensor of the shape and dtype of `like` from the group's rank `peer`. Backward: sends the gradient.

    For a backward, `like` must require a gradient (which it does not get).
    """
    out: Tensor = _Recv.apply(like, mesh, axis, of, peer)  # type: ignore[no-untyped-call]
    return out
