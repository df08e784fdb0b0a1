"""`model(x)` outside forward_backward: the global batch in, the global output on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import compiled, kept, objects, trouble
from colossal_nb.parallel.batch import batch_size, bounds, cut, explaining, move
from colossal_nb.parallel.collectives import gather_from, reduce_from
from colossal_nb.parallel.counting import CountingMeans
from colossal_nb.parallel.dropout import pass_by
from colossal_nb.parallel.encoders import unfused
from colossal_nb.parallel.handle import NAME, Parallel, require_cell, text
from colossal_nb.parallel.outside import inside_model
from colossal_nb.parallel.parameter_hooks import register_first
from colossal_nb.parallel.recompute import recomputing
from colossal_nb.parallel.scaled import scaled
from colossal_nb.parallel.statistics import Statistics
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.tensor.vocabulary import gather
from colossal_nb.parallel.time_first import TimeFirst
from colossal_nb.parallel.tree import require_known
from colossal_nb.parallel.unread import whole
from colossal_nb.parallel.world import World

LINE = "loss = cnb.forward_backward(model, loss_fn, inputs, targets)"


def install(parallel: Parallel) -> None:
    """Put the plain road in front of the model's forward."""
    parallel.model.forward = Road(parallel)


class Road:
    """The forward of a parallel model. An object, so that a copy of the model gets one of its own."""

    def __init__(self, parallel: Parallel) -> None:
        functools.update_wrapper(self, parallel.forward)
        self.parallel = parallel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.parallel.inside and self.parallel.pipeline is None:
            return self.parallel.forward(*args, **kwargs)
        if World.current().stepping is not None:
            return _on_a_part(self.parallel, World.current().stepping, args, kwargs)
        compiled.refuse_around(self.parallel.mesh.size)
        return run(self.parallel, args, kwargs)


@contextmanager
def removed(parallel: Parallel) -> Iterator[None]:
    """Inside, the model has its own forward again and knows nothing of us: passes copy it."""
    own = parallel.model.__dict__
    ours = {name: own.pop(name) for name in ("forward", NAME) if isinstance(own.get(name), Road | Parallel)}
    if "forward" in ours and getattr(parallel.forward, "__self__", None) is not parallel.model:
        own["forward"] = parallel.forward  # the user had put it on the object
    try:
        yield
    finally:
        own.update(ours)


def run(parallel: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward of the global batch. Raises ValueError with pp > 1 while gradients are on."""
    require_cell(parallel)
    require_known(parallel)
    trouble.settle(parallel)
    compiled.refuse(parallel.model, parallel.mesh.size)
    if parallel.pending:
        from colossal_nb.parallel.parallelize import split

        split(parallel, (args, kwargs))
    args, kwargs = move(args, parallel.device), move(kwargs, parallel.device)
    if parallel.pipeline is not None and _wants_gradients(parallel):
        raise ValueError(
            f"with pp={parallel.strategy.pp} the output of model(x) lies on the last stage, and a backward from it "
            f"would not reach the others. To train:\n    {LINE}\nTo evaluate: with torch.no_grad(): model(x)"
        )
    if parallel.replicas == 1:
        args, kwargs = whole(args), whole(kwargs)
        with _keyed(parallel, 0, _samples(args, kwargs)):
            output = forward_here(parallel, args, kwargs)
        Statistics(parallel, kept.owners(parallel.model)).settle(1)
        _average_outside(parallel, output, (args, kwargs))
        return _delivered(parallel, output)
    _average_hooks(parallel)
    return _replicated(parallel, args, kwargs)


def _on_a_part(parallel: Parallel, stepping: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A teacher, a critic, the model itself, called by the loss or the forward of the model `stepping`: what it is
    given is this rank's part of the batch already, so nothing is cut or gathered.

    Raises ValueError where that would need ranks that do not call it.
    """
    what = type(parallel.model).__name__
    along_tp = parallel.mesh.axis_size("tp") > 1 or parallel.pending
    alike = stepping.pipeline is None and stepping.mesh == parallel.mesh
    if parallel.pipeline is not None or (along_tp and not alike):
        raise ValueError(
            f"this {what} works as {text(parallel.strategy)}, and called by another model's loss or forward not "
            f"all of its ranks come to it: {_OTHER_WAYS}"
        )
    if parallel is not stepping and Statistics(parallel, kept.owners(parallel.model)).norms:
        World.current().note(_OWN_STATISTICS.format(what=what))
    world = World.current()
    before, world.elsewhere = world.elsewhere, True
    try:
        return forward_here(parallel, args, kwargs)
    finally:
        world.elsewhere = before


_OTHER_WAYS = (
    "leave it out of parallelize, or call it before, with torch.no_grad(): t = other(inputs), and give its output to "
    "forward_backward with the targets"
)
_OWN_STATISTICS = (
    "this {what}, called by loss_fn, keeps running statistics of each rank's part of the batch: they differ between "
    "the ranks, and from those of one device; {what}.eval() before, or leave it out of parallelize"
)


def _wants_gradients(parallel: Parallel) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in parallel.parameters.values())


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """1 for inputs that are no batch."""
    try:
        return max(1, batch_size((args, kwargs)))
    except ValueError:
        return 1


def _keyed(parallel: Parallel, start: int, stop: int) -> AbstractContextManager[None]:
    """Dropout of these samples is keyed, as in forward_backward; a second forward of a step draws other masks."""
    if parallel.dropout is None or not parallel.model.training:
        return nullcontext()
    return parallel.dropout.forward(parallel.step, start, stop)


def forward_here(parallel: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One replica's output on its last stage, logits gathered over tp; None on other stages."""
    own = parallel.precision
    alone = parallel.mesh.size == 1
    with (
        parallel.running(), own.working(parallel), own.own_losses(), own.installed(), recomputing(parallel),
        nullcontext() if alone else unfused(parallel.model),
    ):  # fmt: skip
        args, kwargs = own.lower((args, kwargs))
        if parallel.pipeline is None:
            return own.raised(gather(parallel.forward(*args, **kwargs)))
        outputs = parallel.pipeline.forward_only([(args, kwargs)], lambda _, site: pass_by(parallel, site))
        return own.raised(gather(outputs[0])) if parallel.is_last else None


def _delivered(parallel: Parallel, output: Any) -> Any:
    """The last stage's output on every stage."""
    if parallel.pipeline is None:
        return output
    stages = parallel.group("pp")
    return move(objects.broadcast(output, stages, stages.size - 1, "outputs"), parallel.device)


def _replicated(parallel: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each replica its samples; a replica without one runs the first sample and keeps nothing of it."""
    given = args, kwargs
    samples = batch_size(given)
    parts = bounds(samples, parallel.replicas)
    start, stop = parts[parallel.place["dp"]]
    first, last = (start, stop) if stop > start else (0, 1)
    args, kwargs = cut(given, samples, first, last)
    statistics = Statistics(parallel, kept.owners(parallel.model))
    sequences = TimeFirst(parallel, given, samples, {last - first}, parallel.replicas)
    explained = explaining(_by_name(*given), _by_name(args, kwargs), samples)
    with CountingMeans() as means, _keyed(parallel, first, last), statistics.watched(), sequences.watched(), explained:
        if stop > start:
            statistics.begin(parallel.place["dp"])
        output = forward_here(parallel, args, kwargs)
    sequences.settle(_added(parallel, sequences.flags()), forward_here)
    statistics.settle(min(samples, parallel.replicas))
    _average_outside(parallel, output, given)
    if parallel.is_last:
        sizes = [end - begin for begin, end in parts]
        seen = means.taken().means
        weight = (seen[0].count if seen else float(last - first)) if stop > start else 0.0
        output = _joined(parallel, output, sizes, last - first, weight)
    return _delivered(parallel, output)


def _by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {f"argument {number}": value for number, value in enumerate(args)} | kwargs


def _added(parallel: Parallel, flags: list[float]) -> list[float]:
    """Flags of the first forward, added up over all ranks."""
    if not flags:
        return []
    row = torch.tensor(flags, dtype=torch.float64)
    parallel.group().run("all_reduce", [row], of="time first")
    return row.tolist()


def _joined(parallel: Parallel, output: Any, sizes: list[int], rows: int, weight: float) -> Any:
    """The outputs of all replicas: batched tensors along dim 0, scalars as weighted means, the rest as it is here."""
    mesh, own = parallel.mesh, sizes[parallel.place["dp"]]
    batched = [bool(leaf.dim()) and leaf.shape[0] == rows for leaf in leaves(output)]
    if len(set(sizes)) > 1 and batched:
        # A dim that happens to be one replica's number of rows is not the batch: it must be so on every replica.
        votes = torch.tensor([float(vote) for vote in batched])
        parallel.group("dp").run("all_reduce", [votes], reduce="min", of="outputs")
        batched = (votes > 0).tolist()
    is_batched = iter(batched)

    def join(leaf: Tensor) -> Tensor:
        if next(is_batched):
            return gather_from(scaled(leaf[:own], parallel.replicas), mesh, "dp", sizes=sizes, of="outputs")
        if leaf.dim() or not leaf.is_floating_point():
            return leaf
        total = torch.tensor([weight], dtype=torch.float64)
        parallel.group("dp").run("all_reduce", [total], of="outputs")
        share = weight / (total.item() or 1.0)
        return reduce_from(scaled(leaf, parallel.replicas) * share, mesh, "dp", of="outputs")

    return rebuild(output, join)


def _average_hooks(parallel: Parallel) -> None:
    """Let a plain backward average parameters' gradients over dp.

    A replica's gradient is that of its samples alone, which `_joined` has scaled by the number of replicas, so that
    the average is the sum over samples; a term that all replicas computed alike (a penalty on weights) stays itself.
    """
    for p in parallel.parameters.values():
        if p.requires_grad and id(p) not in parallel.hooked:
            parallel.hooked.add(id(p))
            register_first(p, _average(parallel))


def _average_outside(parallel: Parallel, output: Any, given: Any) -> None:
    """The same for what the model trains beside its parameters, looked for once, and for leaves of the input."""
    if parallel.mesh.size == 1 or not torch.is_grad_enabled():
        return
    found = [x for x in leaves(given) if x.requires_grad and x.is_leaf]
    if (NAME, parallel.model.training) not in parallel.explored:
        found += inside_model(parallel, output, given)
        parallel.explored.add((NAME, parallel.model.training))
    for p in found if parallel.replicas > 1 else ():
        register_first(p, _average(parallel))


def _average(parallel: Parallel) -> Callable[[Tensor], Tensor | None]:
    def average(gradient: Tensor) -> Tensor | None:
        if any(each.inside for each in World.current().parallels):
            return None
        total = gradient.clone(memory_format=torch.contiguous_format)
        parallel.group("dp").run("all_reduce", [total], of="gradient")
        return total.div_(parallel.replicas)

    return average


def example(model: nn.Module) -> tuple[Any, ...] | None:
    """A small input that the model takes: its own `example_inputs()`, or one made for its first layer; None if neither
    runs."""
    offered = getattr(model, "example_inputs", None)
    if callable(offered):
        inputs = offered()
        return inputs if isinstance(inputs, tuple) else (inputs,)
    made = _for_first_layer(model)
    return (made,) if made is not None and _runs(model, made) else None


def _for_first_layer(model: nn.Module) -> Tensor | None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return torch.arange(16, device=module.weight.device).view(2, 8) % module.num_embeddings
        if isinstance(module, nn.Linear):
            weight = module.weight
            steps = 2 * module.in_features
            return torch.linspace(-1, 1, steps, dtype=weight.dtype, device=weight.device).view(2, -1)
    return None


def _runs(model: nn.Module, made: Tensor) -> bool:
    """Whether the model takes the input; leaves buffers and random states as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            model(made)
    except Exception:
        return False
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return True
