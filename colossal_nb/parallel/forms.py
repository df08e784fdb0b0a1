"""The forms in which a transport carries and adds tensors: which dtypes, in what memory, and the way back."""

import torch
from torch import Tensor

from colossal_nb.parallel.compat import GLOO_DTYPES

REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor")
WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.int16: torch.int32}


def bytes_of(*tensors: Tensor) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def describe(x: Tensor) -> str:
    """`float32 [2, 3]`"""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def added(stack: Tensor) -> Tensor:
    """The sum over dim 0, one row after the other; low precision is added in fp32 and rounded once."""
    low = stack.dtype in (torch.bfloat16, torch.float16)
    first, second, *rest = stack.to(torch.float32) if low else stack
    total: Tensor = first + second
    for row in rest:
        total += row
    return total.to(stack.dtype)


def same_dtype(op: str, a: Tensor, b: Tensor) -> None:
    if a.dtype != b.dtype:
        raise ValueError(f"{op}: output {describe(a)} and input {describe(b)} differ in dtype")


def can_reduce(x: Tensor, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        raise ValueError(f"a reduction is one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    floating = x.is_floating_point() or x.is_complex()
    if reduce == "avg" and not floating:
        raise ValueError(f"avg of {describe(x)} would not be whole numbers: reduce the sum and divide it")
    if reduce in ("band", "bor", "bxor") and floating:
        raise ValueError(f"{reduce} works on bits of whole numbers, not on {describe(x)}")
    if x.is_complex() and reduce not in ("sum", "avg"):
        raise ValueError(f"{reduce} of complex numbers is not defined; {describe(x)} can be summed")
    if x.dtype == torch.uint64 or (x.is_floating_point() and x.dtype not in GLOO_DTYPES):
        raise ValueError(f"{describe(x)} can be moved but not reduced: convert it (float32, int64) first")


def reducible(x: Tensor) -> Tensor:
    """The same memory where gloo can reduce it, else a copy of a kind that it can."""
    if x.is_complex():
        return torch.view_as_real(x.contiguous())
    if x.dtype in WIDER:
        return x.to(WIDER[x.dtype])
    return x.contiguous()


def copy_back(original: Tensor, form: Tensor) -> None:
    if form is not original:
        original.copy_(torch.view_as_complex(form) if original.is_complex() else form)


def movable(x: Tensor) -> Tensor:
    """The same bytes, contiguous, of a dtype that gloo carries."""
    x = x.contiguous()
    return x if x.dtype in GLOO_DTYPES else x.reshape(-1).view(torch.uint8)


def movable_numel(x: Tensor) -> int:
    return x.numel() if x.dtype in GLOO_DTYPES else bytes_of(x)


def room_for(out: Tensor) -> Tensor:
    """A flat tensor to receive into: `out` itself where it can be."""
    return movable(out).reshape(-1)


def land(out: Tensor, arrived: Tensor) -> None:
    if arrived.data_ptr() == out.data_ptr():
        return
    out.copy_((arrived if arrived.dtype == out.dtype else arrived.contiguous().view(out.dtype)).reshape(out.shape))
