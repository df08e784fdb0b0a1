"""What a parallel model carries: its strategy, its mesh, and what the passes made of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from colossal_nb.parallel import compiled
from colossal_nb.parallel.draws import Draws
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.origin import Origin
from colossal_nb.parallel.precision import Precision
from colossal_nb.parallel.steps import Position, Steps
from colossal_nb.parallel.tree import require_known
from colossal_nb.parallel.undo import Changes
from colossal_nb.parallel.world import World
from colossal_nb.plan import Mesh, On, Strategy

if TYPE_CHECKING:
    from colossal_nb.parallel.dropout import KeyedDropout
    from colossal_nb.parallel.pipeline import Pipeline
    from colossal_nb.parallel.tensor import Report

NAME = "_colossal"
UNSPLIT = "may be copied before it is split"  # in the memo of a copy that is split by itself


@dataclass(eq=False)
class Parallel:
    """`strategy` has its numbers filled in; `parameters` holds every parameter of the model once, in its order, also
    those that lie on other pipeline stages. `pending`: the split waits for the first real batch. `torn`: why the
    weights are not those of one step (see `trouble`), `source`: the replica that is whole. `number`: the same on
    all ranks of the model and of no other model, "" for a copy. `saved`: the checkpoint that
    was written or read last. `moving`: buffers that a forward writes to, by the owners that are in training, `before`:
    those of the last forward_backward with what they were before it. `stepped`: optimizers that parallelize was not
    given and that have stepped since then. `outside`: tensors that are trained with the
    model and are none of its parameters, whole and equal on all ranks; `explored`: the losses whose graph has been
    looked through for them."""

    model: nn.Module
    strategy: Strategy
    mesh: Mesh
    parameters: dict[str, nn.Parameter]
    forward: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    pipeline: Pipeline | None = None
    tensor: Report | None = None
    dropout: KeyedDropout | None = None
    draws: Draws = field(default_factory=Draws)
    precision: Precision = field(default_factory=Precision)
    changes: Changes = field(default_factory=Changes)
    origin: Origin = field(default_factory=Origin)
    pending: bool = False
    inside: bool = False
    half_moved: bool = False
    accumulating: bool = False
    compared: set[Any] = field(default_factory=set)
    loss_forms: set[frozenset[Any]] = field(default_factory=set)
    explored: set[Any] = field(default_factory=set)
    outside: list[Tensor] = field(default_factory=list)
    hooked: set[int] = field(default_factory=set)
    calls: int = 0
    calls_in_step: int = 0
    step: int = 0
    loss: float = math.nan
    steps: Steps = field(default_factory=lambda: Steps(World.current().era))
    torn: str = ""
    source: int | None = None
    number: str = ""
    saved: str = ""
    moving: dict[frozenset[str], set[str]] = field(default_factory=dict)
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    lives: dict[int, int] = field(default_factory=lambda: dict(World.current().lives))
    _held: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return World.current().rank

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinate."""
        return self.mesh.coordinate(self.rank)

    @property
    def replicas(self) -> int:
        return self.mesh.axis_size("dp")

    @property
    def microbatches(self) -> int:
        return self.strategy.microbatches or 1

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage computes the loss."""
        return self.place["pp"] == self.mesh.axis_size("pp") - 1

    @property
    def device(self) -> str:
        return World.current().device

    def group(self, *axes: str) -> Group:
        """This rank's group along axes of the mesh; along all of them if none is named."""
        return group_along(self.mesh, axes or self.mesh.axes)

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters of which this rank holds some part."""
        if not self._held:
            self._held = {name: p for name, p in self.parameters.items() if holds(p, self.rank)}
        return self._held

    def changed(self) -> None:
        """The passes have changed who holds what."""
        self._held = {}

    def position(self) -> Position:
        """Where this rank stands."""
        steps, optimizers, cut = self.steps, self.optimizers, len(self.steps.over)
        return Position(
            self.rank,
            tuple(steps.finished[number] for number in range(len(optimizers))),
            steps.half_done(optimizers),
            bool(cut),
            steps.hooks_wrote(optimizers),
            steps.replacing,
            steps.known,
            steps.entered,
            self.calls,
            0 if cut else self.calls_in_step,
            self.step + cut,
        )

    def end_step(self) -> None:
        """Count the updates that are over: one whose post-hooks were cut short is one all the same."""
        if self.steps.over:
            self.step, self.calls_in_step = self.step + len(self.steps.over), 0
            self.steps.over.clear()

    def __deepcopy__(self, memo: dict[Any, Any]) -> Parallel:
        """Belongs to a copy of the model, whose modules and parameters `copy.deepcopy` has made before."""
        from colossal_nb.parallel import trouble

        require_known(self)
        if self.pending and UNSPLIT not in memo:
            raise ValueError(
                f"this {type(self.model).__name__} is split at its first batch, and a copy made now would stay whole: "
                "make the copy after the first step (cnb.forward_backward, or model(x)), or before parallelize for one "
                "that is not parallel"
            )
        trouble.glance(self)
        twin = replace(
            self,
            model=memo[id(self.model)],
            parameters={name: memo[id(p)] for name, p in self.parameters.items()},
            forward=copy.deepcopy(self.forward, memo),
            precision=self.precision.twin(),
            optimizers=[],
            stepped=[],
            explored=set(),
            outside=[],
            draws=Draws(),
            origin=Origin(),
            hooked=set(),
            steps=Steps(self.steps.era, self.steps.looked, self.calls, self.calls, known=self.torn),
            source=None,
            number="",
            moving={},
            before=[],
            _held={},
        )
        memo[id(self)] = twin
        World.current().parallels.add(twin)
        twin.pipeline = copy.deepcopy(self.pipeline, memo)
        twin.dropout = copy.deepcopy(self.dropout, memo)
        twin.compared, twin.lives = set(self.compared), dict(self.lives)
        twin.loss_forms = set(self.loss_forms)
        for name, p in self.parameters.items():
            set_layout(twin.parameters[name], layout_of(p))
            if not holds(p, self.rank):
                twin.parameters[name].data = p.data  # one element that stands for all; a copy would fill its shape
        twin.changes = self.changes.moved(self.parameters, twin.parameters)
        return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, calling the model runs the user's own forward on a part of the batch."""
        before, self.inside = self.inside, True
        try:
            with stepping(self):
                yield
        finally:
            self.inside = before


@contextmanager
def stepping(parallel: Parallel) -> Iterator[None]:
    """Inside every rank has its own part of this model's batch: other parallel models are called with parts, too."""
    world = World.current()
    before, world.stepping = world.stepping, parallel
    try:
        yield
    finally:
        world.stepping = before


def group_along(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    """This rank's group along axes. Axes of one rank add nothing, so that the others' connections are used again."""
    longer = tuple(axis for axis in axes if mesh.axis_size(axis) > 1) or axes[:1]
    return World.current().group(mesh, longer[0] if len(longer) == 1 else longer)


def holds(p: Tensor, rank: int) -> bool:
    """Whether a rank has some part of a parameter."""
    layout = layout_of(p)
    if layout is None:
        return True
    place = layout.mesh.coordinate(rank)
    pairs = zip(layout.mesh.axes, layout.placements, strict=True)
    return all(place[axis] in placement.coordinates for axis, placement in pairs if isinstance(placement, On))


def find(model: Any) -> Parallel | None:
    """What `parallelize` left on a model; None for a model that it never saw."""
    return model.__dict__.get(NAME) if isinstance(model, nn.Module) else None


def refuse_pickle() -> NoReturn:
    raise TypeError(
        "a parallel model is not pickled, since a rank may hold a part of it: cnb.save(path, model, optimizer), or "
        "torch.save(model.state_dict(), path), whose weights are whole"
    )


class Unpickled:
    """Stands first in a parallel model's attributes, so that pickle meets it before what it could not say a word of."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle()

    def __deepcopy__(self, memo: dict[int, Any]) -> Unpickled:
        return self


def attach(parallel: Parallel) -> None:
    """Leave it on the model, for `find`."""
    own = parallel.model.__dict__
    rest = dict(own)
    own.clear()
    own.update({f"{NAME}_unpickled": Unpickled(), **rest, NAME: parallel})
    World.current().parallels.add(parallel)


def require(model: Any) -> Parallel:
    """The model's `Parallel`. Raises ValueError where there is none, or where the cell names another strategy."""
    parallel = find(model)
    if parallel is None:
        what = type(model).__name__
        if not isinstance(model, nn.Module):
            raise ValueError(f"the first argument is the model, as cnb.parallelize returned it, not {what}")
        if compiled.wraps(model) and find(model._orig_mod) is not None:
            raise ValueError(
                "this model was compiled after parallelize: take the model that parallelize returned; torch.compile "
                "does not run on several ranks"
            )
        raise ValueError(
            f"this {what} is not parallel yet: model, optimizer = cnb.parallelize(model, optimizer) comes first"
        )
    require_cell(parallel)
    require_known(parallel)
    return parallel


def require_whole(parallel: Parallel) -> None:
    """Raise ValueError where a rank of the model was replaced: its part is gone, and it would not answer; and where a
    move to another strategy was cut short."""
    if parallel.half_moved:
        saved = f", then cnb.load({parallel.saved!r}, model, optimizer)" if parallel.saved else ""
        raise ValueError(
            "cnb.redistribute was cut short, and the ranks may hold parts of two strategies: run the cell that makes "
            f"the model again{saved}"
        )
    lives = World.current().lives
    lost = [rank for rank in range(parallel.mesh.size) if lives.get(rank, 1) != parallel.lives.get(rank, 1)]
    if lost:
        what = f"rank {lost[0]}'s part" if len(lost) == 1 else f"the parts of ranks {', '.join(map(str, lost))}"
        raise ValueError(f"this model lost {what}: run the cell that makes it again")


def require_cell(parallel: Parallel) -> None:
    """Raise ValueError in a cell that names another strategy than the model's, and for a model that lost a part."""
    world = World.current()
    require_whole(parallel)
    if parallel.mesh.size > world.world_size:
        raise ValueError(
            f"the model was made parallel as {text(parallel.strategy)} on {parallel.mesh.size} ranks; "
            f"{world.world_size} work together now: build it anew and call parallelize"
        )
    own = named(parallel.strategy, world.world_size)
    if world.rank >= parallel.mesh.size:
        raise ValueError(
            f"rank {world.rank} holds nothing of this model, which works as {own} on {parallel.mesh.size} of the "
            f"{world.world_size} ranks: begin the cell with %%colossal {own}"
        )
    if world.strategy is not None and world.strategy.filled(world.world_size) != parallel.strategy:
        cell = text(world.strategy.filled(world.world_size)) or "dp=1"
        alone = "%%colossal alone or with " if parallel.mesh.size == world.world_size else "%%colossal "
        move = "move the model"
        if world.world_size > parallel.mesh.size:
            move += f" (where all {world.world_size} ranks made it)"
        raise ValueError(
            f"this cell runs under {cell}, but the model is parallel as {own}: begin the cell with {alone}{own}, or "
            f'{move}: model, optimizer = cnb.redistribute(model, optimizer, "{cell}")'
        )


def named(strategy: Strategy, ranks: int) -> str:
    """A filled strategy in the fewest words that mean it in a cell on so many ranks."""
    short = text(strategy)
    if short and Strategy.parse(short).filled(ranks) == strategy:
        return short
    usual = strategy.microbatches == strategy.pp
    return str(replace(strategy, chunks=None, microbatches=None if usual else strategy.microbatches))


def text(strategy: Strategy) -> str:
    """A filled strategy in the fewest words."""
    usual = strategy.microbatches == strategy.pp
    short = replace(strategy, chunks=None, microbatches=None if usual else strategy.microbatches)
    if strategy.dp == 1 and strategy.needs > 1:
        short = replace(short, dp=None)
    return str(short)


def tell(line: str) -> None:
    """Say a line to the user, once for all ranks where a notebook collects them."""
    world = World.current()
    if world.store is None:
        print(line)
    else:
        world.notes.append(line)
