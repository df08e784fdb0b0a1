"""Where a difference begins: outputs of modules, call by call in the order in which they end in a forward, their
gradients in that of a backward.

Both programs run once more with hooks on all modules, which keep a few rows of the first sample of every part of the
batch. A module whose output is cut is compared by the features that its weight says it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
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


Call = tuple[str, int]  # a module, and which of its calls for one sample: 0, 1, ...


@dataclass
class Seen:
    """What each call returned for each sample, in the order in which calls end, and the gradients there."""

    outputs: dict[Call, dict[int, Tensor]] = field(default_factory=dict)
    gradients: dict[Call, dict[int, Tensor]] = field(default_factory=dict)

    def counts(self) -> dict[str, dict[int, int]]:
        """By module, how often it is called for each sample."""
        found: dict[str, dict[int, int]] = {}
        for (name, _), samples in self.outputs.items():
            of = found.setdefault(name, {})
            of.update({sample: of.get(sample, 0) + 1 for sample in samples})
        return found


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
        calls = {sample: self._call(name, sample) for sample in mine}
        for sample, call in calls.items():
            self.seen.outputs.setdefault(call, {})[sample] = _rows(whole, sample - start, stop - start)
        if output.requires_grad and type(output) is Tensor:

            def came(gradient: Tensor) -> None:
                for sample, call in calls.items():
                    rows = _rows(gradient.detach(), sample - start, stop - start)
                    self.seen.gradients.setdefault(call, {})[sample] = rows

            output.register_hook(came)  # type: ignore[no-untyped-call]

    def _call(self, name: str, sample: int) -> Call:
        return name, next(nth for nth in count() if sample not in self.seen.outputs.get((name, nth), {}))


def _rows(x: Tensor, sample: int, samples: int) -> Tensor:
    """A few rows of one sample, in host memory of their own; of what does not begin with samples, of all."""
    if x.shape[0] % samples == 0:
        x = x.reshape(samples, x.shape[0] // samples, *x.shape[1:])[sample]
        x = x[0] if len(x) == 1 and x.dim() > 1 else x
    return x[-ROWS:].float().cpu().clone()


@dataclass(frozen=True)
class Place:
    """A call of a module at which something differs, on one rank. `at`: its place in the order of the forward."""

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
    return places[0].name, said, max(places, key=lambda place: (len(place.evidence), place.difference))


def _own_modules(parallel: Parallel) -> dict[str, nn.Module]:
    """Those that this rank has whole, or its slices of; a call of another stage's module returns what was received."""
    modules = dict(parallel.model.named_modules())
    foreign: set[str] = set()
    if parallel.pipeline is not None:
        split, number = parallel.pipeline.split, parallel.pipeline.number
        stages = list(zip(split.units, split.stage_of, strict=True))
        foreign = {unit.name for unit, stage in stages if stage != number}
        foreign -= {unit.name for unit, stage in stages if stage == number}
    # A module that units of several stages share (an activation, say) is called less often here: no call is the same.
    elsewhere = {id(module) for name in foreign & modules.keys() for module in modules[name].modules()}
    return {
        name: module
        for name, module in modules.items()
        if id(module) not in elsewhere and all(holds(p, parallel.rank) for p in module.parameters())
    }


def _places(
    modules: dict[str, nn.Module], seen: Seen, expected: Seen, close: float
) -> tuple[Place | None, Place | None]:
    """The first call whose output differs, and the last one whose gradient does."""
    rank, factor = World.current().rank, _factor(seen, expected, modules, close)
    found, wanted = seen.counts(), expected.counts()
    outputs, gradients = [], []
    for at, call in enumerate(expected.outputs):
        name, nth = call
        module = modules.get(name)
        if module is None or call not in seen.outputs:
            continue
        most = max(wanted[name].values())
        said = (name or "the model") + (f" (call {nth + 1} of {most})" if most > 1 else "")
        difference = _compared(module, seen.outputs[call], expected.outputs[call], 1.0)
        evidence = _miscounted(module, nth, seen.outputs[call], found[name], wanted[name])
        if evidence or not difference <= close:
            outputs.append(Place(at, said, rank, max(difference, 1.0) if evidence else difference, evidence))
        if call in seen.gradients and call in expected.gradients:
            difference = _compared(module, seen.gradients[call], expected.gradients[call], factor)
            if not difference <= close:
                gradients.append(Place(at, said, rank, difference))
    return outputs[0] if outputs else None, gradients[-1] if gradients else None


def _compared(module: nn.Module, found: Mapping[int, Tensor], expected: Mapping[int, Tensor], factor: float) -> float:
    """The largest difference over samples."""
    worst = 0.0
    for sample in found.keys() & expected.keys():
        mine, own = found[sample], _cut(module, found[sample], expected[sample])
        if own is not None and not _glue(module, mine):
            size = float((own * factor).norm()) or 1.0
            difference = float((mine - own * factor).norm()) / size
            worst = difference if difference != difference else max(worst, difference)
    return worst


def _glue(module: nn.Module, mine: Tensor) -> bool:
    """Whether this is what another stage's glue makes of nothing."""
    return bool(torch.isnan(mine).any()) and not any(True for _ in module.parameters())


def _miscounted(
    module: nn.Module, nth: int, mine: Mapping[int, Tensor], found: Mapping[int, int], wanted: Mapping[int, int]
) -> str:
    """That a module is called more or less often than it should be, said at the last call that both programs have."""
    for sample, output in mine.items():
        has, should = found[sample], wanted.get(sample, 0)
        if should and has != should and nth == min(has, should) - 1 and not _glue(module, output):
            return f": it is called {has} times for a part of the batch, in the sequential one {should}"
    return ""


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


def _factor(seen: Seen, expected: Seen, modules: dict[str, nn.Module], close: float) -> float:
    """What gradients of sums are times gradients of means: from the last call whose gradient both know."""
    for call in reversed(expected.outputs):
        known = seen.gradients.get(call, {}) if call[0] in modules else {}
        for sample, mine in known.items():
            wanted = expected.gradients.get(call, {}).get(sample)
            if wanted is not None and mine.shape == wanted.shape and wanted.any():
                factor = float((mine * wanted).sum() / wanted.square().sum())
                if float((mine - factor * wanted).norm()) <= close * float(mine.norm()):
                    return factor
                return 1.0
    return 1.0
