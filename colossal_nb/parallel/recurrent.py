"""Torch's recurrent functions, layer by layer, so that what is dropped between layers can be chosen outside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of torch: nn.LSTM, nn.GRU and nn.RNN end in them
Drop = Callable[[Tensor, float], Tensor]


def between_layers(plain: Callable[..., Any], drop: Drop) -> Callable[..., Any]:
    """The function with `drop(x, p)` between layers, x having its batch in dim 0."""

    def called(*args: Any) -> Any:
        # Of a packed sequence the batch sizes are second; whose row is which is not known here.
        if len(args) != 9 or not isinstance(args[3], bool):
            return plain(*args)
        x, states, weights, biases, layers, p, train, both, batch_first = args
        if not (train and p > 0 and layers > 1):
            return plain(*args)
        each, ways = len(weights) // layers, 2 if both else 1
        ends = []
        for layer in range(layers):
            rows = slice(layer * ways, (layer + 1) * ways)
            begin = states[rows] if isinstance(states, Tensor) else [state[rows] for state in states]
            own = weights[layer * each : (layer + 1) * each]
            x, *end = plain(x, begin, own, biases, 1, 0.0, train, both, batch_first)
            ends.append(end)
            if layer < layers - 1:
                x = drop(x, p) if batch_first else drop(x.transpose(0, 1), p).transpose(0, 1)
        return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return called
