"""Activation checkpointing: what a forward made inside is let go, and made again when its backward begins.

full: every repeated block of the model keeps its inputs alone. selective: attention keeps queries, keys and values, not
what is as large as they are or, with dropout, as the scores. The second run draws the masks of the first, leaves
buffers as they are, and is written to the record as R.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from colossal_nb.parallel.compat import in_backward
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.trace import replaced_forwards
from colossal_nb.parallel.world import World

ATTENTION = "scaled_dot_product_attention"


@contextmanager
def recomputing(parallel: Parallel) -> Iterator[None]:
    """Around forwards and backwards: what the strategy says is checkpointed."""
    kind = parallel.strategy.recompute
    if kind == "full":
        chosen = blocks(parallel).items()
        with replaced_forwards([(block, _again(parallel, name, block.forward, block)) for name, block in chosen]):
            yield
    elif kind == "selective":
        before = getattr(functional, ATTENTION)
        setattr(functional, ATTENTION, _again(parallel, ATTENTION, before, None))
        try:
            yield
        finally:
            setattr(functional, ATTENTION, before)
    else:
        yield


def blocks(parallel: Parallel) -> dict[str, nn.Module]:
    """The repeated blocks by name: elements of one list, of one class and with modules inside, that train something.

    Of lists within lists the innermost; a block that a pipeline has opened to cut inside is left out.
    """
    model, found = parallel.model, dict[str, nn.Module]()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            inside = [(key, each) for key, each in module.named_children() if _is_composite(each)]
            kinds = Counter(type(each) for _, each in inside)
            prefix = f"{name}." if name else ""
            found |= {prefix + key: each for key, each in inside if kinds[type(each)] > 1}
    opened = () if parallel.pipeline is None else [unit.name for unit in parallel.pipeline.split.units]
    outer = {name for name in found if any(other.startswith(f"{name}.") for other in (*found, *opened))}
    return {name: block for name, block in found.items() if name not in outer}


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None and any(p.requires_grad for p in module.parameters())


def _again(
    parallel: Parallel, name: str, function: Callable[..., Any], block: nn.Module | None
) -> Callable[..., Any]:
    """The function, checkpointed in training. In evaluation, without gradients and inside of a backward as it is."""

    def called(*args: Any, **kwargs: Any) -> Any:
        trains = parallel.model.training and torch.is_grad_enabled() and not in_backward()
        # A tensor that carries another one behind it would come back without it.
        if not trains or any(hasattr(leaf, "whole_input") for leaf in leaves((args, kwargs))):
            return function(*args, **kwargs)
        weights, masks = parallel.precision.places, None if parallel.dropout is None else parallel.dropout.place()

        def run(*args: Any, **kwargs: Any) -> Any:
            if not in_backward():
                return function(*args, **kwargs)
            with ExitStack() as inside:
                inside.enter_context(_slice(parallel, name))
                inside.enter_context(parallel.precision.again(weights))
                if parallel.dropout is not None and masks is not None:
                    inside.enter_context(parallel.dropout.again(masks))
                if block is not None:
                    inside.enter_context(_same_buffers(block))
                if World.current().recorder.enabled:
                    inside.enter_context(World.current().ledger.again())
                return function(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return called


@contextmanager
def _slice(parallel: Parallel, name: str) -> Iterator[None]:
    recorder = World.current().recorder
    running = [each for each in recorder.open() if each.kind == "B"]
    number = running[-1].microbatch if running else -1
    token = recorder.begin("R", stage=parallel.place["pp"], microbatch=number, of=name)
    try:
        yield
    finally:
        recorder.end(token)


@contextmanager
def _same_buffers(block: nn.Module) -> Iterator[None]:
    """Running statistics have seen this batch already."""
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):  # batch norm writes past the version counter
                    buffer.copy_(value)
