"""What a region believes about its width: the smallest set of integers to change so that each rank's run is right.

A module may have its width in integers (`self.heads`, `self.split_size`) or read it from `x.shape`. Nothing is
guessed by name: a set is accepted when every rank's run of the region, with its own columns, gives its slice of the
whole run. So a wrong integer cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel.tensor.dataflow import is_node
from colossal_nb.parallel.tensor.deal import Deal
from colossal_nb.parallel.tensor.linear1d import narrow_input
from colossal_nb.parallel.tensor.probe import Region
from colossal_nb.parallel.tensor.values import Change

MOST_CHANGES = 3
MOST_TRIALS = 3000
WRONG_INTEGER = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError, ZeroDivisionError)


def find_changes(region: Region, dealt: Deal, ranks: int) -> tuple[tuple[Change, ...], bool] | None:
    """(changes, narrow) of the smallest set that makes each rank's run of the region right; None if there is none."""
    base = region.run(region.values).detach()
    candidates = list(_candidates(region, ranks)) if _even(dealt) else []
    narrows = (False, True) if _even(dealt) and _width_of_input(region) else (False,)
    trials = 0
    for count in range(MOST_CHANGES + 1):
        for chosen in combinations(candidates, count):
            if len({(change.module, change.attribute) for change in chosen}) < count:
                continue
            for narrow in narrows:
                trials += 1
                if trials > MOST_TRIALS:
                    return None
                if all(_right(region, dealt, ranks, rank, chosen, narrow, base) for rank in range(ranks)):
                    return chosen, narrow
    return None


def local_values(region: Region, dealt: Deal, rank: int) -> dict[str, Tensor]:
    """The column outputs as one rank has them."""
    values: dict[str, Tensor] = {}
    start = 0
    for name, value in region.values.items():
        size = value.shape[-1]
        mine = [i - start for i in dealt.column_parts[rank] if start <= i < start + size]
        values[name] = value[..., mine]
        start += size
    return values


def draws_alike(region: Region, dealt: Deal, ranks: int) -> bool:
    """Whether a training run draws as many random numbers on every rank.

    Where parts differ in size, dropout between columns and row would leave the ranks at different places of one
    random sequence, and what is whole on all of them would be dropped differently.
    """
    states = [_state_after(region, local_values(region, dealt, rank)) for rank in range(ranks)]
    return all(torch.equal(states[0], state) for state in states)


def draws(region: Region) -> bool:
    """Whether a training run draws random numbers between columns and row."""
    return not torch.equal(_state_after(region, region.values), _state_after(region, None))


def _state_after(region: Region, values: dict[str, Tensor] | None) -> Tensor:
    """The random state after a training run with these column outputs; with None, before one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if values is not None:
            region.call.module.train()
            region.run(values)
            region.call.module.eval()
        return torch.get_rng_state()


@contextmanager
def changed(modules: dict[str, nn.Module], changes: Sequence[Change]) -> Iterator[None]:
    """Inside the block the modules believe the local numbers."""
    try:
        for change in changes:
            setattr(modules[change.module], change.attribute, change.local)
        yield
    finally:
        for change in changes:
            setattr(modules[change.module], change.attribute, change.whole)


def _right(
    region: Region, dealt: Deal, ranks: int, rank: int, changes: Sequence[Change], narrow: bool, base: Tensor
) -> bool:
    modules = {call.name: call.module for call in (region.call, *region.call.descendants())}
    width = _width_of_input(region) if narrow else 0

    def enter(tensor: Tensor) -> Any:
        if narrow and tensor is region.call.args[0]:
            return narrow_input(tensor, width // ranks)
        return tensor.detach().clone()

    try:
        with changed(modules, changes):
            arrived = region.run(local_values(region, dealt, rank), enter).detach()
    except WRONG_INTEGER:
        return False
    expected = base[..., list(dealt.row_parts[rank])]
    return arrived.shape == expected.shape and torch.allclose(arrived, expected, rtol=1e-4, atol=1e-5)


def _even(dealt: Deal) -> bool:
    """All ranks hold equally many features, so that one number is true on every rank."""
    return len({len(part) for part in dealt.row_parts}) == len({len(part) for part in dealt.column_parts}) == 1


def _width_of_input(region: Region) -> int:
    """Features of the region's first argument, if that is a float tensor that could be shown narrow; else 0."""
    first = region.call.args[0] if region.call.args else None
    narrow = isinstance(first, Tensor) and first.is_floating_point() and first.ndim > 1
    return first.shape[-1] if isinstance(first, Tensor) and narrow else 0


def _candidates(region: Region, ranks: int) -> Iterator[Change]:
    """The integer attributes between the columns and the row that a divisor of `ranks` divides, full division first."""
    calls = [region.call, *region.call.descendants()]
    modules = {c.name: c.module for c in calls if not is_node(c.module) and c.name not in region.constants}
    integers = [
        (name, attribute, value)
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if type(value) is int and value > 1 and not attribute.startswith("_")
    ]
    for divisor in (d for d in range(ranks, 1, -1) if ranks % d == 0):
        for name, attribute, value in integers:
            if value % divisor == 0:
                yield Change(name, attribute, value, value // divisor)
