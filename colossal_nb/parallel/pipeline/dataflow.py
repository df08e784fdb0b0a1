"""What flows between units: for every storage the set of sources it was made from, followed through the glue.

A source is an output tensor of a unit, a tensor made *inside* a unit (which must not be seen outside), or a parameter
that glue reads. Operations in glue unite the sources of what they read; operations inside a unit make their foreign
sources inputs of the unit; a unit's return names its outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from colossal_nb.parallel.trace import Call, Enter, Exit, Op, Storage, Trace


class Value(NamedTuple):
    """The `leaf`-th tensor that a unit returns (order of `structure.leaves`)."""

    unit: int
    leaf: int


INSIDE = -1  # the leaf of a tensor made inside a unit

# Operations that hand a tensor's value to Python: what the glue does next may depend on it, on every later stage.
READS_VALUE = (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero, torch.ops.aten.equal)


class Escape(NamedTuple):
    """A tensor made inside unit `made_in`, read by unit `read_in` (None: by glue or as an output) through `op`."""

    made_in: int
    read_in: int | None
    op: str


@dataclass
class Flow:
    """The dataflow between units. Per unit: the values it needs and the parameters it reads, its own among them."""

    inputs: list[set[Value]]
    reads: list[set[str]]
    mutated: set[Value] = field(default_factory=set)
    control: set[Value] = field(default_factory=set)
    escapes: set[Escape] = field(default_factory=set)
    output_values: set[Value] = field(default_factory=set)
    output_parameters: set[str] = field(default_factory=set)


def follow(record: Trace, units: list[Call]) -> Flow:
    """The flow of one recorded forward over these units."""
    walker = _Walker(record, units)
    for entry in record.log:
        walker.step(entry)
    walker.finish()
    return walker.flow


Source = Value | str  # a str is the name of a parameter


class _Walker:
    def __init__(self, record: Trace, units: list[Call]) -> None:
        self.record = record
        self.position = {call: index for index, call in enumerate(units)}
        self.sources: dict[Storage, frozenset[Source]] = {
            storage: frozenset({name}) for storage, name in record.parameters.items()
        }
        self.flow = Flow([set() for _ in units], [set() for _ in units])
        self.inside: dict[Call | None, int | None] = {None: None}

    def step(self, entry: Op | Enter | Exit) -> None:
        if isinstance(entry, Op):
            unit = self._unit_around(entry.call)
            if unit is None:
                self._op_in_glue(entry)
            else:
                self._op_in_unit(entry, unit)
        elif isinstance(entry, Exit) and entry.call in self.position:
            self._return(self.position[entry.call], entry.outputs)

    def finish(self) -> None:
        """The model's outputs are needed where the model ends."""
        for source in self._of(self.record.outputs):
            if isinstance(source, str):
                self.flow.output_parameters.add(source)
            elif source.leaf == INSIDE:
                self.flow.escapes.add(Escape(source.unit, None, "the output"))
            else:
                self.flow.output_values.add(source)

    def _unit_around(self, call: Call | None) -> int | None:
        if call not in self.inside:
            assert call is not None
            own = self.position.get(call)
            self.inside[call] = own if own is not None else self._unit_around(call.parent)
        return self.inside[call]

    def _of(self, storages: Iterable[Storage]) -> frozenset[Source]:
        return frozenset().union(*(self.sources.get(storage, frozenset()) for storage in storages))

    def _op_in_glue(self, op: Op) -> None:
        sources = self._of(op.inputs)
        values = {source for source in sources if isinstance(source, Value)}
        for source in values:
            if source.leaf == INSIDE:
                self.flow.escapes.add(Escape(source.unit, None, str(op.func)))
        if getattr(op.func, "_overloadpacket", None) in READS_VALUE:
            self.flow.control |= {source for source in values if source.leaf != INSIDE}
        for storage in op.mutated:
            self._note_mutation(storage)
            self._set(storage, self._of([storage]) | sources)
        for storage in op.outputs:
            if storage not in op.mutated:
                self._set(storage, self._of([storage]) | sources if storage in op.inputs else sources)

    def _op_in_unit(self, op: Op, unit: int) -> None:
        self._consume(unit, self._of(op.inputs), str(op.func))
        made_here = frozenset({Value(unit, INSIDE)})
        for storage in op.mutated:
            self._note_mutation(storage)
            self._set(storage, self._of([storage]) | made_here)
        for storage in op.outputs:
            if storage not in op.inputs and storage not in op.mutated:
                self._set(storage, made_here)

    def _consume(self, unit: int, sources: frozenset[Source], op: str) -> None:
        for source in sources:
            if isinstance(source, str):
                self.flow.reads[unit].add(source)
            elif source.unit == unit:
                continue
            elif source.leaf == INSIDE:
                self.flow.escapes.add(Escape(source.unit, unit, op))
            else:
                self.flow.inputs[unit].add(source)

    def _return(self, unit: int, outputs: tuple[Storage, ...]) -> None:
        """Names the outputs. A tensor that only passed through is still known by its old sources as well:
        the glue may go on with either name of it."""
        named: dict[Storage, set[Source]] = defaultdict(set)
        made_here = Value(unit, INSIDE)
        for leaf, storage in enumerate(outputs):
            before = self._of([storage])
            if made_here not in before:
                self._consume(unit, before, "returned")
                named[storage] |= before
            named[storage].add(Value(unit, leaf))
        for storage, sources in named.items():
            self._set(storage, frozenset(sources))

    def _note_mutation(self, storage: Storage) -> None:
        for source in self._of([storage]):
            if isinstance(source, Value) and source.leaf != INSIDE:
                self.flow.mutated.add(source)

    def _set(self, storage: Storage, sources: frozenset[Source]) -> None:
        if storage not in self.record.parameters:
            self.sources[storage] = sources
