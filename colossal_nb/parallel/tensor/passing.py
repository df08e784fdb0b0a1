"""Which torch functions leave logits sharded by class: questions about their form, reshaping of other dims, scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.tensor.embedding1d import RowRange

_FORM = {
    "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "is_contiguous",
    "element_size", "get_device", "__len__", "stride", "storage_offset",
}  # fmt: skip
_FORM_PROPERTIES = {
    "shape", "dtype", "device", "ndim", "requires_grad", "grad_fn", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta",
    "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes", "names", "output_nr", "_version",
}  # fmt: skip
_CASTS = {"float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "to"}
_UNARY = {"tanh", "neg", "__neg__", "abs", "exp", "sigmoid", "relu", "negative", "positive", "__pos__"}
_SCALED = {
    "mul", "div", "add", "sub", "true_divide", "multiply", "divide", "subtract", "pow", "clamp", "clip",
    "__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__", "__rsub__", "__pow__",
}  # fmt: skip


def name_of(func: Callable[..., Any]) -> str:
    """The name of a torch function; of a property access the property's."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return str(name)


def asks_for_form(func: Callable[..., Any]) -> bool:
    """Whether the answer is in the whole shape and dtype alone, not in the values."""
    name = name_of(func)
    if getattr(func, "__name__", "") == "__get__":
        return name in _FORM_PROPERTIES
    return name in _FORM


def writes(name: str) -> bool:
    """Whether the function changes its first argument."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__"))


def is_elementwise(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Casts, and functions of one element at a time whose other operands are single numbers."""
    others = [*args[1:], *kwargs.values()]
    if name in _CASTS:
        return not any(isinstance(other, Tensor) for other in others)
    numbers = all(_is_number(other) for other in others)
    return (name in _UNARY and not others) or (name in _SCALED and bool(others) and numbers)


def _is_number(value: Any) -> bool:
    # A learned scale would get its gradient from this rank's classes alone: it needs the whole logits.
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.requires_grad
    return value is None or isinstance(value, int | float)


def reshaped(
    name: str, local: Tensor, class_dim: int, rows: RowRange, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, int] | None:
    """The local part and its class dim after a view of other dims; None if `name` is none or touches the classes."""
    if kwargs and name not in ("flatten", "transpose"):
        return None
    if name in ("transpose", "swapaxes", "swapdims"):
        return _transposed(local, class_dim, **dict(zip(("dim0", "dim1"), args, strict=False)), **kwargs)
    if name == "permute":
        order = [dim % local.ndim for dim in _sizes(args)]
        return local.permute(order), order.index(class_dim)
    if class_dim != local.ndim - 1:
        return None
    if name in ("view", "reshape"):
        return _viewed(name, local, rows, args)
    if name == "flatten":
        return _flattened(local, **dict(zip(("start_dim", "end_dim"), args, strict=False)), **kwargs)
    if name == "__getitem__":
        return _indexed(local, args[0])
    return None


def _sizes(args: tuple[Any, ...]) -> list[Any]:
    """view(2, 3) and view((2, 3)) alike."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], Sequence) else list(args)


def _transposed(local: Tensor, class_dim: int, dim0: int, dim1: int) -> tuple[Tensor, int]:
    dim0, dim1 = dim0 % local.ndim, dim1 % local.ndim
    return local.transpose(dim0, dim1), {dim0: dim1, dim1: dim0}.get(class_dim, class_dim)


def _viewed(name: str, local: Tensor, rows: RowRange, args: tuple[Any, ...]) -> tuple[Tensor, int] | None:
    sizes = _sizes(args)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    samples = prod(local.shape[:-1])
    if (sizes[-1] == -1 and prod(sizes[:-1]) != samples) or sizes[-1] not in (-1, rows.size):
        return None
    view = local.view if name == "view" else local.reshape
    return view(*sizes[:-1], rows.count), len(sizes) - 1


def _flattened(local: Tensor, start_dim: int = 0, end_dim: int = -1) -> tuple[Tensor, int] | None:
    start, end = start_dim % local.ndim, end_dim % local.ndim
    if end >= local.ndim - 1 > start:
        return None
    flat = local.flatten(start, end)
    return flat, flat.ndim - 1


def _indexed(local: Tensor, index: Any) -> tuple[Tensor, int] | None:
    """Indexing of the dims before the classes, which therefore stay last."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is None or part is Ellipsis or _is_index(part) for part in parts):
        return None
    at = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
    missing = local.ndim - sum(_dims(part) for part in parts)
    full = [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]
    if not isinstance(full[-1], slice) or full[-1] != slice(None):
        return None
    taken = local[tuple(full)]
    return taken, taken.ndim - 1


def _is_index(part: Any) -> bool:
    if isinstance(part, Tensor):
        return type(part) is Tensor and part.dtype in (torch.bool, torch.int64)
    return isinstance(part, int | slice) and not isinstance(part, bool)


def _dims(part: Any) -> int:
    """How many dims one part of an index consumes."""
    if isinstance(part, Tensor):
        return part.ndim if part.dtype is torch.bool else 1
    return int(isinstance(part, int | slice))
