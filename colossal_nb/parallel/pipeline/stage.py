"""One stage's part of a forward and of its backward: the user's own module runs, and stops where the stage ends.

A call of a unit of another stage returns what was received where this stage needs it, NaN elsewhere. The run ends at
the first such call after the stage's last own unit.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import checkpoint

from colossal_nb.parallel.absent import absent
from colossal_nb.parallel.compat import in_backward
from colossal_nb.parallel.encoders import modules_call_modules
from colossal_nb.parallel.pipeline import backward_hooks
from colossal_nb.parallel.pipeline.dataflow import Value
from colossal_nb.parallel.pipeline.split import Split
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.trace import replaced_forwards

Border = Callable[[int], None]  # called with 0 at the start, 2 u + 1 before and 2 u + 2 after unit u


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one tensor that a unit returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = dict[int, tuple[Spec, ...]]  # unit -> its tensors


@dataclass
class Arrival:
    """A received tensor inside one run; its gradient lands here."""

    spec: Spec
    device: torch.device
    grad: torch.Tensor | None = None

    def gradient(self) -> torch.Tensor:
        """Zeros where the stage did not use it in a differentiable way."""
        if self.grad is None:
            return torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=self.device)
        return self.grad


@dataclass
class Made:
    """What one run of a stage leaves: values for other stages, the arrivals, the output (where the model ends).

    `edges` are the places in the graph where the gradients of the values come in; None where there is no graph.
    """

    values: dict[Value, torch.Tensor] = field(default_factory=dict)
    edges: dict[Value, GradientEdge | None] = field(default_factory=dict)
    arrivals: dict[Value, Arrival] = field(default_factory=dict)
    specs: Specs = field(default_factory=dict)
    output: Any = None


class _Leave(BaseException):
    """The stage is done. No Exception, so that a model's own `except Exception` does not stop it."""


class Stage:
    """Runs stage `number` of a split, or, with None, the whole model with the same borders between units."""

    def __init__(self, model: nn.Module, split: Split, number: int | None, forward: Callable[..., Any] | None = None):
        self.model = model
        self.split = split
        self.number = number
        self.forward = forward or model.forward  # the model's own, also when somebody has put another in its place
        self.wanted = frozenset(split.sends(number)) if number is not None else frozenset()
        self.own = len(split.units) if number is None else len(split.owned(number))
        self.is_last = number in (None, split.stages - 1)
        modules = dict(model.named_modules())
        self.numbers: dict[str, dict[int, int]] = {}
        for index, unit in enumerate(split.units):
            self.numbers.setdefault(unit.name, {})[unit.nth] = index
        self.modules = {name: modules[name] for name in self.numbers}

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Mapping[Value, torch.Tensor],
        specs: Specs,
        border: Border | None = None,
        hooks: bool = True,
    ) -> Made:
        """One forward. `received` has every value of `split.needs[number]`, `specs` every unit of earlier stages.

        Without `hooks` those of the whole model do not run: they run around this call.
        Raises RuntimeError when the forward did not pass all of the stage's units (it went another way than recorded).
        """
        run = _Run(self, received, specs, border)
        with backward_hooks.aside(self.modules.values()) as taken:
            self._run(run, taken, args, kwargs, hooks)
        self._check_complete(run)
        return run.made

    def _run(
        self,
        run: _Run,
        taken: Mapping[nn.Module, backward_hooks.Hooks],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: bool,
    ) -> None:
        replacements = []
        for name, module in self.modules.items():
            own = module.forward
            if module in taken:
                own = functools.wraps(own)(taken[module].around(own))
            replacements.append((module, run.forward_of(self.numbers[name], name, own)))
        if self.model.forward != self.forward:
            replacements.append((self.model, self.forward))
        if run.border is not None:
            run.border(0)
        # A forward may write into its inputs: each stage has its own.
        args, kwargs = rebuild((args, kwargs), lambda tensor: tensor.clone())
        with _transparent_checkpoints(), modules_call_modules(), replaced_forwards(replacements), suppress(_Leave):
            run.made.output = (self.model if hooks else self.model.forward)(*args, **kwargs)

    def backward(
        self, made: Made, loss: torch.Tensor | None, gradients: Mapping[Value, list[torch.Tensor]]
    ) -> dict[Value, torch.Tensor]:
        """The backward of one run: gradients of sent values in (one per receiver), of received values out.

        Gradients of parameters are added to their `.grad`.
        """
        starts: list[torch.Tensor | GradientEdge] = [] if loss is None or not loss.requires_grad else [loss]
        seeds: list[torch.Tensor | None] = [None for _ in starts]
        for value, parts in gradients.items():
            edge = made.edges[value]
            if edge is not None:
                starts.append(edge)
                seeds.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        if starts:
            torch.autograd.backward(starts, seeds)  # type: ignore[arg-type]
        return {value: arrival.gradient() for value, arrival in made.arrivals.items()}

    def _check_complete(self, run: _Run) -> None:
        mine = range(len(self.split.units)) if self.number is None else self.split.owned(self.number)
        skipped = sorted({unit for unit in mine if unit not in run.made.specs} | {
            value.unit for value in self.wanted - run.made.values.keys()
        })  # fmt: skip
        if skipped:
            units = [str(self.split.units[unit]) for unit in skipped]
            more = f" and {len(units) - 4} more" if len(units) > 4 else ""
            raise self.another_way(f"did not call {', '.join(units[:4])}{more}")

    def another_way(self, did: str) -> RuntimeError:
        """What is raised where a forward does not do what the recorded one did."""
        return RuntimeError(
            f"{'the whole model' if self.number is None else f'stage {self.number}'} {did}: this forward took "
            f"another way than the recorded one, so no stage can run it. Cut around what has several ways "
            f"(fewer stages, or cuts=[...] with modules outside it), or let it go one way"
        )


class _Run:
    """The state of one forward: which calls came by, what was made."""

    def __init__(
        self, stage: Stage, received: Mapping[Value, torch.Tensor], specs: Specs, border: Border | None
    ) -> None:
        self.stage, self.split = stage, stage.split
        self.received, self.specs, self.border = received, specs, border
        self.made = Made()
        self.left = stage.own
        self.times: Counter[str] = Counter()
        self.depth = 0
        self.foreign = -1  # the last unit of another stage that came by

    def forward_of(self, numbers: dict[int, int], name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What a unit's module runs in the place of its forward."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.depth or in_backward():
                return forward(*args, **kwargs)
            unit = numbers.get(self.times[name])
            self.times[name] += 1
            if unit is None:
                if not self._owns(numbers):
                    raise self.stage.another_way(f"was asked for {name} {self.times[name]} times")
                return forward(*args, **kwargs)
            if self.stage.number in (None, self.split.stage_of[unit]):
                return self._own(unit, forward, args, kwargs)
            return self._foreign(unit)

        return called

    def _owns(self, numbers: dict[int, int]) -> bool:
        """Whether this stage runs a module, so that it has the weights."""
        return self.stage.number in (None, *{self.split.stage_of[unit] for unit in numbers.values()})

    def _own(self, unit: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._pass_border(2 * unit + 1)
        self.depth += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            self.depth -= 1
        self._pass_border(2 * unit + 2)
        self.left -= 1
        tensors = leaves(output)
        self.made.specs[unit] = tuple(Spec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        for leaf, tensor in enumerate(tensors):
            value = Value(unit, leaf)
            if value in self.stage.wanted:
                made = tensor.clone() if value in self.split.mutated else tensor
                self.made.values[value] = made.detach()
                self.made.edges[value] = get_gradient_edge(made) if made.requires_grad else None
        return output

    def _foreign(self, unit: int) -> Any:
        if self.left == 0 and not self.stage.is_last:
            raise _Leave
        # What comes in another order, or before this stage's part, may be wanted where the recorded forward did not
        # want it: nobody would send it.
        assert self.stage.number is not None
        if unit < self.foreign or self.split.stage_of[unit] > self.stage.number:
            raise self.stage.another_way(f"came to {self.split.units[unit]} too early")
        self.foreign = unit
        self._pass_border(2 * unit + 2)
        leaf = -1

        def fill(like: torch.Tensor) -> torch.Tensor:
            nonlocal leaf
            leaf += 1
            value = Value(unit, leaf)
            if value in self.received:
                return self._arrive(value, self.received[value])
            spec = self.specs[unit][leaf]
            missing = absent(spec.shape, spec.dtype, like.device)
            return missing.clone() if value in self.split.mutated else missing

        return rebuild(self.split.units[unit].template, fill)

    def _arrive(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        arrival = Arrival(Spec(tuple(tensor.shape), tensor.dtype), tensor.device)
        self.made.arrivals[value] = arrival
        if not torch.is_grad_enabled():
            return tensor
        anchor = torch.empty(0, requires_grad=True)
        arrived: torch.Tensor = _Arrive.apply(anchor, tensor, arrival)  # type: ignore[no-untyped-call]
        return arrived

    def _pass_border(self, site: int) -> None:
        if self.border is not None:
            self.border(site)


class _Arrive(torch.autograd.Function):
    """Forward: the received tensor, as one that the model may differentiate and write into. Backward: kept for sending.

    A leaf that requires grad would forbid in-place operations, a clone would cost its memory.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        ctx.arrival = arrival
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        (gradient,) = gradients
        ctx.arrival.grad = gradient
        return None, None, None


class _Transparent:
    """Stands for the reentrant checkpoint, which hides the graph of what is made inside; a stage may end there."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


@contextmanager
def _transparent_checkpoints() -> Iterator[None]:
    before = checkpoint.CheckpointFunction
    checkpoint.CheckpointFunction = _Transparent  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = before  # type: ignore[misc]
