"""A rank that is stuck in a collective comes free, keeps its variables, and works on in the next epoch."""

import os
import random
import signal
import threading
import time

import pytest
import torch
from ranks_fixture import RankFailure

from colossal_nb.parallel import collectives, distributed
from colossal_nb.parallel.work import Released
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh

# Free in about 10 ms; the tests only say that it is not a hang.
SOON_S = 5.0


def _counts():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _stuck_call(world, mesh):
    """Each rank in an operation that another does not enter."""
    calls = [
        lambda: collectives.all_reduce(torch.ones(1 << 16), mesh, "dp"),
        lambda: world.some("pair", (1, 2)).run("all_gather", [torch.ones(2 << 12), torch.ones(1 << 12)]),
        lambda: world.whole().run("recv", [torch.ones(4)], peer=3),
        lambda: world.whole().run("recv", [torch.ones(4)], peer=0),
    ]
    calls[world.rank]()


def _abort_later(world, delay_s, at):
    def abort():
        at.append(time.perf_counter())
        world.abort("test")

    timer = threading.Timer(delay_s, abort)
    timer.start()
    return timer


def _cycles(count):
    world, mesh = World.current(), Mesh({"dp": World.current().world_size})
    kept, seen, freed_s = torch.arange(4.0), [], []
    for cycle in range(1, count + 1):
        assert collectives.all_reduce(kept, mesh, "dp").tolist() == [world.world_size * x for x in range(4)]
        if world.rank in (1, 2):
            world.some("pair", (1, 2)).run("barrier", [])
        world.whole().run("barrier", [])
        aborted_at = []
        timer = _abort_later(world, 0.1, aborted_at)
        with pytest.raises(Released):
            _stuck_call(world, mesh)
            world.whole().run("barrier", [])
        freed_s.append(time.perf_counter() - aborted_at[0])
        timer.join()
        assert world.recorder.open() == []
        with pytest.raises(Released):
            collectives.all_reduce(kept, mesh, "dp")
        world.regroup(cycle, range(world.world_size))
        seen.append(_counts())
    end = time.monotonic() + 10.0
    while time.monotonic() < end and any(now > then for now, then in zip(_counts(), seen[1], strict=True)):
        time.sleep(0.05)  # old groups are taken apart in the background
    seen.append(_counts())
    assert collectives.all_reduce(kept, mesh, "dp").tolist() == [world.world_size * x for x in range(4)]
    return seen, max(freed_s)


def test_all_ranks_stuck_in_different_operations_come_free_ten_times_over_without_growth(ranks):
    for seen, freed_s in ranks(4).run(_cycles, 10):
        assert freed_s < SOON_S
        assert seen[-1][0] <= seen[1][0], "threads grow"
        assert seen[-1][1] <= seen[1][1], "file descriptors grow"


def _interrupted():
    world = World.current()
    kept = torch.ones(2)
    world.whole().run("barrier", [])

    def interrupt():
        world.interrupted = True
        world.abort("interrupt")

    threading.Timer(0.1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        world.whole().run("recv", [torch.ones(1)], peer=(world.rank + 1) % world.world_size)
    with pytest.raises(KeyboardInterrupt):
        world.whole().run("barrier", [])
    world.regroup(1, range(world.world_size))
    world.whole().run("all_reduce", [kept])
    return kept.tolist()


def test_an_interrupt_is_a_keyboard_interrupt_on_every_rank(ranks):
    assert ranks(3).run(_interrupted) == [[3.0, 3.0]] * 3


def _alone_in_a_new_group():
    """Rank 0 enters a group whose other member never comes."""
    world = World.current()
    if world.rank == 0:
        timer = _abort_later(world, 0.3, [])
        with pytest.raises(Released, match="test"):
            world.some("odd", (0, 1)).run("barrier", [])
        timer.join()
    world.regroup(1, (0, 1))
    x = torch.ones(1)
    world.some("odd", (0, 1)).run("all_reduce", [x])
    return x.item()


def test_a_rank_that_waits_for_members_to_connect_comes_free(ranks):
    assert ranks(2).run(_alone_in_a_new_group) == [2.0, 2.0]


def _asynchronous():
    world, group = World.current(), World.current().whole()
    group.run("barrier", [])
    other = 1 - world.rank
    reduced = group.run("all_reduce", [torch.ones(1 << 12)], wait=False) if world.rank == 0 else None
    works = [reduced] if reduced else []
    works += [group.run("recv", [torch.ones(3)], peer=other, tag=tag, wait=False) for tag in range(3)]
    timer = _abort_later(world, 0.2, [])
    for work in works:
        with pytest.raises(Released):
            work.wait()
    timer.join()
    assert world.recorder.open() == []
    world.regroup(1, range(2))
    x = torch.ones(1)
    world.whole().run("all_reduce", [x])
    return x.item()


def test_pending_work_is_released_too(ranks):
    assert ranks(2).run(_asynchronous) == [2.0, 2.0]


def _shrink():
    """Ranks 0 and 2 go on without rank 1, then all three again."""
    world = World.current()
    x, y = torch.tensor([float(world.rank)]), torch.ones(1)
    world.whole().run("all_reduce", [y])
    world.abort("rank 1 is gone")
    if world.rank != 1:
        world.regroup(1, (0, 2))
        assert world.world_size == 2
        world.whole().run("all_reduce", [x])
    world.regroup(2, (0, 1, 2))
    z = torch.ones(1)
    world.whole().run("all_reduce", [z])
    with pytest.raises(ValueError, match="epoch 2 is not newer than 2"):
        world.regroup(2, (0, 1, 2))
    return x.item(), z.item()


def test_survivors_regroup_and_the_lost_one_returns(ranks):
    assert ranks(3).run(_shrink) == [(2.0, 3.0), (1.0, 3.0), (2.0, 3.0)]


def _die():
    world = World.current()
    x = torch.ones(1)
    world.whole().run("all_reduce", [x])
    if world.rank == 1:
        os._exit(7)
    world.whole().run("recv", [x], peer=1)


def test_a_death_frees_the_ranks_that_wait_for_it(ranks):
    pool = ranks(2)
    with pytest.raises(RankFailure, match="rank 1 died"):
        pool.run(_die)
    assert pool.answers[0][0] == "error"
    assert isinstance(pool.answers[0][2], Released)


def _signalled():
    """A real SIGINT beside the abort: Python raises it as soon as gloo lets go, wherever that is."""
    world = World.current()
    kept = torch.ones(2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for cycle in range(1, 6):
            world.whole().run("barrier", [])

            def interrupt():
                world.interrupted = True
                os.kill(os.getpid(), signal.SIGINT)
                world.abort("interrupt")

            timer = threading.Timer(0.1, interrupt)
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                if (world.rank + cycle) % 2:
                    world.whole().run("recv", [torch.ones(1)], peer=(world.rank + 1) % world.world_size)
                world.whole().run("all_reduce", [kept.clone()])
                time.sleep(30)
            timer.join()
            assert world.recorder.open() == []
            assert torch.is_grad_enabled()
            world.regroup(cycle, range(world.world_size))
    finally:
        signal.signal(signal.SIGINT, before)
    world.whole().run("all_reduce", [kept])
    return kept.tolist()


def test_a_signal_and_an_abort_together_are_one_keyboard_interrupt(ranks):
    assert ranks(2).run(_signalled) == [[2.0, 2.0]] * 2


def _cut_midway(cycles, seed):
    """All ranks in one big transfer after another when the abort comes: gloo may lose the end of a send then."""
    world, mesh = World.current(), Mesh({"dp": World.current().world_size})
    mine, alike = random.Random(1000 * seed + world.rank), random.Random(seed)
    big = torch.ones(1 << 20)
    for cycle in range(1, cycles + 1):
        if cycle % 2:  # else the abort may also come while the groups connect
            collectives.all_reduce(big, mesh, "dp")
        world.whole().run("barrier", [])
        timer = _abort_later(world, 0.02 + 0.08 * mine.random(), [])
        calls = [collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter, collectives.broadcast]
        with pytest.raises(Released):
            while True:
                alike.choice(calls)(big, mesh, "dp")
        timer.join()
        assert world.recorder.open() == []
        world.regroup(cycle, range(world.world_size))
        alike.seed(cycle)
    return collectives.all_reduce(torch.ones(1), mesh, "dp").item()


@pytest.mark.parametrize("seed", [1, 2])
def test_transfers_that_are_cut_midway_come_free(ranks, seed):
    assert ranks(3).run(_cut_midway, 10, seed) == [3.0] * 3


def _ddp_cut():
    """DDP waits for futures in C++, not in our gate."""
    world = World.current()
    distributed.start()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1 << 11, 1 << 10))
    x = torch.randn(2, 1 << 11)
    for cycle in range(1, 6):
        world.whole().run("barrier", [])
        timer = _abort_later(world, 0.05 * (cycle - 1) / 4 + 0.02, [])
        with pytest.raises(RuntimeError):
            while True:
                model(x).sum().backward()
        timer.join()
        world.regroup(cycle, range(world.world_size))
        distributed.start()
        assert world.recorder.open() == []
        model = torch.nn.parallel.DistributedDataParallel(model.module)
    return world.epoch


def test_ddp_comes_free_when_its_buckets_are_cut(ranks):
    assert ranks(2).run(_ddp_cut) == [5, 5]
