"""A plain multilayer perceptron."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossal_nb.models.parts import check_sizes


class MLP(nn.Module):
    """`layers` Linear layers with GELU between them: features -> hidden -> ... -> classes. At least 2 layers."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int = 2) -> None:
        super().__init__()
        check_sizes(features=features, hidden=hidden, classes=classes, layers=layers)
        if layers < 2:
            raise ValueError(f"layers={layers}: an MLP has an input and an output layer, so at least 2")
        widths = [features, *[hidden] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., classes)."""
        for layer in self.layers[:-1]:
            x = functional.gelu(layer(x))
        result: Tensor = self.layers[-1](x)
        return result

    def example_inputs(self) -> tuple[Tensor]:
        """A small input of the right kind: floats (2, features)."""
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        steps = 2 * weight.shape[1]
        return (torch.linspace(-1, 1, steps, dtype=weight.dtype, device=weight.device).view(2, -1),)
