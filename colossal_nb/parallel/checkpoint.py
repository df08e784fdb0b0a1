"""`save` and `load`: a training run on disk, written under one strategy and read under any other."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossal_nb.parallel import objects, trouble
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.outcome import alike, together
from colossal_nb.parallel.saving import folder, rng
from colossal_nb.parallel.saving.background import Saving, Target, give_up, join_pending
from colossal_nb.parallel.saving.contents import Contents, contents
from colossal_nb.parallel.saving.draft import Draft, check_alike, draft_of, merged
from colossal_nb.parallel.saving.fill import fill, go_on
from colossal_nb.parallel.saving.fitting import check_fits
from colossal_nb.parallel.saving.locks import Lock
from colossal_nb.parallel.saving.reasons import half_loaded, not_opened, not_saved
from colossal_nb.parallel.saving.shards import METADATA, Index, Job, Reader, write
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as, shown


@called_as('cnb.save("runs/small", model, optimizer, step=step)')
def save(
    path: str | PathLike[str], model: nn.Module, optimizer: Any = None, *, wait: bool = True, **extra: Any
) -> Saving | None:
    """Write model, optimizer and what else belongs to the run into the folder `path`; `load` reads it. Collective.

    `optimizer`: one, a list of several, or None. `extra`, by name: objects with `state_dict()` (a scheduler, a data
    loader), whose state is kept, and plain values (tensors, numbers, strings, lists, tuples, sets, dicts), kept as
    rank 0 has them. The random states (rank 0's) and the place in the sequence of dropout masks go along; gradients do
    not.

    The folder is independent of the strategy: it holds whole tensors under the model's own names, each rank writes its
    part. A checkpoint that was there is replaced in one instant at the end: an error, an interrupt or a full disk
    leaves the old one. All ranks must see one file system.

    With wait=False the call returns as soon as everything is copied into host memory, and the copy is written while
    training goes on. What it returns has `wait()`; a failure is raised there, or told under the cell that runs when it
    is noticed. The next save and a load wait for the one before.

    Raises on all ranks alike: ValueError for a path that differs between ranks or belongs to something else, and for
    values that cannot be kept (naming them), OSError where writing fails.
    """
    if not isinstance(wait, bool):
        raise ValueError(f"wait={shown(wait)}: True, or False to go on while it is written")
    everything = contents(model, optimizer)
    parallel, group = everything.parallel, _group(everything.parallel)
    where = folder.agreed(path, group, "save")
    if parallel is not None:
        trouble.settle(parallel)
    if parallel is not None and parallel.accumulating:
        raise ValueError("save inside accumulate(model) would lose the gradients of the calls so far: save after it")
    if parallel is not None:
        trouble.require_alike(parallel)
    alike(join_pending, group, "save")
    states = {name: _state_of(name, value) for name, value in extra.items()}
    draft = alike(lambda: draft_of(everything, states, group.index == 0), group, "save")
    drafts = objects.all_gather(draft.plain, group, "save")
    check_alike(drafts, group)
    name = objects.broadcast(folder.new_name(), group, 0, "save")
    try:
        saving = _written(Target(where, name, group.ranks, group.index), draft, drafts, everything, wait)
    except OSError as error:
        raise not_saved(where, error) from error
    if parallel is not None and wait:
        parallel.saved = str(where)
    return saving


def _written(
    target: Target, draft: Draft, drafts: list[dict[str, Any]], everything: Contents, wait: bool
) -> Saving | None:
    """Into a new data folder, which becomes the checkpoint; at an error it goes."""
    group, saving = _group(everything.parallel), None
    first = group.index == 0
    try:
        alike(lambda: folder.begin(target.path, target.name, target.lock) if first else None, group, "save")
        alike(target.enter, group, "save")
        if not wait:
            saving = _in_background(target, draft, drafts, everything)
            return saving
        index = write(target.data, draft.pieces, group, World.current().rank)
        sums = together(lambda: _sums(target.data, index, group.index), group, "save")
        content = {**merged(drafts), "data": target.name, "tensors": index.to_plain()}
        content["files"] = {file: each for own in sums for file, each in own.items()}
        alike(lambda: folder.commit(target.path, content, target.lock) if first else None, group, "save")
    except BaseException:
        if first:
            folder.drop(target.path, target.name)
        raise
    finally:
        if saving is None:
            target.lock.release()
    return None


def _in_background(target: Target, draft: Draft, drafts: list[dict[str, Any]], everything: Contents) -> Saving:
    parallel, world = everything.parallel, World.current()
    group = _group(parallel)
    try:
        job = Job(target.data, draft.pieces, group, world.rank)
        alike(job.copy, group, "save")
        world.saving = Saving(target, job, {**merged(drafts), "data": target.name}, lambda: _group(parallel))
        if parallel is not None:
            world.saving.on_success = lambda: setattr(parallel, "saved", str(target.path))
        world.saving.start()
    except BaseException:
        give_up(target)
        raise
    saving: Saving = world.saving
    return saving


@called_as('extra = cnb.load("runs/small", model, optimizer)')
def load(path: str | PathLike[str], model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Read what `save` wrote, under any strategy, into a model and optimizers built as for the save. Collective.

    The model may be parallel or not; weights, buffers, the optimizer's states and settings, random states and the place
    in the sequence of dropout masks become those of the save, so that the next steps are those of a run that went on.
    Without `optimizer` its part stays unread. Returns `extra` by name: plain values as they were (tensors in host
    memory), of an object its state: `scheduler.load_state_dict(extra["scheduler"])`.

    Raises on all ranks alike, before anything is changed: FileNotFoundError where there is no checkpoint, ValueError
    where it is damaged or does not fit (listing names and shapes).
    """
    everything = contents(model, optimizer)
    group, rank = _group(everything.parallel), World.current().rank
    source = folder.agreed(path, group, "load")
    alike(join_pending, group, "load")
    lock = Lock()
    try:
        content = _opened(source, lock, group)
        alike(lambda: _check(source, content, everything, group), group, "load")
        return _filled(source, content, everything, group, rank)
    finally:
        lock.release()


def _opened(source: Path, lock: Lock, group: Group) -> dict[str, Any]:
    """What all ranks find to be the checkpoint, locked."""
    while True:
        content = alike(lambda: _read(source, lock), group, "load")
        if len(set(objects.all_gather(content["data"], group, "load"))) == 1:
            return content
        lock.release()  # another save replaced it between two ranks


def _read(source: Path, lock: Lock) -> dict[str, Any]:
    try:
        return folder.opened(source, lock)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise not_opened(source, error) from error


def _filled(source: Path, content: dict[str, Any], everything: Contents, group: Group, rank: int) -> dict[str, Any]:
    reader = Reader(source / content["data"], Index.from_plain(content["tensors"]))
    parallel = everything.parallel
    if parallel is not None:
        parallel.saved = str(source)
        trouble.replacing(parallel, "cnb.load")
    try:
        extra: dict[str, Any] = alike(lambda: fill(everything, content, reader, rank), group, "load")
    except OSError as error:
        raise half_loaded(source, error, folder.is_replaced(source, content)) from error
    rng.restore(content["random"])
    if parallel is not None:
        go_on(parallel, content["position"])
        trouble.united(parallel)
    return extra


def _group(parallel: Parallel | None) -> Group:
    """The ranks that save or load together: the model's mesh, or all ranks of the cell."""
    world = World.current()
    if parallel is not None:
        return parallel.group()
    return world.taking_part()


def _state_of(name: str, value: Any) -> Any:
    if isinstance(value, torch.optim.Optimizer):
        raise ValueError(
            f"{name} is an optimizer: give optimizers by the third argument, save(path, model, [first, second])"
        )
    state = getattr(value, "state_dict", None)
    return state() if callable(state) and not isinstance(value, type) else value


def _sums(data: Path, index: Index, number: int) -> dict[str, list[int]]:
    """Size and checksum of the files that this rank wrote."""
    names = {place.relative_path for place in index.places.values()}
    own = [METADATA] * (number == 0) + sorted(name for name in names if name.startswith(f"__{number}_"))
    return {name: folder.checksum(data / name) for name in own}


def _check(source: Path, content: dict[str, Any], everything: Contents, group: Group) -> None:
    """All that can be wrong with the checkpoint. The files are dealt to the ranks: each is read once."""
    check_fits(content, everything)
    files = sorted(content["files"].items())
    try:
        folder.verify(source / content["data"], files[group.index :: group.size])
    except (OSError, ValueError) as error:
        if folder.is_replaced(source, content):  # on a file system without locks
            raise OSError(
                f"another save replaced the checkpoint at {source} while it was read: load again; nothing was changed"
            ) from error
        if isinstance(error, OSError):
            raise not_opened(source, error) from error
        raise
