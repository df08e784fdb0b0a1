"""One training step's forward and backward: a global batch in, the whole batch's loss and gradients out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import (
    agree,
    compiled,
    events,
    gradients,
    kept,
    loss_scale,
    memory,
    outputs,
    outside,
    parameter_hooks,
    trouble,
)  # fmt: skip
from colossal_nb.parallel.batch import Piece, arguments, batch_size, move, pieces
from colossal_nb.parallel.counting import CountingMeans, Seen
from colossal_nb.parallel.dropout import pass_by
from colossal_nb.parallel.handle import Parallel, require
from colossal_nb.parallel.losses import Part, check, own_loss, part, value_of
from colossal_nb.parallel.outputs import LossFn
from colossal_nb.parallel.outside import Outside
from colossal_nb.parallel.recompute import recomputing
from colossal_nb.parallel.statistics import Statistics, note_others
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.tensor.vocabulary import gather
from colossal_nb.parallel.trace import untouched
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as, shown


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
    if parallel.pending:
        from colossal_nb.parallel.parallelize import split

        split(parallel, arguments(inputs))
    if parallel.pipeline is not None:
        parallel.pipeline.refuse_hooks()
    agree.compare_data(parallel, inputs, targets)
    data = agree.sampled(parallel, inputs, targets)
    given = inputs, targets
    inputs, targets = move(inputs, parallel.device), move(targets, parallel.device)
    samples = batch_size(inputs)
    mine = pieces(inputs, targets, parallel.replicas, parallel.microbatches, parallel.place["dp"])
    total = parallel.replicas * len(mine)
    others = Outside.of(parallel, loss_fn, given)
    fresh = not parallel.accumulating and all(p.grad is None for p in parallel.held().values())
    held = [*parallel.held().values(), *others.tensors.values()]
    owners = kept.owners(model)
    statistics = Statistics(parallel, owners)
    with kept.buffers(parallel, owners), others, gradients.kept_apart(held):
        unit = _unit(parallel, targets if loss_fn is not None else _labels(inputs))
        keep = "all" if return_output else "some" if _compares(parallel, loss_fn, samples) else ""
        done, totals = _attempt(parallel, loss_fn, Done(mine, keep, samples, total, others, unit, statistics), data)
        statistics.settle(min(samples, parallel.replicas * parallel.microbatches))
        if not keep and _compares(parallel, loss_fn, samples, totals):
            # Its parts count in another way than before, and their outputs are gone: once more, to compare.
            for p in held:
                p.grad = None
            with untouched(model):
                done, totals = _attempt(parallel, loss_fn, Done(mine, "some", samples, total, others, unit), data)
        if loss_fn is not None and _compares(parallel, loss_fn, samples, totals):
            outputs.compare(parallel, loss_fn, done.kept, targets, samples)
            _note_compared(parallel, loss_fn, totals)
        elif loss_fn is None and totals.guessed and total > 1:
            World.current().note(_OWN_GUESSED)
        used, count = others.settle(loss_fn, totals.sums), 1 if _at_once(parallel, mine) else totals.count / unit
        gradients.finish(parallel, totals.active, count)
        outside.finish(parallel, used, count)
        loss_scale.seen(parallel, fresh)
    if math.isnan(totals.loss) and parallel.pipeline is not None:
        World.current().note(_NAN)
    note_others(parallel, statistics)
    parallel.draws.note(parallel)
    events.stepped(parallel, totals.loss)
    loss = totals.tensor(parallel.device)
    return (loss, _whole_output(parallel, loss_fn, done, loss)) if return_output else loss


def _whole_output(parallel: Parallel, loss_fn: LossFn | None, done: Done, loss: Tensor) -> Any:
    output = outputs.whole(parallel, done.kept)
    if loss_fn is not None:
        return output
    own = own_loss(output)
    return rebuild(output, lambda leaf: loss.clone() if leaf is own else leaf)


def _unit(parallel: Parallel, targets: Any) -> float:
    """By what sums of losses are divided before their backward, the same on all ranks: 1, since the count of a mean is
    known afterwards; in fp16, whose range a sum over many tokens would leave, about the number of targets."""
    if parallel.precision.scale is None:
        return 1.0
    return 2.0 ** math.ceil(math.log2(max([1, *(leaf.numel() for leaf in leaves(targets))])))


def _labels(inputs: Any) -> list[Tensor]:
    """What a model that computes its own loss likely has as targets."""
    return [leaf for leaf in leaves(inputs) if not leaf.is_floating_point()]


def _attempt(parallel: Parallel, loss_fn: LossFn | None, done: Done, data: int) -> tuple[Done, agree.Totals]:
    with parallel.draws.looking(parallel):
        _run(parallel, loss_fn, done)
    return done, agree.totals(parallel, done.parts, data, done.outside.flags())


def _compares(
    parallel: Parallel, loss_fn: LossFn | None, samples: int, totals: agree.Totals | None = None
) -> bool:
    """Whether it is to be proved that the parts' losses make the whole: once for each loss_fn, once more when its
    parts first count unequally, always where their counts are a guess; where there are parts for every replica."""
    if loss_fn is None or parallel.replicas * parallel.microbatches == 1 or samples < parallel.replicas:
        return False
    if totals is not None and totals.guessed:
        return True
    return (outputs.kind(loss_fn), totals is not None and totals.uneven) not in parallel.compared


def _note_compared(parallel: Parallel, loss_fn: LossFn, totals: agree.Totals) -> None:
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


def _at_once(parallel: Parallel, mine: list[Piece]) -> bool:
    """Whether one backward makes the whole gradient: then it is divided at its root, as the sequential program does."""
    return parallel.replicas == 1 and parallel.pipeline is None and len(mine) == 1


def _run(parallel: Parallel, loss_fn: LossFn | None, done: Done) -> None:
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
            result.backward(result.count if result.count and _at_once(parallel, done.pieces) else done.unit)
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
    return _trainable(part(value, means.taken(), piece.samples, batch))


def _trainable(result: Part) -> Part:
    """Raises ValueError for a loss that no gradient can come from; a part of the batch may add a plain zero."""
    if not result.value.requires_grad and result.value != 0:
        raise ValueError(
            "this is a loss without a gradient: it was detached, made under torch.no_grad(), does not depend on the "
            "output, or all parameters are frozen (requires_grad=False), so nothing would be trained"
        )
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
