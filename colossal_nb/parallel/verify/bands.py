"""How much may differ: rule L, and what an optimizer makes of a gradient that is all rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel.handle import Parallel

RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
COARSE_LOSS = 2e-2
COARSE_WEIGHT = 2e-2
COARSE_GRADIENT = 4.5e-2  # the length of the difference of two unit vectors whose cosine is 0.999
FLOOR = 0.1
"""Gradients are compared on the scale of their own largest entry, but at least of this share of the model's largest:
one that is zero in exact arithmetic (a bias before a batch norm, say) is the rounding of terms of that size."""
NOISE = 2
"""Room above the estimate of what rounding does: two programs may walk the full way in opposite directions."""
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Band:
    """What may differ, as parts of the size: of losses, gradients and weights. `coarse`: half precision, in which the
    gradient of a tensor is compared as one vector."""

    loss: float
    gradient: float
    weight: float
    coarse: bool = False

    @property
    def close(self) -> float:
        """Of the size: as near as this is alike, where a difference is looked at."""
        return 1e-1 if self.coarse else 1e-3

    def size_of_gradient(self, whole: Tensor, largest: float) -> float:
        """What a difference of the gradient counts against; `largest`: the largest entry of the model's gradients."""
        own = _largest(whole)
        if self.coarse:
            own = whole.double().norm().item() / max(1, whole.numel()) ** 0.5
        return max(own, FLOOR * largest, TINY)

    def sizes_of_weight(self, after: Tensor, before: Tensor, slope: Tensor | None, largest: float) -> Tensor:
        """What a difference of an updated weight counts against, for every element.

        An optimizer that divides by the size of a gradient moves an element whose gradient (`slope`) is smaller than
        its band by rounding alone, as far as others move by a gradient: such an element may differ by that.
        """
        walk = _largest(after.double() - before.double())
        sizes = torch.full(after.shape, max(_largest(after), walk, TINY), dtype=torch.float64)
        if slope is not None and walk:
            noise = NOISE * self.gradient * max(_largest(slope), FLOOR * largest)
            share = (noise / slope.abs().double().clamp(min=1e-300)).clamp(max=1.0)
            sizes += 2 * NOISE * walk * share / self.weight
        return sizes

    def difference(self, found: Tensor, expected: Tensor, size: float | Tensor, what: str) -> float:
        """The largest difference of two parts of a tensor, as a part of its size (nan where something is nan)."""
        if not expected.numel():
            return 0.0
        difference = found.double() - expected.double()
        if self.coarse and what == "gradient":
            return float(difference.norm().item() / (expected.numel() ** 0.5 * float(size)))
        return float((difference.abs() / size).max())


def band_of(parallel: Parallel) -> Band:
    """By the precision of the strategy, and by what the weights are."""
    kinds = {p.dtype for p in parallel.parameters.values() if p.is_floating_point()}
    if parallel.strategy.precision != "fp32" or any(kind not in RTOL for kind in kinds):
        return Band(COARSE_LOSS, COARSE_GRADIENT, COARSE_WEIGHT, coarse=True)
    rtol = max((RTOL[kind] for kind in kinds), default=1e-5)
    return Band(rtol, rtol, rtol)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
