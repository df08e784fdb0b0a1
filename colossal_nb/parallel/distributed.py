"""The user's own `torch.distributed` calls, DDP and DTensor included, led to the gate.

Inside ranks the default process group exists from the start; pasted `init_process_group` and `destroy_process_group`
do nothing and say so once.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from colossal_nb.parallel import compat
from colossal_nb.parallel.process_group import BACKEND, UserGroup
from colossal_nb.parallel.world import World

_DEFAULT = "user"


def _create(options: Any, _: Any = None) -> UserGroup:
    world = World.current()
    listed = tuple(world.ranks[index] for index in options.global_ranks_in_group)
    name = f"{_DEFAULT}{options.group_id}" if listed else _DEFAULT
    return UserGroup(name, listed or world.ranks, options.group_rank, options.group_id)


def start() -> None:
    """Make torch.distributed ready in this rank, without talking to the others; again after a regroup.

    Raises nothing where it is ready already; a world with other ranks than before gets new groups, and whatever holds
    the old ones must be built again.
    """
    world = World.current()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        _replace("init_process_group", _init)
        _replace("destroy_process_group", _destroy)
        _replace("new_group", _new_group)
    compat.heal_coalescing()
    if dist.is_initialized():
        default: Any = dist.group.WORLD
        if isinstance(default, UserGroup) and default.ranks == world.ranks and default.rank() == _index(world):
            return
        _ORIGINAL["destroy_process_group"]()
    before = sys.excepthook
    store = compat.local_store()
    try:
        _ORIGINAL["init_process_group"](BACKEND, store=store, rank=_index(world), world_size=world.world_size)
    finally:
        sys.excepthook = before


def expect() -> None:
    """A program that uses torch.distributed begins, on all ranks: connect the default group in the background.

    A message is between two ranks, but a group is connected by all its members, whether they take part or not.
    """
    world = World.current()
    world.some(_DEFAULT, world.ranks).connect_ahead()


def _index(world: World) -> int:
    return world.ranks.index(world.rank)


# The functions of torch that ours stand in front of.
_ORIGINAL: dict[str, Callable[..., Any]] = {}


def _replace(name: str, new: Callable[..., Any]) -> None:
    _ORIGINAL[name] = getattr(dist, name)
    functools.update_wrapper(new, _ORIGINAL[name])
    compat.put_in_front(name, new)


def _init(backend: str | None = None, *args: Any, **options: Any) -> None:
    world = World.current()
    text = f"init_process_group: the ranks are connected already (rank {world.rank} of {world.world_size})"
    asked = options.get("world_size", -1)
    if asked not in (-1, world.world_size):
        text += f"; world_size={asked} was ignored"
    world.note(text)
    start()


def _destroy(group: Any = None) -> None:
    if group is None or group == dist.group.WORLD:
        World.current().note("destroy_process_group: the ranks stay connected for the next cell")
    else:
        _ORIGINAL["destroy_process_group"](group)


def _new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
    if backend is not None and backend != BACKEND:
        World.current().note(f"new_group: backend {backend!r} is carried by the cluster's own transport")
    made = _ORIGINAL["new_group"](ranks, timeout, None, *args, **options)
    if isinstance(made, UserGroup):
        made.group.connect_ahead()
    return made
