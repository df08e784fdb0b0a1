"""Forward and backward of what one rank has of a batch: its pieces, one after another or through the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import memory, outputs
from colossal_nb.parallel.batch import Piece, arguments
from colossal_nb.parallel.counting import CountingMeans, Seen
from colossal_nb.parallel.dropout import pass_by
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.losses import SMALL_COUNT, SMALLEST_USUAL, Part, own_loss, part, value_of
from colossal_nb.parallel.outputs import LossFn
from colossal_nb.parallel.outside import Outside
from colossal_nb.parallel.recompute import recomputing
from colossal_nb.parallel.statistics import Statistics
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.tensor.vocabulary import gather
from colossal_nb.parallel.world import World

NO_GRADIENT = (
    "this is a loss without a gradient: it was detached, made under torch.no_grad(), does not depend on the output, or "
    "all parameters are frozen (requires_grad=False), so nothing would be trained"
)


@dataclass
class Done:
    """What one rank made of its pieces: parts of the loss (on the last stage) and, where asked for, outputs.

    `samples` of the batch are in `total` parts. `keep`: "" (nothing), "all", or "some": as many samples as the
    comparison of the parts' losses may see. Gradients are those of the sums divided by `unit`. `statistics`: None where
    what the forwards move is put back.
    """

    pieces: list[Piece]
    keep: str
    samples: int
    total: int
    outside: Outside
    unit: float = 1.0
    statistics: Statistics | None = None
    parts: list[Part] = field(default_factory=list)
    kept: outputs.Kept = field(default_factory=list)

    def add(self, result: Part, output: Any, piece: Piece) -> None:
        self.parts.append(result.detached())
        if self.keep:
            count = piece.samples
            if self.keep == "some":
                output, count = outputs.first_samples(output, count, self.total)
            self.kept.append((piece.start, piece.start + count, rebuild(gather(output), Tensor.detach)))

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.statistics is None else self.statistics.watched()

    def begin(self, parallel: Parallel, number: int) -> None:
        """The forward of this rank's piece `number` begins."""
        if self.statistics is not None:
            self.statistics.begin(parallel.place["dp"] + number * parallel.replicas)
        if parallel.dropout is not None and parallel.model.training:
            parallel.dropout.begin(parallel.calls, self.pieces[number].start, self.pieces[number].stop)

    def at_once(self, parallel: Parallel) -> bool:
        """Whether one backward makes the whole gradient: it is divided at its root, as in the sequential program."""
        return parallel.replicas == 1 and parallel.pipeline is None and len(self.pieces) == 1


def run(parallel: Parallel, loss_fn: LossFn | None, done: Done) -> None:
    """Forward and backward of this rank's pieces; gradients are those of the sums."""
    mine = done.pieces
    keyed = parallel.dropout if parallel.dropout is not None and parallel.model.training else None
    masks = keyed.running() if keyed else nullcontext()
    working = parallel.precision.working(parallel)
    watched = done.watched()
    with parallel.running(), torch.enable_grad(), working, watched, memory.activations(), masks, recomputing(parallel):
        if parallel.pipeline is None:
            for number, piece in enumerate(mine):
                _piece(parallel, loss_fn, piece, number, done)
        elif mine:
            _pipeline(parallel, loss_fn, mine, done)
    memory.sample()


def _piece(parallel: Parallel, loss_fn: LossFn | None, piece: Piece, number: int, done: Done) -> None:
    recorder = World.current().recorder
    token = recorder.begin("F", stage=0, microbatch=number)
    done.begin(parallel, number)
    try:
        args, kwargs = parallel.precision.lower(arguments(piece.inputs))
        with _own_loss(parallel, loss_fn) as means, parallel.precision.installed():
            output = parallel.model(*args, **kwargs)
        result = _finished(parallel, loss_fn, output, piece, Seen() if means is None else means.taken(), done)
    finally:
        recorder.end(token)
    memory.sample()
    token = recorder.begin("B", stage=0, microbatch=number)
    try:
        with parallel.precision.installed():  # blocks may run again
            result.backward(result.count if result.count and done.at_once(parallel) else done.unit)
    finally:
        recorder.end(token)


@contextmanager
def _own_loss(parallel: Parallel, loss_fn: LossFn | None) -> Iterator[CountingMeans | None]:
    """Around forwards: sees the means inside the model where its own loss is taken."""
    if loss_fn is not None:
        yield None
        return
    with CountingMeans() as means, parallel.precision.own_losses():
        yield means


def _finished(
    parallel: Parallel, loss_fn: LossFn | None, output: Any, piece: Piece, seen: Seen, done: Done
) -> Part:
    """The loss of one piece, in fp32 and kept with its output."""
    own = parallel.precision
    if loss_fn is not None:
        output = own.raised(output)
    result = measured(loss_fn, output, piece, seen, done.samples)
    if loss_fn is None:
        result = replace(result, value=own.raised(result.value))
    done.outside.look(result.value, output)
    done.add(result, output, piece)
    return result


def measured(loss_fn: LossFn | None, output: Any, piece: Piece, seen: Seen, batch: int) -> Part:
    """The loss of one piece of `batch` samples; `seen` is what happened inside the model when its own is taken."""
    if loss_fn is None:
        return _trainable(part(own_loss(output), seen, piece.samples, batch))
    try:
        with CountingMeans(by_hand=True) as means:
            value = value_of(loss_fn, output, piece.targets)
    except Exception as error:
        uncut = [str(list(t.shape)) for t in leaves(piece.targets) if not t.dim() or t.shape[0] != piece.samples]
        if not uncut or piece.samples == batch:
            raise
        raise ValueError(
            f"the inputs have {batch} samples, targets of shape {', '.join(uncut)} do not begin with that number, so "
            f"they went whole to loss_fn, with the outputs of samples {piece.start} to {piece.stop - 1}, and it failed "
            f"({type(error).__name__}: {error}). Targets with one entry per sample are cut like the inputs"
        ) from error
    result = part(value, means.taken(), piece.samples, batch)
    if isinstance(value, tuple | list) and piece.samples == batch and 0 < result.count < SMALLEST_USUAL:
        World.current().note(SMALL_COUNT)  # of several parts the counts are compared
    return _trainable(result)


def _trainable(result: Part) -> Part:
    """Raises ValueError for a loss that no gradient can come from; a part of the batch may add a plain zero."""
    if not result.value.requires_grad and result.value != 0:
        raise ValueError(NO_GRADIENT)
    return result


def _pipeline(parallel: Parallel, loss_fn: LossFn | None, mine: list[Piece], done: Done) -> None:
    """The schedule's actions; the loss is taken where the last stage ends."""
    assert parallel.pipeline is not None
    own = parallel.precision
    with _own_loss(parallel, loss_fn) as means, own.installed():

        def loss_of(output: Any, number: int) -> tuple[Tensor, None]:
            seen = Seen() if means is None else means.taken()
            with own.installed(low=False):
                result = _finished(parallel, loss_fn, output, mine[number], seen, done)
            return result.value * (result.weight / done.unit), None

        def begin(number: int, site: int) -> None:
            if site == 0:
                done.begin(parallel, number)
            pass_by(parallel, site)

        given = [own.lower(arguments(piece.inputs)) for piece in mine]
        parallel.pipeline.run_step(given, loss_of, begin, done.outside.look_below)
