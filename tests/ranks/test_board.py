"""Ranks of one host see what the others call before bytes move."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks_fixture import RankFailure

from colossal_nb.parallel import board as boards
from colossal_nb.parallel.board import Board
from colossal_nb.parallel.transports.messages import Mismatch
from colossal_nb.parallel.work import Released
from colossal_nb.parallel.world import World

BYTES = 32


class Store:
    """Two members in one process."""

    def __init__(self):
        self.values, self.came = {}, threading.Condition()

    def set(self, key, value):
        with self.came:
            self.values[key] = value.encode()
            self.came.notify_all()

    def get(self, key):
        with self.came:
            assert self.came.wait_for(lambda: key in self.values, 10), key
            return self.values[key]


def pair():
    store = Store()
    with ThreadPoolExecutor(2, thread_name_prefix="member") as pool:
        return list(pool.map(lambda index: Board.shared(store, index, 2, BYTES), range(2)))


def test_what_one_writes_the_other_reads_and_only_under_its_number():
    ours, theirs = pair()
    assert theirs.read(0, 0) is None
    for number in range(200):
        block = bytes([number]) * BYTES
        ours.post(number, block)
        assert theirs.read(0, number) == block
        assert theirs.read(0, number + 1) is None
        assert theirs.read(1, number) is None
    assert theirs.read(0, 100) is None, "left behind: overwritten"


def test_a_wait_ends_when_the_last_has_come_or_its_limit_is_over():
    ours, theirs = pair()
    ours.post(0, b"a" * BYTES)
    assert ours.wait(0, lambda: None, 0.05) is False
    threading.Timer(0.05, theirs.post, (0, b"b" * BYTES)).start()
    assert ours.wait(0, lambda: None, 10) is True
    assert theirs.wait(0, lambda: None) is True


def test_a_wait_raises_what_its_check_raises():
    def check():
        raise Released("closed")

    with pytest.raises(Released, match="closed"):
        pair()[0].wait(0, check)


def test_no_descriptor_and_no_file_stays():
    before = len(os.listdir("/proc/self/fd"))
    made = pair()
    assert len(os.listdir("/proc/self/fd")) == before + 2, "one mapping each"
    del made
    assert len(os.listdir("/proc/self/fd")) == before


def test_members_on_several_hosts_have_none(monkeypatch):
    monkeypatch.setattr(boards, "host", lambda: threading.current_thread().name)
    assert pair() == [None, None]


def _parts(before):
    """Both have used all_reduce before; now they call different things, without waiting for each other first."""
    world = World.current()
    group = world.whole()
    for _ in range(before):
        group.run("all_reduce", [torch.ones(3)])
    group.wire()
    # As the kernel does after a rank has failed: gloo may lose the end of what a peer has cut.
    release = threading.Timer(5.0, group.epoch.abort, ["another rank failed"])
    release.start()
    with pytest.raises((Mismatch, Released)) as caught:
        group.run("all_reduce", [torch.ones(3 if world.rank else 4000)])
        group.run("barrier", [])
    release.cancel()
    release.join()
    with pytest.raises(Released):
        group.run("barrier", [])
    world.regroup(1, range(world.world_size))
    x = torch.ones(1)
    world.whole().run("all_reduce", [x])
    return type(caught.value).__name__, str(caught.value), x.item(), world.recorder.open()


@pytest.mark.parametrize("before", [0, 1, 100])
def test_our_own_groups_end_before_gloo_can_break(ranks, before):
    results = ranks(4).run(_parts, before)
    assert [result[2:] for result in results] == [(4.0, [])] * 4
    told = [text for name, text, _, _ in results if name == "Mismatch"]
    assert told
    assert any("rank 0 calls all_reduce (sum) float32 [4000], rank 1 calls" in text for text in told)


def _waits_for_the_dead():
    import torch.distributed as dist

    from colossal_nb.parallel import distributed

    distributed.start()
    dist.all_reduce(torch.ones(1))
    if World.current().rank == 1:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def test_a_death_ends_the_wait_on_the_board(ranks):
    pool = ranks(2)
    with pytest.raises(RankFailure, match="rank 1 died"):
        pool.run(_waits_for_the_dead)
    assert pool.answers[0][0] == "error"
    assert isinstance(pool.answers[0][2], Released)


def _mixed():
    """One rank waits later for what the other waits for at once: as torch allows."""
    import torch.distributed as dist

    from colossal_nb.parallel import distributed

    distributed.start()
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=World.current().rank == 0)
    if work is not None:
        work.wait()
    return x.tolist()


def test_an_asynchronous_call_meets_a_blocking_one(ranks):
    assert ranks(2).run(_mixed) == [[2.0, 2.0]] * 2
