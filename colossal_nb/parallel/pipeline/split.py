"""The plan of a pipeline: which unit runs on which stage, which tensors cross, who holds which parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from colossal_nb.parallel.absent import absent_like
from colossal_nb.parallel.pipeline.cut import best_cuts, heaviest, stages_of
from colossal_nb.parallel.pipeline.dataflow import Flow, Value, follow
from colossal_nb.parallel.pipeline.units import choose_units
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.trace import Call, Trace

WORTHLESS = 1.5  # a split whose heaviest stage is so much heavier than it had to be is refused


@dataclass(frozen=True, eq=False)
class Unit:
    """A module call that runs on one stage. `template` is what it returned, with placeholders for the tensors."""

    name: str
    nth: int
    flops: int
    has_parameters: bool
    template: Any

    def __str__(self) -> str:
        return self.name if self.nth == 0 else f"{self.name} (call {self.nth + 1})"


@dataclass(frozen=True, eq=False)
class Split:
    """A model's forward dealt to stages.

    needs[k]: the values that stage k gets from earlier stages; mutated: values that somebody writes into;
    holders[name]: the stages that need a parameter's value, lowest first; buffers[name]: the stage whose copy counts,
    for the buffers of units (any other is the same everywhere).
    """

    stages: int
    units: tuple[Unit, ...]
    stage_of: tuple[int, ...]
    needs: tuple[frozenset[Value], ...]
    mutated: frozenset[Value]
    holders: dict[str, tuple[int, ...]]
    buffers: dict[str, int]
    output: Any

    def owned(self, stage: int) -> list[int]:
        """The units of one stage."""
        return [index for index, at in enumerate(self.stage_of) if at == stage]

    def sends(self, stage: int) -> dict[Value, tuple[int, ...]]:
        """What a stage makes for others, and for whom."""
        made: dict[Value, tuple[int, ...]] = {}
        for target in range(self.stages):
            for value in sorted(self.needs[target]):
                if self.stage_of[value.unit] == stage:
                    made[value] = (*made.get(value, ()), target)
        return made

    def share(self, stage: int) -> float:
        """The part of the units' FLOPs that a stage does."""
        return sum(self.units[i].flops for i in self.owned(stage)) / (sum(unit.flops for unit in self.units) or 1)

    def label(self, value: Value) -> str:
        """How a crossing tensor is called in reports and records."""
        unit = self.units[value.unit]
        return str(unit) if len(leaves(unit.template)) == 1 else f"{unit}[{value.leaf}]"


def split(
    model: nn.Module,
    record: Trace,
    stages: int,
    cuts: Sequence[str] | None = None,
    stage_weights: Sequence[float] | None = None,
) -> Split:
    """Plans the split of a recorded forward. Raises ValueError where the model cannot be cut so, saying why.

    cuts: the modules at which stages 1, 2, ... begin; stage_weights: the share of the work that each stage should
    have (default: equal).
    """
    _check_wishes(stages, cuts, stage_weights)
    calls = choose_units(model, record, stages, list(cuts) if cuts else None)
    flow = follow(record, calls)
    nth = _numbers(calls)
    calls = [call for call, needed in zip(calls, flow.inputs, strict=True) if call.has_parameters or needed]
    flow = follow(record, calls)
    if cuts:
        first_units = _wished(calls, cuts)
    else:
        first_units = _chosen(calls, flow, stages, stage_weights)
    stage_of = stages_of(first_units, len(calls))
    _check_escapes(calls, flow, stage_of, stages)
    return Split(
        stages=stages,
        units=tuple(Unit(c.name, nth[c], c.flops, c.has_parameters, rebuild(c.output, absent_like)) for c in calls),
        stage_of=stage_of,
        needs=_needs(flow, stage_of, stages),
        mutated=frozenset(flow.mutated),
        holders=_holders(model, calls, flow, stage_of, stages),
        buffers=_buffers(model, calls, stage_of),
        output=rebuild(record.output, absent_like),
    )


def _numbers(calls: list[Call]) -> dict[Call, int]:
    """The n-th call of its module, calls inside other units left out: a stage that skips those counts alike."""
    times: Counter[str] = Counter()
    numbers = {}
    for call in calls:
        numbers[call] = times[call.name]
        times[call.name] += 1
    return numbers


def _check_wishes(stages: int, cuts: Sequence[str] | None, weights: Sequence[float] | None) -> None:
    if cuts is not None and len(cuts) != stages - 1:
        raise ValueError(
            f"cuts names the modules at which stages 1 to {stages - 1} begin: {stages - 1} for pp={stages}, "
            f"not {len(cuts)} ({', '.join(cuts)})"
        )
    if cuts is not None and weights is not None:
        raise ValueError("cuts and stage_weights say the same thing in two ways: give one of them")
    if weights is not None and (len(weights) != stages or min(weights) <= 0):
        raise ValueError(f"stage_weights needs {stages} numbers above 0, one per stage, not {list(weights)}")


def _wished(calls: list[Call], cuts: Sequence[str]) -> tuple[int, ...]:
    found = []
    for name in cuts:
        first = next((i for i, call in enumerate(calls) if call.name == name or call.name.startswith(name + ".")), None)
        if first is None:
            raise ValueError(f"cuts: there is no call of a module {name!r} to begin a stage with; "
                             f"possible are {', '.join(call.name for call in calls[1:])}")  # fmt: skip
        found.append(first)
    if any(second <= first for first, second in pairwise([0, *found])):
        raise ValueError(f"cuts must name modules in the order in which they run, none before the second: "
                         f"{', '.join(call.name for call in calls)}")  # fmt: skip
    return tuple(found)


def _chosen(calls: list[Call], flow: Flow, stages: int, weights: Sequence[float] | None) -> tuple[int, ...]:
    anywhere = [call.has_parameters for call in calls]
    allowed = list(anywhere)
    for escape in flow.escapes:
        last = len(calls) - 1 if escape.read_in is None else escape.read_in
        for position in range(escape.made_in + 1, last + 1):
            allowed[position] = False
    crossings = [len(_crossing(flow, position)) for position in range(len(calls))]
    costs, weights = [float(call.flops) for call in calls], weights or [1.0] * stages
    found = best_cuts(costs, weights, allowed, crossings)
    if flow.escapes:
        free = best_cuts(costs, weights, anywhere, crossings)
        if found is None or (free and heaviest(costs, weights, found) > WORTHLESS * heaviest(costs, weights, free)):
            raise ValueError(_escaped(calls, flow, stages))
    assert found is not None
    return found


def _crossing(flow: Flow, position: int) -> set[Value]:
    """The values made before unit `position` and needed from there on."""
    later = set(flow.output_values).union(*flow.inputs[position:])
    return {value for value in later | flow.control if value.unit < position}


def _check_escapes(calls: list[Call], flow: Flow, stage_of: tuple[int, ...], stages: int) -> None:
    for escape in flow.escapes:
        read_on = stages - 1 if escape.read_in is None else stage_of[escape.read_in]
        if stage_of[escape.made_in] != read_on:
            raise ValueError(_escaped(calls, flow, stages))


def _escaped(calls: list[Call], flow: Flow, stages: int) -> str:
    where = sorted({f"{calls[escape.made_in].name} ({escape.op})" for escape in flow.escapes})
    return (
        f"pp={stages} cannot cut this model: a tensor made inside a block is read outside it, not through its return "
        f"value: {', '.join(where[:3])}{' ...' if len(where) > 3 else ''}. Return it from the block's forward"
    )


def _needs(flow: Flow, stage_of: tuple[int, ...], stages: int) -> tuple[frozenset[Value], ...]:
    needs: list[set[Value]] = [set() for _ in range(stages)]
    for unit, values in enumerate(flow.inputs):
        needs[stage_of[unit]] |= values
    needs[-1] |= flow.output_values
    for stage in range(stages):
        needs[stage] = {value for value in needs[stage] | flow.control if stage_of[value.unit] < stage}
    return tuple(frozenset(values) for values in needs)


def _holders(
    model: nn.Module, calls: list[Call], flow: Flow, stage_of: tuple[int, ...], stages: int
) -> dict[str, tuple[int, ...]]:
    """Who needs a parameter: the stages of the units that contain or read it; the last for what the output reads.

    One that nobody read is everyone's: a forward that reads it some day does so on a stage that nobody knows yet.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, set[int]] = {name: set() for name in name_of.values()}
    for unit, call in enumerate(calls):
        own = {name_of[id(parameter)] for parameter in call.module.parameters()}
        for name in own | flow.reads[unit]:
            found[name].add(stage_of[unit])
    for name in flow.output_parameters:
        found[name].add(stages - 1)
    return {name: tuple(sorted(at or range(stages))) for name, at in found.items()}


def _buffers(model: nn.Module, calls: list[Call], stage_of: tuple[int, ...]) -> dict[str, int]:
    """A buffer of a unit counts where the unit was called last."""
    name_of = {id(buffer): name for name, buffer in model.named_buffers()}
    found: dict[str, int] = {}
    for unit, call in enumerate(calls):
        for buffer in call.module.buffers():
            found[name_of[id(buffer)]] = stage_of[unit]
    return found
