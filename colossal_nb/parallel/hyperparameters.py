"""Are the settings of the optimizers (lr, betas, weight_decay, ...) the same on all ranks?

A name that was set in a cell on fewer ranks has another value there, and so has a draw without a common seed: each rank
would go on with its own learning rate and tear the weights. A digest travels with sums that are made anyway; only where
it differs do the ranks tell each other the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import ranks_text
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.world import World

Key = tuple[int, int, str]  # optimizer, param group, name
_MOST_SHOWN = 3
_ABSENT = "(none)"
_PLAIN: dict[type, Callable[[Any], str]] = {
    float: repr, int: lambda value: repr(float(value)), bool: repr, type(None): repr, str: repr, complex: repr
}  # fmt: skip


def digest(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """32 bits over all settings: equal ones give equal numbers on every rank."""
    return zlib.crc32(repr(list(_settings(optimizers).items())).encode())


def stepped(optimizer: torch.optim.Optimizer, p: Tensor) -> None:
    """Remember, until the next forward_backward, an optimizer of a parallel parameter that steps and that nobody gave
    to parallelize."""
    for parallel in World.current().parallels:
        if not any(each is optimizer for each in known(parallel)) and any(
            each is p for each in parallel.parameters.values()
        ):
            parallel.stepped.append(optimizer)


def known(parallel: Parallel) -> list[torch.optim.Optimizer]:
    """Those given to parallelize, then those that have stepped since the last forward_backward: alike on all ranks."""
    return [*parallel.optimizers, *parallel.stepped]


def require_alike(optimizers: list[torch.optim.Optimizer], group: Group) -> None:
    """Raise ValueError on all ranks alike that says which settings differ, and where. Collective."""
    told: list[dict[Key, str]] = objects.all_gather(_settings(optimizers), group, "optimizer settings")
    keys = list(dict.fromkeys(key for each in told for key in each))
    odd = [key for key in keys if len({each.get(key) for each in told}) > 1]
    if odd:
        said = [_said(key, [each.get(key, _ABSENT) for each in told], optimizers, group) for key in odd[:_MOST_SHOWN]]
        more = f", and {len(odd) - _MOST_SHOWN} more" if len(odd) > _MOST_SHOWN else ""
        raise ValueError(
            f"the optimizer's settings differ between the ranks: {'; '.join(said)}{more}. Weights would drift apart: "
            "give it the same numbers everywhere. Usual causes: a name that was set in a cell that ran on fewer ranks "
            "(run that cell on all ranks), or a random number without a common seed (random.Random(), default_rng())"
        )


def _said(key: Key, values: list[str], optimizers: list[torch.optim.Optimizer], group: Group) -> str:
    number, place, name = key
    where = f"param group {place}"
    if len(optimizers) > 1:
        where += f" of optimizer {number} ({type(optimizers[number]).__name__})"
    by_value: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    shown = " and ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())
    return f"{name} of {where} is {shown}"


def _settings(optimizers: Iterable[torch.optim.Optimizer]) -> dict[Key, str]:
    return {
        (number, place, name): text
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and (text := _text(value)) is not None
    }


def _text(value: Any) -> str | None:
    """A value as text that is the same for equal ones; None for what is no setting (a function, a table)."""
    if (plain := _PLAIN.get(type(value))) is not None:
        return plain(value)
    if isinstance(value, Tensor):
        return None if value.numel() != 1 or value.is_meta else _text(value.item())
    if isinstance(value, Real):  # numpy's scalars too
        return repr(float(value))
    if isinstance(value, tuple | list):
        parts = [_text(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return None
