"""A rank's first moments: from a forked process to an engine that can take cells."""
from __future__ import annotations

import os
import random
import signal
import sys
from typing import Any

import numpy as np
import torch
import zmq

from colossal_nb.cluster.host import die_with
from colossal_nb.cluster.wire import Address
from colossal_nb.engine import kernel, timing
from colossal_nb.engine.cell import Cells
from colossal_nb.engine.flow import Flow
from colossal_nb.engine.interrupts import Interrupts
from colossal_nb.engine.recorder import RankRecorder
from colossal_nb.engine.side import Side
from colossal_nb.engine.store import Store
from colossal_nb.parallel.world import World


def live(rank: int, life: int, parent: int, directory: str, order: dict[str, Any]) -> None:
    """The whole life of a rank. `order`: world_size, epoch, threads, address, seed, umask."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)       # until the engine is ready nothing may be interrupted
    _redirect(rank, directory)
    _environment(rank, order)
    _seed(int(order["seed"]))
    torch.set_num_threads(int(order["threads"]))
    context: zmq.Context[Any] = zmq.Context()
    address = Address(**order["address"])
    recorder, interrupts, flow = RankRecorder(rank), Interrupts(), Flow()
    store = Store(context, address, f"store:{rank}:{life}")
    side = Side(context, address, f"side:{rank}:{life}", recorder, interrupts, store, flow)
    side.phase("connected")
    side.start()
    world = World.start(rank, int(order["world_size"]), store, epoch=int(order["epoch"]), recorder=recorder)
    world.stopping, interrupts.stopping.land = interrupts.stopping, interrupts.agreed
    side.world = world
    cells = Cells(world, side, interrupts, flow)
    timing.install(lambda key, value: _agree(store, cells, key, value))

    def ready(engine: str, shell: Any) -> None:
        os.umask(int(order["umask"]))
        interrupts.install()
        side.phase("ready", engine=engine)

    side.phase("registering with the controller")
    kernel.start(rank, directory, cells, ready)


def _redirect(rank: int, directory: str) -> None:
    """No keyboard; what native code writes before the engine captures it goes to the rank's log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    log = os.open(os.path.join(directory, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    sys.stdin = os.fdopen(0, closefd=False)


def _environment(rank: int, order: dict[str, Any]) -> None:
    """What torchrun would say, for pasted code that reads it."""
    size = str(order["world_size"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)


def _seed(seed: int) -> None:
    """Equal states on all ranks; torch's own default state is what a fresh process has, and is left alone."""
    random.seed(seed)
    np.random.seed(seed)


def _agree(store: Store, cells: Cells, key: str, value: float) -> float:
    """The value of the first of the cell's ranks."""
    if len(cells.ranks) == 1:
        return value
    key = f"epoch{cells.world.epoch}/cell{cells.number}/{key}"
    if cells.world.rank == cells.ranks[0]:
        store.set(key, repr(value))
        return value
    return float(store.get(key))
