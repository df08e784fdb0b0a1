"""Buffers that a forward moves (running statistics) are put back when the forward_backward comes to no end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colossal_nb.parallel.handle import Parallel


@contextmanager
def buffers(parallel: Parallel) -> Iterator[None]:
    """The first time, in training and in evaluation, all buffers are copied; then those that moved in it."""
    mode = parallel.model.training
    moving = parallel.moving.get(mode)
    every = {name: buffer for name, buffer in parallel.model.named_buffers() if not buffer.is_meta}
    watched = every if moving is None else {name: every[name] for name in moving if name in every}
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in watched.items()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in before.values():
                buffer.copy_(value)
        raise
    if moving is None:  # torch's count of writes does not see those of batch_norm
        moved = {name for name, (buffer, value) in before.items() if not torch.equal(buffer, value)}
        parallel.moving[mode] = moved
