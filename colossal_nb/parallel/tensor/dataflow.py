"""From the recorded forward: which linears and embeddings feed which, with none of them between."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from colossal_nb.parallel.trace import Call, Enter, Exit, Op, Storage, Trace, storage_of

INPUT = ""
"""The source that stands for the tensors handed to the model."""


@dataclass(frozen=True)
class Flow:
    """The graph of nodes: the called nn.Linear and nn.Embedding modules, by name, in call order.

    sources[b]: nodes (and INPUT) whose output reaches b's input with no other node between. readers: the reverse.
    to_output: nodes whose output reaches the model's output in the same way. entrances[b]: the storages of b's first
    input. borrowed: parameters that an operation reads outside of the module that owns them, by name.
    """

    order: tuple[str, ...]
    sources: dict[str, frozenset[str]]
    readers: dict[str, frozenset[str]]
    to_output: frozenset[str]
    entrances: dict[str, Storage]
    borrowed: frozenset[str]


def is_node(module: nn.Module) -> bool:
    """A plain nn.Linear or nn.Embedding, or a subclass that left its forward and its weight alone."""
    forward = type(module).forward
    known = forward is nn.Linear.forward or forward is nn.Embedding.forward
    return known and module._parameters.get("weight") is not None


def dataflow(model: nn.Module, record: Trace) -> Flow:
    """The graph of nodes of one recorded forward."""
    reading = _Reading(record, _owners(model))
    for event in record.log:
        reading.take(event)
    for storage in record.inputs:
        reading.reached.setdefault(storage, frozenset({INPUT}))
    sources = {name: frozenset(found) for name, found in reading.sources.items()}
    readers: dict[str, set[str]] = {name: set() for name in sources}
    for reader, found in sources.items():
        for source in found - {INPUT}:
            readers[source].add(reader)
    to_output = frozenset().union(*(reading.reached.get(storage, frozenset()) for storage in record.outputs))
    return Flow(
        tuple(sources),
        sources,
        {name: frozenset(found) for name, found in readers.items()},
        to_output - {INPUT},
        reading.entrances,
        frozenset(reading.borrowed),
    )


class _Reading:
    """Walks the log and keeps, per storage, the nodes that it was made from."""

    def __init__(self, record: Trace, owners: dict[Storage, set[int]]) -> None:
        self.record, self.owners = record, owners
        self.reached: dict[Storage, frozenset[str]] = {storage: frozenset({INPUT}) for storage in record.inputs}
        self.sources: dict[str, set[str]] = {}
        self.entrances: dict[str, Storage] = {}
        self.borrowed: set[str] = set()

    def take(self, event: Op | Enter | Exit) -> None:
        if isinstance(event, Op):
            self._operation(event)
        elif is_node(event.call.module):
            if isinstance(event, Enter):
                self.sources.setdefault(event.call.name, set()).update(self._of(event.inputs))
                if event.inputs:
                    self.entrances.setdefault(event.call.name, event.inputs[0])
            else:
                self.reached.update(dict.fromkeys(event.outputs, frozenset({event.call.name})))

    def _operation(self, op: Op) -> None:
        owner = id(op.call.module) if op.call else 0
        for storage in op.inputs:
            if storage in self.owners and owner not in self.owners[storage]:
                self.borrowed.add(self.record.parameters[storage])
        if _inside_node(op.call):
            return
        made_of = self._of(op.inputs)
        for storage in {*op.outputs, *op.mutated} - self.owners.keys():
            keeps = storage in op.mutated or storage in op.inputs
            self.reached[storage] = made_of | self.reached.get(storage, frozenset()) if keeps else made_of

    def _of(self, storages: tuple[Storage, ...]) -> frozenset[str]:
        return frozenset().union(*(self.reached.get(storage, frozenset()) for storage in storages))


def _inside_node(call: Call | None) -> bool:
    return call is not None and is_node(call.module)


def _owners(model: nn.Module) -> dict[Storage, set[int]]:
    """Which modules own the parameter in a storage."""
    owners: dict[Storage, set[int]] = defaultdict(set)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[storage_of(parameter)].add(id(module))
    return owners
