"""The rank's ledger and a parallel model: what it holds is counted from `parallelize` on, sampled in every step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.world import World

# The steps after which an optimizer's states are looked for: they are made in its first step.
_LOOKS = 2


def watch(parallel: Parallel) -> None:
    """Count what a model and its optimizers hold; again after the passes have cut it."""
    own = World.current().ledger
    own.watch(parallel.model, masters=parallel.precision.weights)
    for optimizer in parallel.optimizers:
        own.watch_states(optimizer, parallel.model)
    own.sample()


@contextmanager
def activations() -> Iterator[None]:
    """Count what is saved for backward inside; nothing while recording is off."""
    world = World.current()
    if not world.recorder.enabled:
        yield
        return
    with world.ledger.activations():
        yield


def sample() -> None:
    """Write the bytes of this instant to the record."""
    world = World.current()
    if world.recorder.enabled:
        world.ledger.sample()


def buckets(flats: list[Tensor]) -> None:
    """Gradients have moved into flat buckets."""
    world = World.current()
    if world.recorder.enabled:
        for number, flat in enumerate(flats):
            world.ledger.track(flat, "gradient", f"bucket {number}")


def stepped(parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has updated the parameters."""
    world = World.current()
    if world.recorder.enabled:
        if parallel.step < _LOOKS:
            world.ledger.watch_states(optimizer, parallel.model)
        world.ledger.sample()
