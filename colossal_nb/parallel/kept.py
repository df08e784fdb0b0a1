"""Buffers that a forward moves (running statistics) are put back when the forward_backward comes to no end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from colossal_nb.parallel.handle import Parallel

Owners = dict[str, nn.Module]


def owners(model: nn.Module) -> Owners:
    """The modules that have buffers of their own, by name."""
    return {name: module for name, module in model.named_modules() if module._buffers}


@contextmanager
def buffers(parallel: Parallel, owners: Owners) -> Iterator[None]:
    """The first time, and where modules were frozen or thawed since, all buffers are copied; then those that moved."""
    mode = frozenset(name for name, module in owners.items() if module.training)
    moving = parallel.moving.get(mode)
    every = {
        f"{owner}.{key}".lstrip("."): buffer
        for owner, module in owners.items()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    }
    watched = every if moving is None else {name: every[name] for name in moving if name in every}
    before = {name: (buffer, buffer.detach().clone()) for name, buffer in watched.items()}
    try:
        yield
    except BaseException:
        parallel.before = list(before.values())
        put_back(parallel)
        raise
    if moving is None:  # torch's count of writes does not see those of batch_norm
        moving = {name for name, (buffer, value) in before.items() if not torch.equal(buffer, value)}
        parallel.moving[mode] = moving
    parallel.before = [before[name] for name in moving if name in before]


def put_back(parallel: Parallel) -> None:
    """What the last forward_backward has moved."""
    with torch.no_grad():
        for buffer, value in parallel.before:
            buffer.copy_(value)
    parallel.before = []
