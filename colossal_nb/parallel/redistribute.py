"""`redistribute`: a parallel model and its optimizers, moved to another strategy in memory.

The whole weights come together under the same Parameters, as they were before `parallelize`; what the passes changed is
taken back, and they run again for the new strategy. Gradients and optimizer states never come together: each tensor is
made whole by itself, cut anew, and let go.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import events, memory, objects, optimizers, trouble
from colossal_nb.parallel.absent import absent
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel, find, holds, require_whole, tell, text
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.outcome import alike
from colossal_nb.parallel.outside import beside, of_optimizers
from colossal_nb.parallel.parallelize import chosen, distribute, forget_graphs
from colossal_nb.parallel.saving import rng
from colossal_nb.parallel.saving.contents import is_part, owner
from colossal_nb.parallel.state import gathered, local_part
from colossal_nb.parallel.structure import rebuild
from colossal_nb.parallel.tree import require_known
from colossal_nb.parallel.undo import Changes
from colossal_nb.parallel.world import World
from colossal_nb.plan import Layout, Strategy
from colossal_nb.validation import called_as


@called_as('model, optimizer = cnb.redistribute(model, optimizer, "dp=4")')
def redistribute(model: nn.Module, optimizer: Any = None, strategy: Strategy | str | None = None) -> Any:
    """Move a parallel model and its optimizers to another strategy, in place; returns `model`, or both.

    `optimizer`: one or a list; those that `parallelize` knows move in any case. `strategy`: by default the cell's.
    Parameters stay the same objects; weights, buffers, gradients, the optimizers' states and the count of steps go
    along, so that training goes on as it would have. Each rank holds the whole weights for a moment, as before
    `parallelize`, and of the rest one whole tensor at a time. Ranks that the new strategy leaves out keep the objects
    and wait; when a later one takes them in, model and optimizers there catch up, other variables (a scheduler, a step
    counter) do not. The ranks of both strategies call this together, in a cell of them all.

    Raises ValueError on all ranks, with everything as it was, for a strategy that the model cannot run under; cuts and
    stage weights of the old pipeline are not kept.
    """
    parallel = find(model)
    if parallel is None:
        raise ValueError(
            f"this {type(model).__name__} is not parallel yet: model, optimizer = cnb.parallelize(model, optimizer) "
            "under the strategy that is wanted"
        )
    require_known(parallel)
    wanted = chosen(strategy, World.current())
    given = optimizers.as_list(optimizer)
    optimizers.check(given, model, wanted.mesh())
    for each in parallel.optimizers:
        optimizers.require_able(each, wanted.mesh())
    if parallel.accumulating:
        raise ValueError("redistribute inside accumulate(model): the calls so far belong to one reduction; do it after")
    require_whole(parallel)
    group = _together(parallel, wanted)
    alike(lambda: trouble.settle(parallel) if parallel.rank < parallel.mesh.size else None, group, "redistribute")
    if wanted == parallel.strategy:
        tell(f"this model is parallel already as {text(wanted) or 'one rank'}: redistribute changed nothing")
    else:
        random = rng.states()
        for each in [each for each in given if each not in parallel.optimizers]:
            parallel.optimizers.append(each)
            events.watch(parallel, each)
        _move_all(parallel, wanted, group)
        parallel.lives = dict(World.current().lives)
        trouble.united(parallel)
        rng.restore(random)
    return model if optimizer is None else (model, optimizer)


def _together(parallel: Parallel, wanted: Strategy) -> Group:
    """The ranks of both meshes. Raises ValueError where they are not all there, or want different things."""
    world = World.current()
    require_whole(parallel)
    size = max(parallel.mesh.size, wanted.mesh().size)
    if size > world.world_size or (world.subset is not None and not world.subset.issuperset(range(size))):
        raise ValueError(
            f"from {text(parallel.strategy) or 'one rank'} to {text(wanted) or 'one rank'} takes ranks 0 to "
            f"{size - 1}, and not all of them are in this cell: begin it with %%colossal alone"
        )
    ranks = tuple(range(size))
    group = world.whole() if ranks == world.ranks else world.some("redistribute", ranks)
    said = objects.all_gather((str(parallel.strategy), str(wanted)), group, "redistribute")
    if len(set(said)) > 1:
        raise ValueError("the ranks want different strategies: " + ", ".join(sorted({new for _, new in said})))
    return group


@dataclass
class _Stock:
    """What goes along beside the weights, the same on all ranks: who has what was told by all.

    `states[i]`: by parameter and key; a `_Part` lies as its parameter does. `settings[i]`: of its param groups.
    `outside`: what is trained outside the model, with its state in each optimizer; only ranks that waited need it.
    """

    gradients: dict[str, _Part] = field(default_factory=dict)
    states: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    settings: list[list[dict[str, Any]]] = field(default_factory=list)
    outside: list[tuple[Tensor, list[dict[str, Any]]]] = field(default_factory=list)
    position: tuple[int, int, int, float] = (0, 0, 0, 0.0)
    scale: list[float] | None = None


@dataclass(frozen=True)
class _Part:
    """A tensor of which every rank that holds the parameter has its part."""

    dtype: torch.dtype


def _move_all(parallel: Parallel, wanted: Strategy, group: Group) -> None:
    """Move; a model on which some rank was cut short is used by none any more."""
    parallel.half_moved = True
    try:
        _move(parallel, wanted, group)
    except ValueError:  # refused on all ranks, and everything is as it was
        parallel.half_moved = False
        raise
    group.run("barrier", [], of="redistribute")
    parallel.half_moved = False


def _move(parallel: Parallel, wanted: Strategy, group: Group) -> None:
    old, options, precision = parallel.strategy, parallel.options, parallel.precision
    stock = _stock(parallel, group)
    if parallel.rank >= parallel.mesh.size:
        _catch_up(parallel, stock)
    gradients = {name: p.grad for name, p in parallel.parameters.items()}
    layouts = {name: layout_of(p) for name, p in parallel.parameters.items()}
    shapes = {name: p.shape for name, p in parallel.parameters.items()}  # looked at where a rank waited: whole ones
    way = _Way(layouts, shapes, parallel.mesh.size, group)
    _make_whole(parallel, way)
    try:
        _settle(parallel, wanted, {"cuts": None, "stage_weights": None}, group)
    except ValueError:
        parallel.precision = precision
        _settle(parallel, old, options, group)
        for name, p in parallel.parameters.items():
            p.grad = gradients[name]
        raise
    for name, p in parallel.parameters.items():
        _carry(parallel, name, p, gradients.pop(name), stock, way)
    if parallel.rank < parallel.mesh.size:
        memory.watch(parallel)


def _stock(parallel: Parallel, group: Group) -> _Stock:
    """Every rank tells what it has; the first owner's word counts for what is no part."""
    mine = _Stock()
    name_of = {id(p): name for name, p in parallel.parameters.items()}
    if parallel.rank < parallel.mesh.size:
        mine.gradients = {name: _Part(p.grad.dtype) for name, p in parallel.held().items() if p.grad is not None}
        for each in parallel.optimizers:
            known = ((name_of.get(id(p)), p, entry) for p, entry in each.state.items())
            held = {name: entry for name, p, entry in known if name is not None and holds(p, parallel.rank)}
            mine.states.append({name: _told(parallel.parameters[name], entry) for name, entry in held.items()})
    mine.settings = [
        [{key: value for key, value in each.items() if key != "params"} for each in optimizer.param_groups]
        for optimizer in parallel.optimizers
    ]
    mine.outside = [(p, [each.state.get(p, {}) for each in parallel.optimizers]) for p in of_optimizers(parallel)]
    mine.position = parallel.calls, parallel.calls_in_step, parallel.step, parallel.loss
    mine.scale = parallel.precision.position()
    told: list[_Stock] = objects.all_gather(mine, group, "redistribute")
    whole = replace(told[0], gradients={}, states=[{} for _ in parallel.optimizers])
    for other in told:
        whole.gradients |= {name: part for name, part in other.gradients.items() if name not in whole.gradients}
        for all_of, own in zip(whole.states, other.states, strict=False):
            all_of.update({name: entry for name, entry in own.items() if name not in all_of})
    return whole


def _told(p: Tensor, entry: dict[str, Any]) -> dict[str, Any]:
    return {key: _Part(value.dtype) if is_part(value, p) else value for key, value in entry.items()}


def _catch_up(parallel: Parallel, stock: _Stock) -> None:
    """A rank that waited stands where the others stand."""
    parallel.calls, parallel.calls_in_step, parallel.step, parallel.loss = stock.position
    parallel.precision.go_on(stock.scale)
    for optimizer, settings in zip(parallel.optimizers, stock.settings, strict=True):
        for group, values in zip(optimizer.param_groups, settings, strict=True):
            group.update(values)
    for p, (value, states) in zip(of_optimizers(parallel), stock.outside, strict=True):
        p.data.copy_(value)
        p.grad = None
        for optimizer, state in zip(parallel.optimizers, states, strict=True):
            if state:
                optimizer.state[p] = rebuild(state, partial(beside, p))


@dataclass(frozen=True)
class _Way:
    """How tensors lay: by parameter, on the first `size` ranks of the group."""

    before: dict[str, Layout | None]
    shapes: dict[str, torch.Size]
    size: int
    group: Group

    def whole(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """On every rank of the group, from the parts of a tensor that lies as a parameter lay. Collective."""
        world, layout = World.current(), self.before[name]
        if part is None:
            part = torch.empty((), dtype=dtype, device=world.device)
        if world.rank < self.size and layout is not None:
            part = gathered(part, layout)
        if self.group.size > self.size:
            part = part.new_empty(self.shapes[name]) if world.rank >= self.size else part.contiguous()
            self.group.run("broadcast", [part], root=0, of="redistribute")
        return part


def _make_whole(parallel: Parallel, way: _Way) -> None:
    """The whole weights under every Parameter, the owners' buffers everywhere, and nothing that says parallel."""
    for name, p in parallel.parameters.items():
        p.grad = None
        p.data = way.whole(name, p.detach(), p.dtype)
        set_layout(p, None)
    for buffer in parallel.model.buffers():
        layout = layout_of(buffer)
        value = buffer.detach().contiguous()
        way.group.run("broadcast", [value], root=0 if layout is None else owner(layout), of="redistribute")
        buffer.data = value
        set_layout(buffer, None)
    parallel.changes.undo(parallel.model)


def _settle(parallel: Parallel, strategy: Strategy, options: dict[str, Any], group: Group) -> None:
    """Distribute a model that is whole. Raises ValueError on all ranks of the group, the model being whole again."""
    parallel.strategy, parallel.mesh, parallel.options = strategy, strategy.mesh(), options
    parallel.precision = parallel.precision.moved(strategy)
    parallel.pipeline = parallel.tensor = None
    parallel.changes, parallel.pending = Changes(), False
    parallel.compared.clear()
    parallel.explored.clear()
    parallel.outside.clear()  # a rank that waited knows none: they are compared again at their next step
    parallel.changed()
    if parallel.dropout is not None:
        parallel.dropout.sites, parallel.dropout.features, parallel.dropout.index = None, (), 0
    works = parallel.rank < parallel.mesh.size
    kept, parallel.optimizers = parallel.optimizers, []  # passes leave states alone: these are in the old parts
    try:
        alike(lambda: distribute(parallel) if works else None, group, "redistribute")
    except ValueError:
        parallel.changes.undo(parallel.model)
        raise
    finally:
        parallel.optimizers = kept
    if not works:
        for p in parallel.parameters.values():
            _let_go(p, parallel)
    forget_graphs(parallel)


def _let_go(p: nn.Parameter, parallel: Parallel) -> None:
    """Of a parameter that no longer concerns this rank only shape and identity remain."""
    shape = tuple(p.shape)
    p.data = absent(shape, p.dtype, p.device)
    set_layout(p, Layout.of(shape, str(p.dtype).removeprefix("torch."), parallel.mesh))


def _carry(parallel: Parallel, name: str, p: nn.Parameter, gradient: Tensor | None, stock: _Stock, way: _Way) -> None:
    """Gradient and states, one tensor at a time: whole, cut as the parameter is now, the old part let go."""
    rank = parallel.rank
    is_here = rank < parallel.mesh.size and holds(p, rank)

    def moved(part: Tensor | None, told: _Part) -> Tensor | None:
        whole = way.whole(name, part, told.dtype)
        layout = layout_of(p)
        if not is_here:
            return None
        return whole if layout is None else local_part(whole, layout, rank)

    if name in stock.gradients:
        p.grad = moved(gradient, stock.gradients[name])
    for optimizer, states in zip(parallel.optimizers, stock.states, strict=True):
        own = optimizer.state.pop(p, {})
        fresh = {}
        for key, told in states.get(name, {}).items():
            mine = own.pop(key, None)
            fresh[key] = moved(mine, told) if isinstance(told, _Part) else (told if mine is None else mine)
        if is_here and fresh:
            optimizer.state[p] = fresh
