"""`recover`: torn replicas become equal again, as copies of one that is whole."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from colossal_nb.parallel import objects, trouble
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel, require, tell
from colossal_nb.parallel.outside import beside, of_optimizers
from colossal_nb.parallel.structure import rebuild
from colossal_nb.validation import called_as


@called_as("cnb.recover(model)")
def recover(model: nn.Module) -> None:
    """After a stop or an error that left the weights of different steps on different ranks: make them one again.

    Under dp the replica that has come furthest and is whole gives weights, buffers, optimizer states and settings to
    the others; gradients are dropped. Says which step that is: what the program counts itself (a scheduler, a step
    number) may be one ahead or behind. Collective.

    Raises ValueError on all ranks where no replica is whole, naming the last checkpoint of the session.
    """
    parallel = require(model)
    try:
        trouble.settle(parallel)
    except ValueError:
        if parallel.source is None:
            raise
    else:
        tell(f"nothing to recover: the weights of step {parallel.step} are whole on all ranks")
        return
    _copy(parallel, parallel.group("dp"), parallel.source)
    trouble.united(parallel)
    tell(
        f"the weights of step {parallel.step} are whole on all ranks again; gradients were dropped. Variables of the "
        "cells (a step or epoch counter, a scheduler, lists of losses, the place in a loader) are not moved back: each "
        "rank has its own, which may be ahead of or behind these weights"
    )


def _copy(parallel: Parallel, group: Group, root: int) -> None:
    """From the group's rank `root` to the others, one tensor at a time."""
    with torch.no_grad():
        for p in (*parallel.held().values(), *parallel.outside):
            group.run("broadcast", [p.detach()], root=root, of="recover")
        for buffer in parallel.model.buffers():
            group.run("broadcast", [buffer], root=root, of="recover")
    for p in (*parallel.parameters.values(), *parallel.outside):
        p.grad = None
    for optimizer in parallel.optimizers:
        _copy_optimizer(parallel, optimizer, group, root)
    place = parallel.calls, parallel.step, parallel.loss, parallel.precision.position()
    parallel.calls, parallel.step, parallel.loss, scale = objects.broadcast(place, group, root, "recover")
    parallel.precision.go_on(scale)
    parallel.calls_in_step = 0


def _copy_optimizer(parallel: Parallel, optimizer: torch.optim.Optimizer, group: Group, root: int) -> None:
    settings = [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
    for own, values in zip(optimizer.param_groups, objects.broadcast(settings, group, root, "recover"), strict=True):
        own.update(values)
    for p in (*parallel.held().values(), *of_optimizers(parallel)):
        state = objects.broadcast(optimizer.state.get(p), group, root, "recover")
        if group.index == root:
            continue
        if state is None:
            optimizer.state.pop(p, None)
        else:
            optimizer.state[p] = rebuild(state, partial(beside, p))
