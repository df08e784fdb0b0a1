"""The sequential program: plain torch, the whole batch at once, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from colossal_nb.parallel import gradients
from colossal_nb.parallel.batch import Piece, arguments, batch_size, move, pieces
from colossal_nb.parallel.counting import CountingMeans, Seen
from colossal_nb.parallel.handle import Parallel, stepping
from colossal_nb.parallel.losses import Part, own_loss, value_of
from colossal_nb.parallel.outputs import LossFn
from colossal_nb.parallel.outside import known
from colossal_nb.parallel.passes import measured
from colossal_nb.parallel.unread import whole
from colossal_nb.parallel.verify.twins import Twin
from colossal_nb.parallel.world import World

STEP = 1e-3
AT_ONCE = "the whole batch at once, on one rank"


@dataclass
class Trained:
    """What a program made in some steps. `gradients`, `statistics` (running ones): of the first step, after which
    weights may go apart by rounding; `before`: its weights;
    `rate`: of the plain SGD that is taken where there is no optimizer."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    rate: float = 0.0


@dataclass(frozen=True)
class Sequential:
    """How the sequential program goes through a batch.

    `parts`: in how many parts, 1 but for models with batch statistics; `call` numbers the dropout masks.
    """

    loss_fn: LossFn | None
    inputs: Any
    targets: Any
    parts: int
    call: int

    @property
    def reference(self) -> str:
        if self.parts == 1:
            return AT_ONCE
        return f"one rank with the same {self.parts} microbatches, because the model keeps statistics of a batch"

    def outside(self, parallel: Parallel) -> dict[str, Tensor]:
        """What may be trained outside the model."""
        found = known(parallel, self.loss_fn).items()
        return {f"{name} (outside the model)": p for name, p in found if p.requires_grad}

    def forward_backward(self, twin: Twin, step: int) -> float:
        """The loss of the batch; adds its gradients to `.grad`."""
        own, model = twin.parallel, twin.model
        masks = nullcontext() if own.dropout is None or not model.training else own.dropout.running()
        inputs, targets = move(whole(self.inputs), "cpu"), move(whole(self.targets), "cpu")
        with torch.enable_grad(), own.precision.working(own), masks, stepping(own):
            if self.parts == 1:
                return self._at_once(own, inputs, targets, step)
            with gradients.kept_apart(list(twin.parameters.values())):
                return self._in_parts(twin, pieces(inputs, targets, 1, self.parts, 0), step)

    def _at_once(self, own: Parallel, inputs: Any, targets: Any, step: int) -> float:
        """As it is written without us."""
        output = self._output(own, inputs, step, 0, batch_size(inputs))
        if self.loss_fn is None:
            value = own.precision.raised(own_loss(output))
        else:
            value = value_of(self.loss_fn, own.precision.raised(output), targets)
        if isinstance(value, tuple | list):
            value = value[0] / value[1]
        with own.precision.installed():
            value.backward()
        return float(value.detach())

    def _output(self, own: Parallel, inputs: Any, step: int, start: int, stop: int) -> Any:
        if own.dropout is not None and own.model.training:
            own.dropout.begin(self.call + step, start, stop)
        args, kwargs = own.precision.lower(arguments(inputs))
        with own.precision.installed(), own.precision.own_losses() if self.loss_fn is None else nullcontext():
            return own.model(*args, **kwargs)

    def _in_parts(self, twin: Twin, parts: list[Piece], step: int) -> float:
        """Sums of the parts, divided by the sum of their counts at the end."""
        own = twin.parallel
        samples, done = sum(piece.samples for piece in parts), list[Part]()
        for piece in parts:
            with CountingMeans() if self.loss_fn is None else nullcontext() as means:
                output = self._output(own, piece.inputs, step, piece.start, piece.stop)
            output = output if self.loss_fn is None else own.precision.raised(output)
            result = measured(self.loss_fn, output, piece, Seen() if means is None else means.taken(), samples)
            if self.loss_fn is None:
                result = replace(result, value=own.precision.raised(result.value))
            with own.precision.installed():
                result.backward()
            done.append(result.detached())
        count = sum(part.count for part in done)
        for p in twin.parameters.values():
            if p.grad is not None and count:
                p.grad.div_(count)
        return sum(part.sum for part in done) / count

    def train(self, twin: Twin, steps: int) -> Trained:
        """Some steps on the same batch, gradients fresh in each."""
        with _alone():
            return self._train(twin, steps)

    def _train(self, twin: Twin, steps: int) -> Trained:
        done = Trained()
        done.before = {name: p.detach().clone() for name, p in twin.parameters.items()}
        for step in range(steps):
            twin.zero_grad()
            done.losses.append(self.forward_backward(twin, step))
            if step == 0:
                done.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in twin.parameters.items()}
                done.statistics = running(twin.model)
                if not twin.optimizers:
                    done.rate = _rate(twin)
                    twin.optimizers.append(torch.optim.SGD(twin.parameters.values(), lr=done.rate))
            for optimizer in twin.optimizers:
                optimizer.step()
        done.weights = {name: p.detach() for name, p in twin.parameters.items()}
        return done


@contextmanager
def _alone() -> Iterator[None]:
    """Inside, a message of this thread to other ranks, which wait for the end of the program, is an error."""
    world = World.current()
    before, world.alone = world.alone, threading.get_ident()
    try:
        yield
    finally:
        world.alone = before


def _rate(twin: Twin) -> float:
    """The learning rate with which the first step of SGD moves a weight by STEP of the largest, at most."""
    weights = [p.abs().max().item() for p in twin.parameters.values() if p.numel()]
    slopes = [p.grad.abs().max().item() for p in twin.parameters.values() if p.grad is not None and p.numel()]
    return STEP * max(weights, default=0.0) / (max(slopes, default=0.0) or 1.0)


def keeps_statistics(model: nn.Module) -> bool:
    """Whether a forward depends on which samples are together: batch norm and running statistics while training."""
    return any(isinstance(each, _BatchNorm) and each.training for each in model.modules()) or bool(running(model))


def running(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics that move in a forward, as they are."""
    return {
        f"{name}.{key}": module._buffers[key].detach().clone()
        for name, module in model.named_modules()
        for key in ("running_mean", "running_var")
        if module.training and module._buffers.get(key) is not None
    }
