"""What ranks must agree on: the loss of the whole batch, the parameters it reached, the data they were given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from colossal_nb.parallel import hyperparameters, trouble
from colossal_nb.parallel.batch import checksum, odd_ranks, ranks_text
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.losses import FIX, Part
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.world import World

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# sum, count, mixed counts, their spread, dtype, samples, spread of the counts, inexact parts, stops, guessed parts,
# parts that are made otherwise than any that was compared
_FIXED = 11
FIRST_CALLS = 3  # after parallelize, whose batches are compared whole and before anything is computed
SAMPLED = 1 << 14  # elements of each tensor that are compared in later calls


@dataclass(frozen=True)
class Totals:
    """The same on every rank. `active`: whether a parameter had a gradient on any rank; `sums`: of `more` over ranks.

    `uneven`: samples of different parts do not count alike, in a loss that is more than one mean or one sum.
    `guessed`: nothing says of what the loss is a mean. `new`: loss_fn does what it did in no step that was compared.
    """

    loss: float
    count: float
    dtype: torch.dtype
    active: dict[str, bool]
    uneven: bool
    guessed: bool
    new: bool
    sums: list[float]

    def tensor(self, device: str) -> torch.Tensor:
        """The loss as loss_fn would have returned it."""
        return torch.tensor(self.loss, dtype=self.dtype, device=device)


def totals(parallel: Parallel, parts: list[Part], data: int, more: list[float]) -> Totals:
    """Add up the parts of all ranks, and `more`, in one small all-reduce; every rank gets the same bits. `data`: see
    `sampled`.

    Raises ValueError on all ranks alike when they were given different data or optimizer settings, and when the loss is
    a mean over counts that do not grow together.
    """
    row = _row(parallel, parts)
    group = parallel.group()
    flags = len(row) - _FIXED
    row = torch.cat([row, torch.tensor(more, dtype=torch.float64)])
    if group.size > 1:
        every = torch.zeros(group.size, dtype=torch.float64)
        every[group.index] = data
        row = torch.cat([row, every])
        # dtype: every replica that computed a loss wrote the same one into its own place of a sum.
        group.run("all_reduce", [row], of="loss")
        odd = [group.ranks[index] for index in odd_ranks(row[-group.size :].tolist())]
        if odd:
            trouble.require_level(parallel)
        _refuse_odd(parallel, odd)
    total, count, mixed, spread, code, samples, counts_spread, inexact, stops, guessed, new = row[:_FIXED].tolist()
    _stop(parallel, stops)
    if _not_proportional(spread, count, mixed):
        raise ValueError(
            "loss_fn adds means over different counts, and their ratio is not the same in every part of the batch, so "
            f"the parts cannot be put together: {FIX}"
        )
    active = dict(zip(parallel.parameters, (row[_FIXED:][:flags] > 0).tolist(), strict=False))
    sums = row[_FIXED + flags :][: len(more)].tolist()
    loss = total / count if count else math.nan
    uneven = inexact > 0 and _not_proportional(counts_spread, samples, count)
    return Totals(loss, count, _DTYPES[int(code)], active, uneven, guessed > 0, new > 0, sums)


def _stop(parallel: Parallel, stops: float) -> None:
    """Where Stop was pressed on any rank all raise KeyboardInterrupt here, before the weights are touched."""
    stopping = World.current().stopping
    stopping.seen()
    if stops:
        trouble.stopped(parallel)
        raise stopping.landed()


def _not_proportional(spread: float, b: float, a: float) -> bool:
    """Whether numbers a_i and b_i with these sums have no common ratio; `spread` is the sum of a_i^2 / b_i (Cauchy)."""
    return spread * b - a * a > 1e-9 * a * a


def _row(parallel: Parallel, parts: list[Part]) -> torch.Tensor:
    """What `_FIXED` names, of this rank's parts; then a flag per parameter."""
    place = parallel.place
    fixed = [0.0] * _FIXED
    if parts and parallel.is_last and place["tp"] == place["sp"] == 0:
        fixed[0] = math.fsum(part.sum for part in parts)
        fixed[1] = sum(part.count for part in parts)
        fixed[2] = sum(part.mixed for part in parts)
        fixed[3] = sum(part.mixed**2 / part.count if part.count else math.inf * bool(part.mixed) for part in parts)
        fixed[5] = sum(part.samples for part in parts)
        fixed[6] = sum(part.count**2 / part.samples for part in parts)
        fixed[7] = sum(not part.exact for part in parts)
        fixed[9] = sum(part.guessed for part in parts)
        fixed[10] = sum(part.called not in parallel.loss_forms for part in parts)
        if place["dp"] == 0:
            fixed[4] = _DTYPES.index(parts[0].dtype)
    fixed[8] = float(World.current().stopping.asked)
    flags: list[float] = []
    if parallel.replicas > 1:
        flags = [float(p.grad is not None) for p in parallel.parameters.values()]
    return torch.tensor(fixed + flags, dtype=torch.float64)


def compare_data(parallel: Parallel, inputs: Any, targets: Any) -> None:
    """Compare a checksum of the batch and the optimizers' settings over the ranks, in the first calls; later `totals`
    does.

    Raises ValueError on all ranks alike that names the ranks whose data or settings differ.
    """
    group = parallel.group()
    if group.size > 1 and parallel.calls < FIRST_CALLS:
        value = checksum(leaves((inputs, targets))) ^ hyperparameters.digest(hyperparameters.known(parallel))
        _refuse_odd(parallel, differing(value, group, "batch checksum"))


def sampled(parallel: Parallel, inputs: Any, targets: Any) -> int:
    """A checksum of the batch that costs little, however large it is, of the optimizers' settings, and of the steps
    that this rank has ended."""
    if parallel.group().size == 1:
        return 0
    steps = sum(parallel.steps.finished.values())
    settings = hyperparameters.digest(hyperparameters.known(parallel))
    return checksum(leaves((inputs, targets)), SAMPLED) ^ steps ^ settings


def _refuse_odd(parallel: Parallel, odd: list[int]) -> None:
    if odd:
        hyperparameters.require_alike(hyperparameters.known(parallel), parallel.group())
        raise ValueError(
            f"the batch of {ranks_text(odd)} differs from the others': forward_backward takes the same global batch on "
            "every rank and cuts it itself; draw it from the same seed everywhere (torch.manual_seed, or a "
            "torch.Generator of your own), in a cell on all ranks, and leave out DistributedSampler and shards by rank"
        )


def differing(value: int, group: Group, of: str) -> list[int]:
    """The global ranks of a group whose 32-bit value is not the usual one."""
    row = torch.zeros(group.size, dtype=torch.int64)
    row[group.index] = value
    group.run("all_reduce", [row], of=of)
    return [group.ranks[index] for index in odd_ranks(row.tolist())]
