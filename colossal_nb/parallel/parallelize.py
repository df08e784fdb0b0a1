"""`parallelize`: the user's model and optimizer, distributed in place."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colossal_nb.parallel import (
    clip,
    compiled,
    drawing,
    events,
    hyperparameters,
    lazy,
    memory,
    optimizers,
    plain,
    report,
    state,
    tensor,
    tree,
)
from colossal_nb.parallel.agree import differing
from colossal_nb.parallel.batch import checksum, ranks_text
from colossal_nb.parallel.dropout import KeyedDropout
from colossal_nb.parallel.handle import Parallel, attach, find, group_along, require_cell, tell, text
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.origin import Origin
from colossal_nb.parallel.precision import Precision, raise_masters
from colossal_nb.parallel.undo import noted
from colossal_nb.parallel.world import World
from colossal_nb.plan import Layout, Mesh, Strategy
from colossal_nb.validation import called_as

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
Example = tuple[tuple[Any, ...], dict[str, Any]]


@called_as("model, optimizer = cnb.parallelize(model, optimizer)")
def parallelize(
    model: nn.Module,
    optimizer: Optimizers = None,
    strategy: Strategy | str | None = None,
    plan: None = None,
    cuts: Any = None,
    stage_weights: Any = None,
) -> Any:
    """Distribute a model, and the optimizer that holds its parameters, in place; returns `model` or both.

    `optimizer`: one, or a list of several, which is returned as it is. It may hold tensors outside the model as well,
    parameters of the loss: they stay whole, and `forward_backward` gives them the gradient of the whole batch.
    `strategy`: by default the cell's; without one, dp over all ranks. `cuts`, `stage_weights`: where a pipeline is cut,
    or how much of the work each stage should have. Parameters stay the same objects; a rank's part is put under them,
    and state that the optimizer has is cut in the same place. Again under the same strategy: nothing.

    Raises ValueError on bad arguments, on a strategy that the model cannot run under, and (on all ranks, naming the odd
    ones) when the ranks built different weights. Collective.
    """
    world = World.current()
    _check_model(model)
    if plan is not None:
        raise ValueError("plan= is not built yet: leave it out, the rules decide what is cut")
    if find(model) is not None:
        return _again(model, optimizer, strategy)
    wanted = chosen(strategy, world)
    mesh = wanted.mesh(world.world_size)
    compiled.refuse(model, mesh.size)
    optimizers.check(optimizer, model, mesh)
    if mesh.axis_size("pp") == 1 and (cuts is not None or stage_weights is not None):
        raise ValueError("cuts and stage_weights say where a pipeline is cut; this strategy has none: pp=2 or more")
    # A cell that runs again drops its former model, which sits in reference cycles: its memory is needed now.
    world.model = None
    gc.collect()
    _build(model, mesh)
    options = {"cuts": cuts, "stage_weights": stage_weights}
    parallel = Parallel(model, wanted, mesh, dict(model.named_parameters()), model.forward, options)
    parallel.precision = Precision.of(wanted)
    _compare_weights(parallel, [*model.parameters(), *model.buffers()], optimizers.as_list(optimizer))
    parallel.number = _common_number(parallel)
    parallel.origin = Origin.of(parallel.parameters)
    _set_up(parallel, optimizer)
    parallel.origin.made(parallel.parameters)
    attach(parallel)
    return model if optimizer is None else (model, optimizer)


def _build(model: nn.Module, mesh: Mesh) -> None:
    """What waits for its weights gets them; all of it on this rank's device."""
    if lazy.is_waiting(model):
        lazy.require_room(model, group_along(mesh, mesh.axes))
        lazy.fill(model)
    model.to(World.current().device)


def _set_up(parallel: Parallel, optimizer: Optimizers) -> None:
    model = parallel.model
    _key_dropout(parallel)
    parallel.optimizers += {id(each): each for each in optimizers.as_list(optimizer)}.values()
    raise_masters(parallel)
    distribute(parallel)
    plain.install(parallel)
    state.hook_state_dicts(model)
    state.show_layouts()
    clip.install(parallel)
    drawing.install()
    optimizers.watch()
    memory.watch(parallel)
    for each in parallel.optimizers:
        events.watch(parallel, each)
    for line in report.caveats(parallel):
        tell(line)


def _key_dropout(parallel: Parallel) -> None:
    if any(report.drops(module) for module in parallel.model.modules()):
        parallel.dropout = KeyedDropout(parallel.model, _common_seed(parallel))


def distribute(parallel: Parallel) -> None:
    """Give each rank its part of a model that is whole, now or at the first batch. Collective."""
    model = parallel.model
    if parallel.mesh.axis_size("pp") * parallel.mesh.axis_size("tp") > 1:
        small = plain.example(model)
        if small is None:
            parallel.pending = True
            tell(
                f"no example input could be made for this {type(model).__name__}, so it is split at the first batch; "
                "example_inputs() on the model gives one"
            )
        else:
            split(parallel, (small, {}))
    else:
        _layouts(parallel)


def split(parallel: Parallel, example: Example) -> None:
    """Run the passes in their order on a model that is still whole. Collective."""
    model, mesh, strategy = parallel.model, parallel.mesh, parallel.strategy
    before = {id(p): p.shape for p in model.parameters()}
    with plain.removed(parallel), noted(model) as parallel.changes, _all_train(model):
        if parallel.dropout is not None:
            parallel.dropout.record(model, *example)
        plan = tensor.plan(model, mesh, strategy, example)
        if mesh.axis_size("pp") > 1:
            from colossal_nb.parallel import pipeline

            parallel.pipeline = pipeline.apply(model, mesh, strategy, example, **parallel.options)
        if mesh.axis_size("tp") > 1:
            parallel.tensor = tensor.apply(model, plan)
    if parallel.dropout is not None:
        parallel.dropout.features = tuple((pair.region, pair.row_parts) for pair in plan.pairs)
        parallel.dropout.index = parallel.place["tp"]
    forget_graphs(parallel)
    deferred, parallel.pending = parallel.pending, False
    parallel.changed()
    _layouts(parallel)
    for optimizer in parallel.optimizers:
        optimizers.cut_state(optimizer, before, parallel.rank)
    if deferred:
        memory.watch(parallel)


@contextmanager
def _all_train(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter is frozen: what the passes find and prove holds also when one trains later."""
    frozen = [p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def forget_graphs(parallel: Parallel) -> None:
    """Let autograd see the new shapes.

    While an earlier loss is alive, so is the node of its graph that adds to `.grad`, and a new forward would take it
    again with the shape that it knows. Torch makes a new one when the dtype changes.
    """
    for p in parallel.parameters.values():
        data = p.data
        p.data = data.new_empty(0, dtype=torch.float16 if data.dtype != torch.float16 else torch.float32)
        p.data = data


def _layouts(parallel: Parallel) -> None:
    """Give every parameter that no pass touched the layout of a copy, and write all to the record."""
    recorder, rank = World.current().recorder, parallel.rank
    parallel.precision.refresh(parallel)
    for name, p in parallel.parameters.items():
        layout = layout_of(p)
        if layout is None:
            layout = Layout.of(p.shape, str(p.dtype).removeprefix("torch."), parallel.mesh)
            set_layout(p, layout)
        local = layout.local_shape(rank)
        if local is not None:
            dtype = parallel.precision.dtype_of(p)
            here = replace(layout, dtype=str(dtype).removeprefix("torch."))
            recorder.layout(name, here.to_json(), str(list(p.shape)), p.numel() * dtype.itemsize)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        what = f"the class {model.__name__}: give {model.__name__}(...)" if is_class else type(model).__name__
        raise ValueError(f"parallelize takes a torch.nn.Module, not {what}")
    if type(model).__module__.startswith("torch.nn.parallel") or type(model).__name__.startswith("FSDP"):
        raise ValueError(f"{type(model).__name__} distributes the model already: give parallelize the model inside it")
    if next(model.parameters(), None) is None:
        raise ValueError(f"this {type(model).__name__} has no parameters: there is nothing to distribute")


def chosen(strategy: Strategy | str | None, world: World) -> Strategy:
    """The strategy with its numbers filled in: the argument's, else the cell's, else dp over all ranks."""
    if strategy is not None and not isinstance(strategy, Strategy):
        strategy = Strategy.parse(strategy)
    if strategy is None and world.strategy is None and world.world_size > 1:
        tell(f"no strategy is named: dp={world.world_size} over all ranks")
    chosen = strategy or world.strategy or Strategy()
    chosen.check(world.world_size)
    return chosen.filled(world.world_size)


def _again(model: nn.Module, optimizer: Optimizers, named: Strategy | str | None) -> Any:
    """A model that is parallel already: nothing to do, unless another strategy or optimizer is asked for."""
    parallel = find(model)
    assert parallel is not None
    require_cell(parallel)
    wanted = parallel.strategy if named is None else chosen(named, World.current())
    if wanted != parallel.strategy:
        raise ValueError(
            f"this model is parallel as {text(parallel.strategy)}; to move it: model, optimizer = "
            f'cnb.redistribute(model, optimizer, "{text(wanted) or "dp=1"}")'
        )
    taken = not tree.is_known(parallel)
    if taken:
        _take_up(parallel)
    fresh = {id(each): each for each in optimizers.as_list(optimizer) if each not in parallel.optimizers}
    if fresh:
        optimizers.check(optimizer, model, parallel.mesh)
    for each in fresh.values():
        optimizers.cut_state(each, optimizers.whole_shapes(parallel.parameters.values()), parallel.rank)
        parallel.optimizers.append(each)
        events.watch(parallel, each)
    if not fresh and not taken:
        tell(f"this model is parallel already ({text(parallel.strategy) or 'one rank'}): parallelize changed nothing")
    return model if optimizer is None else (model, optimizer)


def _take_up(parallel: Parallel) -> None:
    """Parameters were replaced, added or removed in a model that is whole on every rank. Collective.

    Raises ValueError where ranks hold parts of it.
    """
    if tree.is_cut(parallel):
        tree.require_known(parallel)
    model = parallel.model
    _build(model, parallel.mesh)
    _compare_weights(parallel, list(model.parameters()), [])
    now = dict(model.named_parameters())
    kept = {id(p) for p in now.values()}
    for p in parallel.parameters.values():
        if id(p) not in kept:
            set_layout(p, None)  # an optimizer that still holds it holds a tensor outside the model
    parallel.parameters, parallel.hooked = now, parallel.hooked & kept
    parallel.outside = [p for p in parallel.outside if id(p) not in kept]
    parallel.explored.clear()
    parallel.changed()
    KeyedDropout.forget(model)
    parallel.dropout = None
    _key_dropout(parallel)
    parallel.origin = Origin.of(now)
    raise_masters(parallel)
    if not parallel.pending:
        _layouts(parallel)
    parallel.origin.made(now)
    memory.watch(parallel)


def _common_seed(parallel: Parallel) -> int:
    """Rank 0's seed, on all ranks."""
    seed = torch.tensor([torch.initial_seed() % 2**62])
    parallel.group().run("broadcast", [seed], root=0, of="seed")
    return int(seed)


def _common_number(parallel: Parallel) -> str:
    """Of this model alone, the same on all its ranks, also where some of them are new and others are not."""
    number = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.int64)
    parallel.group().run("broadcast", [number], root=0, of="number")
    return str(int(number))


def _compare_weights(parallel: Parallel, tensors: list[torch.Tensor], given: list[torch.optim.Optimizer]) -> None:
    """All ranks must have built the same model, and optimizers with the same settings."""
    if parallel.mesh.size == 1:
        return
    odd = differing(checksum(tensors) ^ hyperparameters.digest(given), parallel.group(), "weights checksum")
    if odd:
        hyperparameters.require_alike(given, parallel.group())
        raise ValueError(
            f"the weights of {ranks_text(odd)} differ from the others': every rank builds the same model, so draw the "
            "weights from one seed in the cell that makes it (torch.manual_seed(0) before it), or load the same file"
        )
