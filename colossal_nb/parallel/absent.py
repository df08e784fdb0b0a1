"""Tensors that are not there: of the weights and values of other stages only shape, dtype and identity remain."""

from __future__ import annotations

import torch


def absent_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not there: NaN (0 for whole numbers) in every place, in the memory of its longest edges.

    Its elements overlap, but not with a stride of 0, which torch refuses to write into: a loop over all parameters that
    clamps them, or copies an average back, writes NaN over NaN.
    """
    return absent(tuple(tensor.shape), tensor.dtype, tensor.device)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """See `absent_like`. NaN, so that a use of what is missing cannot stay unseen."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    size = 1 + sum(length - 1 for length in shape) if all(shape) else 0
    return torch.full((size,), value, dtype=dtype, device=device).as_strided(shape, (1,) * len(shape))
