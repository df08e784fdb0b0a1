"""Where a difference begins: outputs of modules in the order of a forward, their gradients in that of a backward.

Both programs run once more with hooks on all modules, which keep a few rows of the first sample of every part of the
batch. A module whose output is cut is compared by the features that its weight says it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import batch_size, bounds
from colossal_nb.parallel.handle import Parallel, holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.tensor.vocabulary import gather
from colossal_nb.parallel.verify.bands import Band
from colossal_nb.parallel.verify.sequential import Sequential
from colossal_nb.parallel.verify.twins import WAITS, Twin
from colossal_nb.parallel.world import World
from colossal_nb.plan import Shard

ROWS = 8  # of a sample, its last ones


@dataclass
class Seen:
    """By module, then by the number of the sample: what its calls returned, and the gradients there. `order`: of the
    modules as they ended first."""

    outputs: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)
    gradients: dict[str, dict[int, list[Tensor]]] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        return list(self.outputs)


class Watch:
    """Hooks on the modules of one program, which runs `parts` of the batch one after another: (start, stop) each.

    `samples`: those of which rows are kept.
    """

    def __init__(self, model: nn.Module, parts: Sequence[tuple[int, int]], samples: Sequence[int]) -> None:
        self.model, self.parts, self.samples = model, parts, samples
        self.seen = Seen()
        self._part = -1

    @contextmanager
    def running(self) -> Iterator[None]:
        handles = [self.model.register_forward_pre_hook(self._begin)]
        handles += [module.register_forward_hook(self._hook(name)) for name, module in self.model.named_modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, *_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._part += 1
            start, stop = self.parts[self._part % len(self.parts)]
            if self._part >= len(self.parts):  # the parts run again: the last time counts
                for calls in (*self.seen.outputs.values(), *self.seen.gradients.values()):
                    for sample in range(start, stop):
                        calls.pop(sample, None)

    def _hook(self, name: str) -> Callable[..., None]:
        def ended(module: nn.Module, args: Any, output: Any) -> None:
            found = [leaf for leaf in leaves(output) if leaf.is_floating_point() and leaf.dim()]
            start, stop = self.parts[self._part % len(self.parts)]
            # What has no samples (positions, say) is made once for each part: its gradient is a sum over the part.
            found = [leaf for leaf in found if leaf.shape[0] % (stop - start) == 0]
            if found and self._part >= 0 and torch._C._current_graph_task_id() == -1:
                self._keep(name, found[0])

        return ended

    def _keep(self, name: str, output: Tensor) -> None:
        start, stop = self.parts[self._part % len(self.parts)]
        mine = [sample for sample in self.samples if start <= sample < stop]
        with torch.no_grad():
            whole = gather(output.detach())
        numbers = []
        for sample in mine:
            calls = self.seen.outputs.setdefault(name, {}).setdefault(sample, [])
            calls.append(_rows(whole, sample - start, stop - start))
            numbers.append((sample, len(calls) - 1))
        if output.requires_grad and type(output) is Tensor:

            def came(gradient: Tensor) -> None:
                for sample, number in numbers:
                    calls = self.seen.gradients.setdefault(name, {}).setdefault(sample, [])
                    calls += [torch.empty(0)] * (number + 1 - len(calls))
                    calls[number] = _rows(gradient.detach(), sample - start, stop - start)

            output.register_hook(came)  # type: ignore[no-untyped-call]


def _rows(x: Tensor, sample: int, samples: int) -> Tensor:
    """A few rows of one sample, in host memory of their own; of what does not begin with samples, of all."""
    if x.shape[0] % samples == 0:
        x = x.reshape(samples, x.shape[0] // samples, *x.shape[1:])[sample]
        x = x[0] if len(x) == 1 and x.dim() > 1 else x
    return x[-ROWS:].float().cpu().clone()


@dataclass(frozen=True)
class Place:
    """A module at which something differs, on one rank. `at`: its place in the order of the forward."""

    at: int
    name: str
    rank: int
    difference: float
    evidence: str = ""


def locate(twin: Twin, whole: Twin | None, program: Sequential, band: Band, run: Callable[[], None]) -> str:
    """A sentence on where the difference begins, "" where no module shows it; `run` runs the parallel program once.

    Collective.
    """
    parallel, samples = twin.parallel, batch_size(program.inputs)
    every = [start for start, stop in bounds(samples, parallel.replicas * parallel.microbatches) if stop > start]
    expected = Seen()
    if whole is not None:
        watch = Watch(whole.model, bounds(samples, program.parts), every)
        with watch.running():
            program.forward_backward(whole, 0)
        expected = watch.seen
    expected = objects.broadcast(expected, parallel.group(), WAITS, "verify")
    own = bounds(samples, parallel.replicas * parallel.microbatches)[parallel.place["dp"] :: parallel.replicas]
    watch = Watch(twin.model, [part for part in own if part[1] > part[0]], every)
    with watch.running():
        run()
    found = _places(_own_modules(parallel), watch.seen, expected, band.close)
    told: list[Any] = objects.all_gather(found, parallel.group(), "verify")
    return _sentence([each[0] for each in told if each[0]], [each[1] for each in told if each[1]])


def _sentence(forward: list[Place], backward: list[Place]) -> str:
    if forward:
        first = min(place.at for place in forward)
        name, ranks, some = _together([place for place in forward if place.at == first])
        return (f"the output of {name} is the first in a forward that differs (by {some.difference:.1e} of its size, "
                f"{ranks}){some.evidence}")  # fmt: skip
    if backward:
        first = max(place.at for place in backward)
        name, ranks, some = _together([place for place in backward if place.at == first])
        return (f"outputs of modules are right; the gradient that reaches the output of {name} is the first in a "
                f"backward that differs (by {some.difference:.1e} of its size, {ranks})")  # fmt: skip
    return ""


def _together(places: list[Place]) -> tuple[str, str, Place]:
    ranks = sorted({place.rank for place in places})
    said = f"rank{'s' * (len(ranks) > 1)} {','.join(map(str, ranks))}"
    return places[0].name or "the model", said, max(places, key=lambda place: (len(place.evidence), place.difference))


def _own_modules(parallel: Parallel) -> dict[str, nn.Module]:
    """Those that this rank has whole, or its slices of; a call of another stage's module returns what was received."""
    modules = dict(parallel.model.named_modules())
    foreign: set[str] = set()
    if parallel.pipeline is not None:
        split, number = parallel.pipeline.split, parallel.pipeline.number
        stages = list(zip(split.units, split.stage_of, strict=True))
        foreign = {unit.name for unit, stage in stages if stage != number}
        foreign -= {unit.name for unit, stage in stages if stage == number}
    return {
        name: module
        for name, module in modules.items()
        if name not in foreign and all(holds(p, parallel.rank) for p in module.parameters())
    }


def _places(
    modules: dict[str, nn.Module], seen: Seen, expected: Seen, close: float
) -> tuple[Place | None, Place | None]:
    """The first module whose output differs, and the last one whose gradient does."""
    rank = World.current().rank
    order = {name: at for at, name in enumerate(expected.order)}
    outputs, gradients = [], []
    factor = _factor(seen, expected, order, modules, close)
    for name, at in order.items():
        module = modules.get(name)
        if module is None or name not in seen.outputs:
            continue
        difference, evidence = _compared(module, seen.outputs[name], expected.outputs[name], 1.0)
        if not difference <= close:
            outputs.append(Place(at, name, rank, difference, evidence))
        if name in seen.gradients and name in expected.gradients:
            difference, _ = _compared(module, seen.gradients[name], expected.gradients[name], factor)
            if not difference <= close:
                gradients.append(Place(at, name, rank, difference))
    return outputs[0] if outputs else None, gradients[-1] if gradients else None


def _compared(module: nn.Module, found: Any, expected: Any, factor: float) -> tuple[float, str]:
    """The largest difference over samples and calls, and what else is odd."""
    worst, evidence = 0.0, ""
    for sample, calls in found.items():
        wanted = expected.get(sample, [])
        if any(bool(torch.isnan(call).any()) for call in calls) and not any(True for _ in module.parameters()):
            continue  # glue of another stage
        if len(calls) != len(wanted) and wanted:
            evidence = f": it is called {len(calls)} times for a part of the batch, in the sequential one {len(wanted)}"
            worst = max(worst, 1.0)
        for mine, whole in zip(calls, wanted, strict=False):
            own = _cut(module, mine, whole)
            if own is not None and mine.numel():
                size = float((own * factor).norm()) or 1.0
                difference = float((mine - own * factor).norm()) / size
                worst = difference if difference != difference else max(worst, difference)
    return worst, evidence


def _cut(module: nn.Module, mine: Tensor, whole: Tensor) -> Tensor | None:
    """Of the whole what this rank should have; None where that is not known."""
    if mine.shape == whole.shape:
        return whole
    weight = module._parameters.get("weight")
    layout = None if weight is None else layout_of(weight)
    held = None if layout is None else layout.slices(World.current().rank)
    if layout is None or held is None or mine.shape[:-1] != whole.shape[:-1] or len(held[0]) != mine.shape[-1]:
        return None
    if layout.global_shape[0] != whole.shape[-1] or not any(isinstance(p, Shard) for p in layout.placements):
        return None
    return whole[..., list(held[0])]


def _factor(seen: Seen, expected: Seen, order: dict[str, int], modules: dict[str, nn.Module], close: float) -> float:
    """What gradients of sums are times gradients of means: from the last module whose gradient both know."""
    for name in reversed(order):
        if name not in modules:
            continue
        for sample, calls in seen.gradients.get(name, {}).items():
            wanted = expected.gradients.get(name, {}).get(sample, [])
            if calls and wanted and calls[0].shape == wanted[0].shape and wanted[0].any():
                factor = float((calls[0] * wanted[0]).sum() / wanted[0].square().sum())
                if float((calls[0] - factor * wanted[0]).norm()) <= close * float(calls[0].norm()):
                    return factor
                return 1.0
    return 1.0
