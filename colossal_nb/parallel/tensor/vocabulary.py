"""Sharded logits: what the vocabulary-parallel head returns, and how the user's unedited loss meets it.

`ShardedLogits` says the whole shape and holds this rank's classes. Reshaping, casting and scaling stay sharded;
`cross_entropy` runs vocabulary-parallel; any other operation gathers once, differentiably, and leaves a note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from colossal_nb.parallel.collectives import gather_from
from colossal_nb.parallel.structure import rebuild
from colossal_nb.parallel.tensor import passing
from colossal_nb.parallel.tensor.cross_entropy import cross_entropy
from colossal_nb.parallel.tensor.embedding1d import RowRange
from colossal_nb.parallel.tensor.linear1d import Entrance
from colossal_nb.parallel.world import World


class ShardedLogits(Tensor):
    """A tensor of whole shape of which this rank holds the classes `rows` of dim `class_dim`, as `local`.

    `local` carries the gradient. The object itself hangs in the same graph, so that code which goes past torch's
    functions (an autograd.Function of the user's) still reaches it with a whole gradient.
    """

    local: Tensor
    rows: RowRange
    class_dim: int
    is_view: bool

    @staticmethod
    def __new__(cls, local: Tensor, rows: RowRange, class_dim: int) -> Self:
        """The bare object; `wrap` makes one that hangs in the graph."""
        shape = list(local.shape)
        shape[class_dim] = rows.size
        return Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device, requires_grad=False)

    def __init__(self, local: Tensor, rows: RowRange, class_dim: int) -> None:
        self.local, self.rows, self.class_dim = local, rows, class_dim
        self._whole: tuple[bool, Tensor] | None = None
        self.is_view = self.is_replaced = False

    def __repr__(self) -> str:  # type: ignore[override]
        # No values: they would take a collective, and one rank alone may print.
        with torch._C.DisableTorchFunctionSubclass():
            return f"ShardedLogits({list(self.shape)}, {self.dtype}, classes {self.rows})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if passing.asks_for_form(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = passing.name_of(func)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, ShardedLogits) and not first.is_replaced:
            result = _sharded(name, func, first, args, kwargs)
            if result is not NotImplemented:
                return result
        whole = _gathered((args, kwargs), name)
        if passing.writes(name) and isinstance(first, ShardedLogits):
            first.replace()
        args, kwargs = whole
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Below autograd: only code that went past __torch_function__ arrives here.
        if func is torch.ops.aten.detach.default:
            return ShardedLogits(args[0].local.detach(), args[0].rows, args[0].class_dim)
        args, kwargs = _gathered((args, kwargs or {}), str(func))
        return func(*args, **kwargs)

    @property
    def is_gathered(self) -> bool:
        """Whether the whole logits are here already."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """All classes, on every rank; gathered at the first use. Collective."""
        graph = torch.is_grad_enabled()
        if self._whole is None or (graph and not self._whole[0] and not self.is_replaced):
            sizes = [count for _, count in self.rows.bounds]
            rows = self.rows
            whole = gather_from(self.local, rows.mesh, rows.axis, dim=self.class_dim, sizes=sizes, of=rows.name)
            self._whole = graph, whole
        return self._whole[1]

    def replace(self) -> None:
        """From here on this is its gathered self: somebody writes into it."""
        if self.is_view:
            raise RuntimeError(
                "a view of vocabulary-parallel logits is written in place, which the logits would not see: "
                "write into the logits themselves, or make a new tensor"
            )
        self.whole()
        self.is_replaced = True


class _Wrap(Function):
    """local -> ShardedLogits. Backward: this rank's classes of a whole gradient, which all ranks have alike."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: RowRange, class_dim: int) -> ShardedLogits:
        ctx.rows, ctx.class_dim = rows, class_dim
        return ShardedLogits(local.detach(), rows, class_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0].whole() if isinstance(grads[0], ShardedLogits) else grads[0]
        return grad.narrow(ctx.class_dim, ctx.rows.first, ctx.rows.count), None, None


def wrap(local: Tensor, rows: RowRange, class_dim: int, is_view: bool = False) -> ShardedLogits:
    """This rank's logits as part of the whole ones."""
    sharded: ShardedLogits = _Wrap.apply(local, rows, class_dim)  # type: ignore[no-untyped-call]
    sharded.local, sharded.is_view = local, is_view
    return sharded


def gather(value: Any) -> Any:
    """`value` with whole tensors in the place of sharded logits, at any depth. Collective."""
    return rebuild(value, lambda tensor: tensor.whole() if isinstance(tensor, ShardedLogits) else tensor)


class HeadLinear1D(nn.Linear):
    """nn.Linear that holds some of its output features and returns them as `ShardedLogits` (..., out_features).

    Forward: no communication. Backward: all-reduce of the input's gradient.
    """

    rows: RowRange
    entrance: Entrance

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """(..., in_features), whole on every rank -> (..., out_features), sharded by class."""
        local = F.linear(self.entrance(input), self.weight, self.bias)
        return wrap(local, self.rows, local.ndim - 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, out {self.rows}"


def _sharded(
    name: str, func: Callable[..., Any], logits: ShardedLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The operation on this rank's classes, or NotImplemented where the whole logits are needed."""
    if name == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    moved = passing.reshaped(name, logits.local, logits.class_dim, logits.rows, args[1:], kwargs)
    if moved is None and passing.is_elementwise(name, args, kwargs):
        local = func(*(logits.local if arg is logits else arg for arg in args), **kwargs)
        moved = local, logits.class_dim
    if moved is None:
        return NotImplemented
    local, class_dim = moved
    return logits if local is logits.local else wrap(local, logits.rows, class_dim, is_view=local._is_view())


def _cross_entropy(
    logits: ShardedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **by_name: Any,
) -> Any:
    """Vocabulary-parallel where class indices are the targets, classes weigh alike and nothing is smoothed."""
    plain = weight is None and not label_smoothing and size_average is None and reduce is None
    shape = [size for dim, size in enumerate(logits.shape) if dim != logits.class_dim]
    on_classes = logits.class_dim == (1 if logits.ndim > 1 else 0)
    fits = isinstance(target, Tensor) and not target.is_floating_point() and list(target.shape) == shape
    if by_name or not (plain and on_classes and fits) or isinstance(target, ShardedLogits):
        return NotImplemented
    flat = logits.local.movedim(logits.class_dim, -1).reshape(-1, logits.rows.count)
    loss = cross_entropy(flat, target.reshape(-1), logits.rows, ignore_index, reduction)
    return loss.view(target.shape) if reduction == "none" else loss


def _gathered(value: Any, name: str) -> Any:
    """Whole tensors in the place of sharded logits, with one note per operation that needed them."""

    def whole(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedLogits):
            return tensor
        rows, notes = tensor.rows, World.current().notes
        note = (
            f"the logits of {rows.name or 'the model'} lie on {len(rows.bounds)} ranks and were gathered for {name}; "
            "a plain cross_entropy of class indices needs no gathering"
        )
        if not tensor.is_gathered and note not in notes:
            notes.append(note)
        return tensor.whole()

    return rebuild(value, whole)
