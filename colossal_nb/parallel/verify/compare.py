"""What every rank has, against its part of what the sequential program has; one whole tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.handle import Parallel, holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part
from colossal_nb.parallel.verify.bands import Band
from colossal_nb.parallel.verify.evidence import Facts, facts_of, words
from colossal_nb.parallel.verify.result import Row
from colossal_nb.parallel.verify.room import whole_bytes
from colossal_nb.parallel.verify.sequential import Trained
from colossal_nb.parallel.verify.twins import WAITS

MOST_EXPLAINED = 12
PORTION_BYTES = 4 << 20
Expected = tuple[Tensor, "float | Tensor", Tensor]  # value, size, what it is a change of


@dataclass(frozen=True)
class Sides:
    """Both programs' results on this rank; `expected` is empty but on the first rank of the group. `parameters`: the
    model's, and what is trained outside it."""

    parallel: Parallel
    parameters: Mapping[str, Tensor]
    band: Band
    expected: Trained
    found: Trained

    @property
    def largest(self) -> float:
        """The largest entry of the sequential program's gradients."""
        sizes = [g.abs().max().item() for g in self.expected.gradients.values() if g is not None and g.numel()]
        return max(sizes, default=0.0)

    def told(self, value: object) -> object:
        """A value of the first rank, on all. Collective."""
        return objects.broadcast(value, self.parallel.group(), WAITS, "verify")

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that lies as the parameter does."""
        layout = layout_of(self.parameters[name])
        part = whole if layout is None else local_part(whole, layout, self.parallel.rank)
        assert part is not None
        return part

    def held(self, name: str) -> bool:
        return holds(self.parameters[name], self.parallel.rank)


def losses(sides: Sides) -> Row:
    """The loss of each step, in one row. Collective."""
    expected = sides.told(sides.expected.losses)
    assert isinstance(expected, list)
    allowed = sides.band.loss
    pairs = list(zip(sides.found.losses, expected, strict=True))
    differences = [abs(found - wanted) / max(abs(wanted), 1e-3) for found, wanted in pairs]
    wrong = [step for step, difference in enumerate(differences) if not difference <= allowed]
    if not wrong:
        worst = max(range(len(pairs)), key=differences.__getitem__)
        return Row("loss", f"step {worst + 1}", differences[worst], allowed)
    first = wrong[0]
    said = f"{pairs[first][0]:.6g} instead of {pairs[first][1]:.6g}"
    return Row("loss", f"step {first + 1}", differences[first], allowed, sides.parallel.group().ranks, said)


def gradients(sides: Sides) -> list[Row]:
    """Those of the first step: a row for each parameter, in the model's order. Collective."""
    return _rows(sides, "gradient", sides.band.gradient)


def statistics(sides: Sides) -> list[Row]:
    """Running statistics after the first step, means on the scale of the deviations: a row for each. Collective."""
    expected = sides.told(sides.expected.statistics)
    assert isinstance(expected, dict)
    group, allowed, mine = sides.parallel.group(), sides.band.loss, dict[str, float]()
    for name, value in sides.found.statistics.items():
        if holds(sides.parallel.model.get_buffer(name), sides.parallel.rank):
            beside = name.replace("running_mean", "running_var")
            spread = expected[beside].abs().max().sqrt().item() if beside in expected else 0.0
            size = max(expected[name].abs().max().item(), spread, 1e-30)
            mine[name] = (value.cpu().double() - expected[name].double()).abs().max().item() / size
    told: list[dict[str, float]] = objects.all_gather(mine, group, "verify")
    rows = []
    for name in expected:
        found = {rank: each[name] for rank, each in zip(group.ranks, told, strict=True) if name in each}
        wrong = tuple(rank for rank, difference in found.items() if not difference <= allowed)
        rows.append(Row("statistic", name, _largest(list(found.values())), allowed, wrong))
    return rows


def weights(sides: Sides) -> list[Row]:
    """After the last step: a row for each parameter, in the model's order. Collective."""
    return _rows(sides, "weight", sides.band.weight)


def _rows(sides: Sides, what: str, allowed: float) -> list[Row]:
    mine: dict[str, float] = {}
    for name, expected in _each(sides, what, list(sides.parameters)):
        if expected is not None and sides.held(name):
            value, size, _ = expected
            size = sides.part(name, size) if isinstance(size, Tensor) else size
            mine[name] = sides.band.difference(_found(sides, what, name, value), sides.part(name, value), size, what)
    told: list[dict[str, float]] = objects.all_gather(mine, sides.parallel.group(), "verify")
    ranks = sides.parallel.group().ranks
    wrong = {
        name: tuple(rank for rank, each in zip(ranks, told, strict=True) if not each.get(name, 0.0) <= allowed)
        for name in sides.parameters
    }
    failed = [name for name, where in wrong.items() if where]
    explained = _explained(sides, what, failed[-MOST_EXPLAINED:])
    return [
        Row(what, name, _largest([each[name] for each in told if name in each]), allowed, wrong[name],
            explained.get(name, ""))
        for name in sides.parameters
        if any(name in each for each in told)
    ]  # fmt: skip


def _largest(values: list[float]) -> float:
    return max(values, key=lambda value: (value != value, value))


def _each(sides: Sides, what: str, names: list[str]) -> Iterator[tuple[str, Expected | None]]:
    """What the sequential program has of each, on every rank; None where it has nothing. Collective."""
    largest, here = sides.largest, sides.parallel.group().index == WAITS
    for some in _portions(sides, names):
        told = sides.told([_expected(sides, what, name, largest) for name in some] if here else None)
        assert isinstance(told, list)
        yield from zip(some, told, strict=True)


def _portions(sides: Sides, names: list[str]) -> Iterator[list[str]]:
    """Names of parameters that are sent together: many small ones, or a large one."""
    some: list[str] = []
    size_bytes = 0
    for name in names:
        more = whole_bytes(sides.parameters[name])
        if some and size_bytes + more > PORTION_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(name)
        size_bytes += more
    if some:
        yield some


def _expected(sides: Sides, what: str, name: str, largest: float) -> Expected | None:
    done, band = sides.expected, sides.band
    slope, before, after = done.gradients.get(name), done.before[name], done.weights[name]
    if what == "weight":
        return after, band.sizes_of_weight(after, before, slope, largest), before
    return None if slope is None else (slope, band.size_of_gradient(slope, largest), torch.zeros(()))


def _found(sides: Sides, what: str, name: str, like: Tensor) -> Tensor:
    value = (sides.found.gradients if what == "gradient" else sides.found.weights)[name]
    return torch.zeros_like(sides.part(name, like)) if value is None else value.cpu()


def _explained(sides: Sides, what: str, names: list[str]) -> dict[str, str]:
    """What the difference of each looks like. Collective."""
    found = {}
    for name, expected in _each(sides, what, names):
        assert expected is not None
        value, _, before = expected
        facts: Facts | None = None
        if sides.held(name):
            start = sides.part(name, before) if before.dim() else before
            change = _found(sides, what, name, value) - start
            p = sides.parameters[name]
            facts = facts_of(change, value - before, p, sides.band.close)
        every = objects.all_gather(facts, sides.parallel.group(), "verify")
        ranks = sides.parallel.group().ranks
        found[name] = words(what, {r: each for r, each in zip(ranks, every, strict=True) if each is not None})
    return found
