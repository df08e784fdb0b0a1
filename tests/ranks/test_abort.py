"""A rank that is stuck in a collective comes free, keeps its variables, and works on in the next epoch."""

import os
import threading
import time

import pytest
import torch
from colossal_nb.parallel import collectives
from colossal_nb.parallel.group import Released
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh

# Free in about 10 ms; the tests only say that it is not a hang.
SOON_S = 5.0


def _counts():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _stuck_call(world, mesh):
    """Each rank in a collective that the others do not enter."""
    calls = [
        lambda: collectives.all_reduce(torch.ones(1 << 16), mesh, "dp"),
        lambda: collectives.broadcast(torch.ones(4), mesh, "dp", root=0),
        lambda: collectives.all_gather(torch.ones(1 << 12), mesh, "dp"),
        lambda: world.whole().run("recv", [torch.ones(4)], peer=0),
    ]
    calls[world.rank % len(calls)]()


def _cycles(count):
    world, mesh = World.current(), Mesh({"dp": World.current().world_size})
    kept, seen, freed_s = torch.arange(4.0), [], []
    for cycle in range(1, count + 1):
        assert collectives.all_reduce(kept, mesh, "dp").tolist() == [world.world_size * x for x in range(4)]
        world.whole().run("barrier", [])
        aborted_at = []

        def abort():
            aborted_at.append(time.perf_counter())
            world.abort("test")

        timer = threading.Timer(0.2, abort)
        timer.start()
        with pytest.raises(Released):
            _stuck_call(world, mesh)
            world.whole().run("barrier", [])
        freed_s.append(time.perf_counter() - aborted_at[0] if aborted_at else 0.0)
        timer.join()
        assert world.recorder.open() == []
        with pytest.raises(Released):
            collectives.all_reduce(kept, mesh, "dp")
        world.regroup(cycle, range(world.world_size))
        seen.append(_counts())
    assert collectives.all_reduce(kept, mesh, "dp").tolist() == [world.world_size * x for x in range(4)]
    return seen, max(freed_s)


def test_all_ranks_stuck_in_different_collectives_come_free_ten_times_over_without_growth(ranks):
    for seen, freed_s in ranks(4).run(_cycles, 10):
        assert freed_s < SOON_S
        assert seen[-1][0] <= seen[1][0], "threads grow"
        assert seen[-1][1] <= seen[1][1], "file descriptors grow"
