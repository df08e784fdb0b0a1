"""A tensor of a global batch of which only the rows that somebody uses are read from the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from colossal_nb.parallel.structure import rebuild

Rows = Callable[[int, int], Tensor]

# What asks for no values of a tensor: torch answers from its shape and kind. (Its stubs do not know these getters.)
VALUELESS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.__hash__,
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.__len__,
}


class Unread(Tensor):
    """Stands for a tensor whose dim 0 are the samples of a batch. `rows(start, stop)` reads some of them.

    A slice of dim 0 reads its rows and is an ordinary tensor; any other use reads all rows. `origin` says which data
    it stands for: equal on two ranks, equal data.
    """

    _rows: Rows
    origin: str
    _place: torch.device
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls, rows: Rows, shape: tuple[int, ...], dtype: torch.dtype, origin: str, device: torch.device | str = "cpu"
    ) -> Self:
        place = torch.device(device)
        made: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=place)
        made._rows, made.origin, made._place, made._whole = rows, origin, place, None
        return made

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The samples `start` to `stop` - 1 as an ordinary tensor; all of them by default."""
        end = self.shape[0] if stop is None else stop
        if self._whole is None and (start, end) == (0, self.shape[0]):
            self._whole = self._rows(start, end).to(self._place)
        if self._whole is not None:
            return self._whole[start:end]
        return self._rows(start, end).to(self._place, non_blocking=True)

    def _on(self, device: torch.device) -> Unread:
        if device == self._place:
            return self
        return Unread(self._rows, tuple(self.shape), self.dtype, self.origin, device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, Unread):
            if func is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step in (None, 1):
                return first.read(*args[1].indices(first.shape[0])[:2])
            if func is Tensor.to and len(args) == 2 and isinstance(args[1], str | torch.device):
                return first._on(torch.device(args[1]))
        return func(*whole(args), **whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """For what reaches it past `__torch_function__`, from within torch."""
        return func(*whole(args), **whole(kwargs or {}))


def whole(value: Any) -> Any:
    """The same structure with ordinary tensors in it, read as far as needed."""
    return rebuild(value, lambda tensor: tensor.read() if isinstance(tensor, Unread) else tensor)
