"""What the whole weights were when `parallelize` got them: a number per row, to find slices that lie on other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

CLOSE = 1e-4  # of the largest row: above what another order of sums makes, far below another row


@dataclass
class Origin:
    """By parameter: a number for each index of dim 0, and how often the weight had been changed in place then."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: dict[str, nn.Parameter]) -> Origin:
        known = {name: p for name, p in parameters.items() if p.is_floating_point() and p.dim() and p.numel()}
        return cls({name: rows(p) for name, p in known.items() if not p.is_meta})

    def made(self, parameters: dict[str, nn.Parameter]) -> None:
        """The parts are in place; whoever changes them from now on is not us."""
        self.versions = {name: parameters[name]._version for name in self.rows}

    def changed(self, name: str, p: Tensor) -> bool:
        """Whether an optimizer or anybody else has written into the weight since (or it was never known)."""
        return self.versions.get(name) != p._version


def rows(whole: Tensor) -> Tensor:
    """A weighted sum over each index of dim 0, on the host."""
    flat = whole.detach().reshape(len(whole), -1)
    weights = torch.arange(flat.shape[1], device=flat.device, dtype=torch.float64).mul_(0.7).cos_().to(torch.float32)
    flat = flat if flat.dtype in (torch.float32, torch.float64) else flat.float()
    return (flat @ weights.to(flat.dtype)).cpu()


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether two weights have the same rows, but for rounding."""
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())
