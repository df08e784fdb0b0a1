"""One rank's share of a pipelined step: the schedule's actions, and what is sent and received between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from colossal_nb.parallel.pipeline.dataflow import Value
from colossal_nb.parallel.pipeline.messages import Mail
from colossal_nb.parallel.pipeline.stage import Border, Made, Specs, Stage
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.world import World
from colossal_nb.plan.schedule import Action

Kept = TypeVar("Kept")
Microbatch = tuple[tuple[Any, ...], dict[str, Any]]
LossOf = Callable[[Any, int], tuple[torch.Tensor, Kept]]
Look = Callable[[list[Any]], None]
Borders = Callable[[int, int], None]  # (microbatch, site): see `stage.Border`


@dataclass
class _Flight:
    """A microbatch between its forward and its backward."""

    made: Made
    loss: torch.Tensor | None


class Executor(Generic[Kept]):
    """Runs actions of one stage on the microbatches of one step."""

    def __init__(
        self,
        stage: Stage,
        mail: Mail,
        known: dict[Any, Specs],
        microbatches: Sequence[Microbatch],
        loss_of: LossOf[Kept] | None,
        borders: Borders | None,
    ) -> None:
        assert stage.number is not None
        self.stage, self.split, self.number = stage, stage.split, stage.number
        self.mail, self.known = mail, known
        self.microbatches, self.loss_of, self.borders = microbatches, loss_of, borders
        self.look: Look | None = None
        self.flights: dict[int, _Flight] = {}
        self.kept: list[Kept] = []
        self.sends = self.split.sends(self.number)

    def run(self, actions: Sequence[Action]) -> list[Kept]:
        """All actions in order; returns what `loss_of` kept, in the order of the microbatches (last stage only)."""
        for action in actions:
            self.mail.forget()
            if action.kind == "F":
                self._forward(action.microbatch)
            else:
                self._backward(action.microbatch)
        self.mail.settle()
        assert not self.flights
        return self.kept

    def evaluate(self, number: int) -> Any:
        """The forward of one microbatch without gradients; the output on the last stage, None elsewhere."""
        self.mail.forget()
        args, kwargs = self.microbatches[number]
        key, specs, received = self._arrivals(args, kwargs)
        with _slice("F", self.number, number):
            made = self.stage.run(args, kwargs, received, specs, self._border(number), hooks=False)
        self._depart(key, specs, made)
        return made.output if self.stage.is_last else None

    def _forward(self, number: int) -> None:
        args, kwargs = self.microbatches[number]
        key, specs, received = self._arrivals(args, kwargs)
        loss = None
        with _slice("F", self.number, number):
            made = self.stage.run(args, kwargs, received, specs, self._border(number))
            if self.stage.is_last:
                assert self.loss_of is not None
                loss, kept = self.loss_of(made.output, number)
                self.kept.append(kept)
                made.output = None
            elif self.look is not None:
                self.look([edge.node for edge in made.edges.values() if edge is not None])
        self.flights[number] = _Flight(made, loss)
        self._depart(key, specs, made)

    def _backward(self, number: int) -> None:
        flight = self.flights.pop(number)
        gradients = self._returning(flight.made)
        with _slice("B", self.number, number):
            back = self.stage.backward(flight.made, flight.loss, gradients)
        for value in sorted(back):
            self.mail.send(back[value], self.split.stage_of[value.unit], f"gradient of {self.split.label(value)}")

    def _arrivals(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Specs, dict[Value, torch.Tensor]]:
        """What this stage needs of one microbatch. Its shapes, where new, come first."""
        key = shapes_of(self.stage, args, kwargs)
        specs = self.known.get(key)
        if specs is None:
            specs = self.mail.receive_specs(self.split, self.number) if self.number else {}
        received = {}
        for value in sorted(self.split.needs[self.number]):
            source = self.split.stage_of[value.unit]
            received[value] = self.mail.receive(specs[value.unit][value.leaf], source, self.split.label(value))
        return key, specs, received

    def _depart(self, key: Any, specs: Specs, made: Made) -> None:
        """Send what later stages need; the next one first hears the shapes that are new to it."""
        if key not in self.known:
            self.known[key] = specs
            if not self.stage.is_last:
                self.mail.send_specs(self.split, specs | made.specs, self.number + 1)
        for value, targets in sorted(self.sends.items()):
            for target in targets:
                self.mail.send(made.values[value], target, self.split.label(value))
        made.values.clear()  # the backward needs their places in the graph, not the tensors

    def _returning(self, made: Made) -> dict[Value, list[torch.Tensor]]:
        """The gradients of what was sent, one from each receiver."""
        gradients: dict[Value, list[torch.Tensor]] = {}
        for value, targets in sorted(self.sends.items()):
            spec, of = made.specs[value.unit][value.leaf], f"gradient of {self.split.label(value)}"
            if spec.dtype.is_floating_point or spec.dtype.is_complex:
                gradients[value] = [self.mail.receive(spec, target, of) for target in targets]
        return gradients

    def _border(self, number: int) -> Border | None:
        borders = self.borders
        return None if borders is None else lambda site: borders(number, site)


def shapes_of(stage: Stage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The key of a microbatch: equal on all stages, which all hold the whole batch."""
    tensors = tuple((tuple(tensor.shape), tensor.dtype) for tensor in leaves((args, kwargs)))
    return tensors, stage.model.training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")


@contextmanager
def _slice(kind: str, stage: int, microbatch: int) -> Iterator[None]:
    recorder = World.current().recorder
    token = recorder.begin(kind, stage=stage, microbatch=microbatch)
    try:
        yield
    finally:
        recorder.end(token)
