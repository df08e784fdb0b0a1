"""Whether the host has room for the copies that `verify` works on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from colossal_nb.parallel import objects, optimizers
from colossal_nb.parallel.gradients import bytes_of
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.ledger import mib
from colossal_nb.parallel.world import World

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def lacking(parallel: Parallel) -> str:
    """Why the host has no room, "" where it has. The same on all ranks. Collective."""
    held = list(parallel.held().values())
    states = sum(bytes_of(value) for value, _ in optimizers.tensors(parallel.optimizers))
    own = sum(map(bytes_of, held))
    needed = 2 * own + states + World.current().ledger.peak_bytes()  # weights, gradients, states, what a step saves
    whole = sum(whole_bytes(p) for p in parallel.parameters.values())
    told = objects.all_gather((needed, states / max(1, own), free_bytes()), parallel.group(), "verify")
    total = sum(each for each, _, _ in told)
    total += whole * (3 + max(share for _, share, _ in told)) + max(each for each, _, _ in told)
    free = min((room for _, _, room in told if room is not None), default=None)
    if free is None or total <= free:
        return ""
    return f"the sequential program and copies of all ranks need about {mib(total)}, the host has {mib(free)} free"


def free_bytes() -> int | None:
    """What the host, or the container, can still give; None where it does not say."""
    found = []
    try:
        lines = [line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")]
        found = [int(line.split()[1]) * 1024 for line in lines]
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit.isdigit():
            found.append(int(limit) - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def whole_bytes(p: Tensor) -> int:
    """Of the whole tensor, whatever of it is here."""
    layout = layout_of(p)
    size = p.element_size()
    for length in p.shape if layout is None else layout.global_shape:
        size *= length
    return size
