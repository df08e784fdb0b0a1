"""Which optimizers both programs step with, and how the verdict says so."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colossal_nb.parallel import objects, optimizers
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.layouts import layout_of

NONE = "plain SGD, as no optimizer of this model was given to parallelize or has stepped yet"


@contextmanager
def chosen(parallel: Parallel) -> Iterator[str]:
    """Inside, the model's optimizers are those that move it in the user's program; gives their names. Collective."""
    before = parallel.optimizers
    every = [*before, *_made_afterwards(parallel)]
    usable = [each for each in every if not _wants_closure(each)]
    parallel.optimizers = usable
    try:
        yield _names(every, usable)
    finally:
        parallel.optimizers = before


def _names(every: list[torch.optim.Optimizer], usable: list[torch.optim.Optimizer]) -> str:
    if usable:
        return " and ".join(dict.fromkeys(type(each).__name__ for each in usable))
    return f"plain SGD, as {type(every[0]).__name__} wants a closure" if every else NONE


def _made_afterwards(parallel: Parallel) -> list[torch.optim.Optimizer]:
    """Optimizers that have stepped and hold parameters of the model, and nobody gave to parallelize. Collective."""
    gc.collect()  # one that a rank would collect later must not be there on some ranks alone
    number = {id(p): at for at, p in enumerate(parallel.parameters.values())}
    found = []
    for each in optimizers.stepped():
        held = [p for group in each.param_groups for p in group["params"]]
        foreign = any(id(p) not in number and layout_of(p) is not None for p in held)
        if any(id(p) in number for p in held) and not foreign and all(each is not own for own in parallel.optimizers):
            found.append((each, (type(each).__name__, [number.get(id(p)) for p in held])))
    told = objects.all_gather([what for _, what in found], parallel.group(), "verify")
    return [each for each, _ in found] if all(each == told[0] for each in told) else []


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is many evaluations (LBFGS), in which rounding grows without bound."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    return any(each.name == "closure" and each.default is inspect.Parameter.empty for each in parameters)
