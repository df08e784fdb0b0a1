"""Running statistics of batch and instance norms: those of one rank that runs all parts in their order.

A call on one part of the batch makes (1 - m) r + m s of a running statistic r. Of part k of the batch a replica knows
how far its own calls have moved r: u_k = after - a_k before, with a_k = (1 - m) ** calls. One rank that runs all parts
in their order makes sum_k u_k prod_{j > k} a_j of them, the first part's `before` being kept in it: one sum over dp.
With momentum=None all calls of a training count alike: a_k = n / (n + calls) after n of them.

Under pp the stage that counts for a norm then gives the others what it has: all ranks read the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import checksum
from colossal_nb.parallel.compat import in_backward
from colossal_nb.parallel.handle import Parallel, holds
from colossal_nb.parallel.kept import Owners
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan import On

FUNCTIONS = ("batch_norm", "instance_norm")  # of torch: all of torch.nn and torch.nn.functional ends in them
PLACES = slice(3, 7)  # of running_mean, running_var, whether the batch's are used, momentum, in their arguments
NAMES = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class _Norm:
    """A layer's running statistics. `begun`: batches tracked before; `momentum`: of its calls, unless `cumulative`."""

    mean: Tensor
    var: Tensor
    tracked: Tensor | None
    begun: Tensor
    cumulative: bool
    momentum: float = 0.0

    @property
    def size(self) -> int:
        return self.mean.numel() + self.var.numel()

    def moved(self) -> Tensor:
        """By how many batches."""
        return self.begun if self.tracked is None else self.tracked - self.begun


@dataclass
class _Run:
    """One part of the batch on this rank: the statistics before it, and how often each norm was called."""

    part: int
    before: Tensor
    calls: list[float]


class Statistics:
    """What one forward_backward, or one model(x), makes of the running statistics. Nothing without such norms."""

    def __init__(self, parallel: Parallel, owners: Owners) -> None:
        self.parallel = parallel
        self.norms = _norms(parallel, owners) if parallel.replicas > 1 else []
        self.staged = _staged(parallel, owners) if parallel.pipeline is not None else []
        self.runs: list[_Run] = []
        self.settled: set[int] = set()  # ids of the buffers that were put together
        self.once: dict[str, int] = {}  # checksums of other buffers after the first part of the first batch
        self._place = {id(norm.mean): place for place, norm in enumerate(self.norms)}
        self._begun = 0
        self._dtype = torch.float32
        for norm in self.norms:
            self._dtype = torch.promote_types(self._dtype, norm.mean.dtype)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forwards and backwards: calls are counted."""
        before = {name: getattr(torch, name) for name in FUNCTIONS} if self.norms else {}
        for name, function in before.items():
            setattr(torch, name, self._counting(function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(torch, name, function)

    def begin(self, part: int) -> None:
        """What follows belongs to this part of the global batch."""
        if not self.parallel.calls and self._begun == 1:
            self.once = {name: checksum([each]) for name, each in _others(self.parallel, self).items()}
        self._begun += 1
        if self.norms:
            self.runs.append(_Run(part, self._flat(), [0.0] * len(self.norms)))

    def settle(self, parts: int) -> None:
        """Give every rank what one makes of all `parts`. Collective over dp, then pp, where there are such norms."""
        if self.norms:
            self._join(parts)
        if any(self.staged):
            self._exchange()

    def _join(self, parts: int) -> None:
        """Of all replicas."""
        count, device = len(self.norms), self.norms[0].mean.device
        own = torch.zeros(parts, count, dtype=torch.float64)
        for run in self.runs:
            own[run.part] = torch.tensor(run.calls, dtype=torch.float64)
        tracked = torch.stack([norm.moved().to(self._dtype) for norm in self.norms]) * bool(self.runs)
        # As a rule every part calls a layer as often as every other part does.
        alike = own[self.runs[0].part if self.runs else 0].expand(parts, count)
        group = self.parallel.group("dp")
        row = torch.cat([self._share(alike), tracked, own.flatten().to(device, self._dtype)])
        group.run("all_reduce", [row], of="statistics")
        values, tracked, calls = torch.split(row, [len(row) - count - parts * count, count, parts * count])
        every = calls.view(parts, count).cpu().double()
        if not torch.equal(every, every[:1].expand(parts, count)):
            values = self._share(every)
            group.run("all_reduce", [values], of="statistics")
        self._write(values, tracked, every.sum(0).tolist())

    def _exchange(self) -> None:
        """Each stage's to the others, as bytes: those of all dtypes in one call, and nothing is rounded."""
        group = self.parallel.group("pp")
        own = [each.detach().contiguous().view(-1).view(torch.uint8) for each in self.staged[group.index]]
        device = self.parallel.device
        given = torch.cat(own) if own else torch.empty(0, dtype=torch.uint8, device=device)
        found = [given.new_empty(sum(each.nbytes for each in buffers)) for buffers in self.staged]
        group.run("all_gather", [*found, given], of="statistics")
        for stage, (buffers, row) in enumerate(zip(self.staged, found, strict=True)):
            for buffer, part in zip(buffers, torch.split(row, [each.nbytes for each in buffers]), strict=True):
                if stage != group.index:
                    # A part may begin anywhere; its copy is aligned.
                    buffer.data.copy_(part.clone().view(buffer.dtype).view_as(buffer))
                self.settled.add(id(buffer))

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        undone = self.parallel.strategy.recompute == "full"  # what a second run of a block moves is put back

        def called(*args: Any, **kwargs: Any) -> Any:
            mean, _, moves, momentum = args[PLACES] if len(args) >= PLACES.stop else (None, None, False, 0.0)
            place = self._place.get(id(mean))
            if place is not None and moves and self.runs and not (undone and in_backward()):
                self.runs[-1].calls[place] += 1
                self.norms[place].momentum = float(momentum)
            return function(*args, **kwargs)

        return called

    def _flat(self) -> Tensor:
        """All statistics as they are now, in memory of their own."""
        both = [each.detach().reshape(-1) for norm in self.norms for each in (norm.mean, norm.var)]
        return torch.cat(both).to(self._dtype)

    def _share(self, calls: Tensor) -> Tensor:
        """This rank's term of the new statistics; `calls`: of each part and norm."""
        now, sofar, total = self._flat(), calls.new_zeros(len(self.norms)), calls.sum(0)
        keep = 1 - torch.tensor([norm.momentum for norm in self.norms], dtype=torch.float64)
        cumulative = torch.tensor([norm.cumulative for norm in self.norms])
        begun = torch.tensor([float(norm.begun) if norm.cumulative else 0.0 for norm in self.norms]).double()
        share = torch.zeros_like(now)
        for run, after in zip(self.runs, [*(run.before for run in self.runs[1:]), now], strict=False):
            mine, later = calls[run.part], calls[run.part + 1 :].sum(0)
            seen = begun + sofar
            decay = torch.where(cumulative, seen / (seen + mine).clamp(min=1), keep**mine)
            weight = torch.where(cumulative, (seen + mine) / (begun + total).clamp(min=1), keep**later)
            old = self._spread(decay * (run.part > 0)) * run.before
            share += self._spread(weight) * (after - old)
            sofar = sofar + mine
        return share

    def _spread(self, numbers: Tensor) -> Tensor:
        """A number of each norm for each of its statistics."""
        sizes = torch.tensor([norm.size for norm in self.norms])
        return numbers.repeat_interleave(sizes).to(self.norms[0].mean.device, self._dtype)

    def _write(self, values: Tensor, tracked: Tensor, calls: list[float]) -> None:
        each = torch.split(values, [norm.size for norm in self.norms])
        for norm, own, moved, called in zip(self.norms, each, tracked, calls, strict=True):
            if not called:
                continue
            # Past torch's count of writes, as batch_norm itself does: a backward may still be to come.
            norm.mean.data.copy_(own[: norm.mean.numel()].view_as(norm.mean))
            norm.var.data.copy_(own[norm.mean.numel() :].view_as(norm.var))
            self.settled |= {id(norm.mean), id(norm.var), id(norm.tracked)}
            if norm.tracked is not None:
                norm.tracked.data.copy_(norm.begun + moved.round().to(norm.begun.dtype))


def _norms(parallel: Parallel, owners: Owners) -> list[_Norm]:
    """Those that move in a forward of this rank's stage, the same on all replicas."""
    found = []
    for module in owners.values():
        mean, var, tracked = (module._buffers.get(name) for name in NAMES)
        if module.training and mean is not None and var is not None and holds(mean, parallel.rank):
            begun = torch.zeros((), dtype=torch.long, device=mean.device) if tracked is None else tracked.clone()
            found.append(_Norm(mean, var, tracked, begun, tracked is not None and _is_cumulative(module)))
    return found


def _staged(parallel: Parallel, owners: Owners) -> list[list[Tensor]]:
    """By stage, the buffers that a forward moves on that stage and that count there, the same on all ranks. A buffer
    without a layout is moved alike by all stages."""
    found: dict[int, tuple[int, Tensor]] = {}
    for module in owners.values():
        buffers = [module._buffers.get(name) for name in NAMES]
        if not module.training or buffers[0] is None or buffers[1] is None:
            continue
        for buffer in buffers:
            layout = None if buffer is None else layout_of(buffer)
            placement = None if layout is None else layout.placement("pp")
            if buffer is not None and isinstance(placement, On):
                found[id(buffer)] = placement.coordinate, buffer
    stages = range(parallel.mesh.axis_size("pp"))
    return [[buffer for at, buffer in found.values() if at == stage] for stage in stages]


def _is_cumulative(module: nn.Module) -> bool:
    return getattr(module, "momentum", 0.0) is None and not isinstance(module, _InstanceNorm)


def _others(parallel: Parallel, statistics: Statistics) -> dict[str, Tensor]:
    """The buffers that nothing above puts together, and that are no running statistics of torch's norms."""
    norms = [module for module in parallel.model.modules() if isinstance(module, _NormBase)]
    done = {id(each) for norm in norms for each in norm.buffers()} | statistics.settled
    return {name: each for name, each in parallel.model.named_buffers() if id(each) not in done and not each.is_meta}


def note_others(parallel: Parallel, statistics: Statistics) -> None:
    """After the first forward_backward: name what else the forward moves, where it is not what one device makes.
    Collective, once, where the model has buffers."""
    parts = parallel.replicas * parallel.microbatches
    if parts * parallel.mesh.axis_size("pp") == 1 or parallel.calls or not any(True for _ in parallel.model.buffers()):
        return
    others, moving = _others(parallel, statistics), set().union(*parallel.moving.values())
    own = {name: checksum([each]) for name, each in others.items() if name in moving}
    mine = {name: (value, statistics.once.get(name, value) != value) for name, value in own.items()}
    group = parallel.group()
    told = objects.all_gather(mine, group, "buffers")
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for each in told for name in each):
        moved = {rank: each[name] for rank, each in zip(group.ranks, told, strict=True) if name in each}
        more = any(again for _, again in moved.values())
        if text := _fault(parallel, {rank: value for rank, (value, _) in moved.items()}, more):
            found.setdefault(text, []).append(name)
    for text, names in found.items():
        World.current().note(text.format(names=", ".join(names), s="s" * (len(names) > 1), n=parallel.microbatches))


def _fault(parallel: Parallel, moved: dict[int, int], more: bool) -> str:
    """What is wrong with a buffer; `moved`: its checksum on the ranks where it moves, `more`: in more than one part."""
    places = {rank: parallel.mesh.coordinate(rank) for rank in range(parallel.mesh.size)}
    for place in places.values():
        replicas = [rank for rank, at in places.items() if at | {"dp": 0} == place | {"dp": 0}]
        if len({moved.get(rank) for rank in replicas}) > 1:
            return _OTHERS
    if more:
        return _COUNTED
    return _STAGED if moved and len(moved) < len(places) else ""


_OTHERS = (
    "the forward writes into the buffer{s} {names}: each replica's part of the batch makes other values, so they "
    "differ between the ranks, and from those of one device (the running statistics of batch and instance norms do not)"
)
_COUNTED = (
    "the forward writes into the buffer{s} {names} in each of the {n} microbatches, not once in a step: a count or an "
    "average there is not that of one device; write to it outside of the forward, or take microbatches=1"
)
_STAGED = (
    "the forward writes into the buffer{s} {names} on one pipeline stage alone: the ranks of other stages read what "
    "was there before"
)
