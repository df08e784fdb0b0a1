"""One training step's forward and backward: a global batch in, the whole batch's loss and gradients out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from colossal_nb.parallel import (
    agree,
    compiled,
    events,
    gradients,
    kept,
    loss_scale,
    outputs,
    outside,
    parameter_hooks,
    trouble,
)  # fmt: skip
from colossal_nb.parallel.batch import Piece, arguments, batch_size, explaining, move, pieces
from colossal_nb.parallel.handle import Parallel, require, stepping
from colossal_nb.parallel.losses import check, own_loss
from colossal_nb.parallel.outputs import LossFn
from colossal_nb.parallel.outside import Outside
from colossal_nb.parallel.passes import NO_GRADIENT, Done, run
from colossal_nb.parallel.plain import forward_here
from colossal_nb.parallel.statistics import Statistics, note_others
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.time_first import TimeFirst
from colossal_nb.parallel.trace import untouched
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as, shown


@called_as("loss = cnb.forward_backward(model, loss_fn, inputs, targets)")
def forward_backward(
    model: nn.Module, loss_fn: LossFn | None, inputs: Any, targets: Any = None, return_output: bool = False
) -> Any:
    """Forward and backward of a *global* batch: returns its loss, and adds its gradients to `.grad`.

    Every tensor of `inputs` and `targets` whose dim 0 is the batch size is cut into dp x microbatches parts; anything
    else goes whole. A dict of inputs calls `model(**inputs)`, a tuple `model(*inputs)`. `loss_fn(output, targets)`
    returns a scalar (a mean: torch's own and those written by hand are counted right; another scalar is weighted by
    samples and compared with the whole batch's; or one of torch's sums) or (sum, count); None takes the model's own
    `.loss`. The loss (0-dim, detached) is the sum of the sums over the sum of the counts, the same bits on every
    rank. With `return_output` the result is (loss, output of the whole batch).

    Trained tensors outside the model (a temperature in the loss) get the gradient of the whole batch, on every rank.

    Raises ValueError on all ranks for batches that differ between ranks and for losses that cannot be put together.
    """
    parallel = require(model)
    check(loss_fn, targets)
    trouble.settle(parallel)
    compiled.refuse(model, parallel.mesh.size)
    if World.current().verify:
        from colossal_nb.parallel.verify import verify_once

        verify_once(model, loss_fn, inputs, targets)
    events.begin(parallel)
    _prepare(parallel, inputs)
    batch = _Batch.of(parallel, inputs, targets)
    others, owners = Outside.of(parallel, loss_fn, (inputs, targets)), kept.owners(model)
    step = _Step(parallel, loss_fn, batch, others, Statistics(parallel, owners), _unit(parallel, loss_fn, batch))
    step.require_trained()
    fresh = not parallel.accumulating and all(p.grad is None for p in parallel.held().values())
    with stepping(parallel), kept.buffers(parallel, owners), others, gradients.kept_apart(step.trained):
        done, totals = step.proved(return_output)
        step.finish(done, totals)
        loss_scale.seen(parallel, fresh)
    if math.isnan(totals.loss) and parallel.pipeline is not None:
        World.current().note(_NAN)
    note_others(parallel, step.statistics)
    parallel.draws.note(parallel)
    events.stepped(parallel, totals.loss)
    loss = totals.tensor(parallel.device)
    return (loss, _whole_output(parallel, loss_fn, done, loss)) if return_output else loss


def _prepare(parallel: Parallel, inputs: Any) -> None:
    """The split that waited for a first batch, and what a pipeline cannot run."""
    if parallel.pending:
        from colossal_nb.parallel.parallelize import split

        split(parallel, arguments(inputs))
    if parallel.pipeline is not None:
        parallel.pipeline.refuse_hooks()


@dataclass(frozen=True)
class _Batch:
    """A global batch on this rank's device: `samples` in `total` parts, of which `mine` are this rank's. `data` stands
    for its numbers where ranks compare what they were given."""

    inputs: Any
    targets: Any
    samples: int
    mine: list[Piece]
    total: int
    data: int

    @classmethod
    def of(cls, parallel: Parallel, inputs: Any, targets: Any) -> _Batch:
        """Raises ValueError on all ranks for batches that differ between ranks. Collective in the first calls."""
        agree.compare_data(parallel, inputs, targets)
        data = agree.sampled(parallel, inputs, targets)
        inputs, targets = move(inputs, parallel.device), move(targets, parallel.device)
        mine = pieces(inputs, targets, parallel.replicas, parallel.microbatches, parallel.place["dp"])
        return cls(inputs, targets, batch_size(inputs), mine, parallel.replicas * len(mine), data)

    def explaining(self) -> AbstractContextManager[None]:
        """Around the passes of this rank's parts: their errors say what was cut."""
        if not self.mine:
            return nullcontext()
        whole = {"inputs": self.inputs, "targets": self.targets}
        part = {"inputs": self.mine[0].inputs, "targets": self.mine[0].targets}
        return explaining(whole, part, self.samples)


@dataclass(frozen=True)
class _Step:
    """One forward_backward: the passes of all parts, and what is made of their sums. Its methods are collective.

    `others`: what is trained outside the model; sums of losses are divided by `unit` before their backward.
    """

    parallel: Parallel
    loss_fn: LossFn | None
    batch: _Batch
    others: Outside
    statistics: Statistics
    unit: float

    @property
    def trained(self) -> list[Tensor]:
        return [*self.parallel.held().values(), *self.others.tensors.values()]

    @property
    def _parts(self) -> int:
        return self.parallel.replicas * self.parallel.microbatches

    def require_trained(self) -> None:
        """Raise ValueError where nothing wants a gradient. A stage asks one of what it receives all the same."""
        everything = (*self.parallel.parameters.values(), *self.others.tensors.values())
        if self.parallel.pipeline is not None and not any(p.requires_grad for p in everything):
            raise ValueError(NO_GRADIENT)

    def proved(self, return_output: bool) -> tuple[Done, agree.Totals]:
        """All parts forward and backward; where it is not known yet, that their losses make the whole batch's."""
        keep = "all" if return_output else "some" if self._compares() else ""
        done, totals = self._passes(keep, self.statistics)
        self.statistics.settle(min(self.batch.samples, self._parts))
        if self.loss_fn is None and totals.guessed and self.batch.total > 1:
            World.current().note(_OWN_GUESSED)
        if self.loss_fn is None or not self._compares(totals):
            return done, totals
        if not keep:
            # Its parts count in another way than before, and their outputs are gone: once more, to compare.
            for p in self.trained:
                p.grad = None
            with untouched(self.parallel.model):
                done, totals = self._passes("some", None)
        outputs.compare(self.parallel, self.loss_fn, done.kept, self.batch.targets, self.batch.samples)
        _note_compared(self.parallel, self.loss_fn, done, totals)
        return done, totals

    def _passes(self, keep: str, statistics: Statistics | None) -> tuple[Done, agree.Totals]:
        batch = self.batch
        done = Done(batch.mine, keep, batch.samples, batch.total, self.others, self.unit, statistics)
        sizes = {piece.samples for piece in batch.mine}
        sequences = TimeFirst(self.parallel, arguments(batch.inputs), batch.samples, sizes, self._parts)
        with self.parallel.draws.looking(self.parallel), sequences.watched(), batch.explaining():
            run(self.parallel, self.loss_fn, done)
        flags = self.others.flags()
        totals = agree.totals(self.parallel, done.parts, batch.data, flags + sequences.flags())
        sequences.settle(totals.sums[len(flags) :], forward_here)
        return done, replace(totals, sums=totals.sums[: len(flags)])

    def _compares(self, totals: agree.Totals | None = None) -> bool:
        """Whether it is to be proved that the parts' losses make the whole: once for each loss_fn, once more when its
        parts first count unequally or it first calls other functions, always where their counts are a guess; where
        there are parts for every replica."""
        if self.loss_fn is None or self._parts == 1 or self.batch.samples < self.parallel.replicas:
            return False
        if totals is not None and (totals.guessed or totals.new):
            return True
        return (outputs.kind(self.loss_fn), totals is not None and totals.uneven) not in self.parallel.compared

    def finish(self, done: Done, totals: agree.Totals) -> None:
        """Gradients of this rank's parts become those of the whole batch."""
        used = self.others.settle(self.loss_fn, totals.sums)
        count = 1 if done.at_once(self.parallel) else totals.count / self.unit
        gradients.finish(self.parallel, totals.active, count)
        outside.finish(self.parallel, used, count)


def _whole_output(parallel: Parallel, loss_fn: LossFn | None, done: Done, loss: Tensor) -> Any:
    output = outputs.whole(parallel, done.kept)
    if loss_fn is not None:
        return output
    own = own_loss(output)
    return rebuild(output, lambda leaf: loss.clone() if leaf is own else leaf)


def _unit(parallel: Parallel, loss_fn: LossFn | None, batch: _Batch) -> float:
    """By what sums of losses are divided before their backward, the same on all ranks: 1, since the count of a mean is
    known afterwards; in fp16, whose range a sum over many tokens would leave, about the number of targets."""
    if parallel.precision.scale is None:
        return 1.0
    # A model that computes its own loss likely has its targets among whole numbers.
    likely = [leaf for leaf in leaves(batch.inputs) if not leaf.is_floating_point()]
    targets = likely if loss_fn is None else leaves(batch.targets)
    return 2.0 ** math.ceil(math.log2(max([1, *(leaf.numel() for leaf in targets)])))


def _note_compared(parallel: Parallel, loss_fn: LossFn, done: Done, totals: agree.Totals) -> None:
    parallel.loss_forms |= {part.called for part in done.parts}
    kinds = {(outputs.kind(loss_fn), uneven) for uneven in (False, totals.uneven)}
    if totals.guessed:
        parallel.compared -= kinds
        World.current().note(_GUESSED)
    else:
        parallel.compared |= kinds


_NAN = (
    "the loss is NaN; under pp a stage also reads NaN where a forward takes from another stage what the recorded "
    "forward did not take (a flag that changes what is added to what): run the cell without pp to see which it is"
)
_GUESSED = (
    "loss_fn is not made of means that can be counted, so every step compares its parts with the whole batch, which "
    "takes time; it need not if loss_fn returns (sum, count)"
)
_OWN_GUESSED = (
    "the model's own loss is not made of torch's mean losses, so its parts are weighted by their samples: where they "
    "count in another way, return the outputs and give forward_backward a loss_fn"
)


@called_as("with cnb.accumulate(model): around several forward_backward")
@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Delay the reduction of gradients over dp to the end of the block: several forward_backward, one exchange.

    Inside, `.grad` holds this rank's part. Afterwards it is as if every call had reduced at once.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"accumulate takes the model, not {shown(model)}: what adds up is all forward_backward inside "
            "`with cnb.accumulate(model):`"
        )
    parallel = require(model)
    if parallel.accumulating:
        raise ValueError("accumulate(model) is already open for this model: one block around all calls suffices")
    held = [*parallel.held().values(), *parallel.outside]
    if parameter_hooks.of_users(held):
        yield  # a hook sees the gradient of each batch, which therefore must be there
        return
    with gradients.kept_apart(held):
        parallel.accumulating = True
        try:
            yield
        finally:
            parallel.accumulating = False
        gradients.settle(parallel)


@called_as("cnb.log(accuracy=0.91), each value by a name")
def log(**values: Any) -> None:
    """Write numbers of the running step to the record: `cnb.log(accuracy=0.91)`. Tensors of one element count."""
    recorder = World.current().recorder
    for name, value in values.items():
        try:
            if isinstance(value, str | bytes):  # of which float() would read some
                raise TypeError("text")
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"log({name}={shown(value)}): a value is one number, or a tensor with one") from error
        recorder.mark(events.running_step(), "log", name, number)
