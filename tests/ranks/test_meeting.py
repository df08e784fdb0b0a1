"""Members that connect: all of them in one attempt, or all of them again."""

import threading

import pytest
import torch

from colossal_nb.parallel.transports import gloo, meeting
from colossal_nb.parallel.work import Released
from colossal_nb.parallel.world import World


def _stalled_once(stalling):
    """The first attempt stalls for ever on some ranks; then a sum over the connections that were made."""
    world, real, tried = World.current(), gloo._connected, []

    def connect(place, index, size, options):
        tried.append(place._prefix.rsplit("/", 2)[1])
        if len(tried) == 1 and world.rank in stalling:
            threading.Event().wait()
        return real(place, index, size, options)

    gloo._connected, before, meeting.LIMIT_S = connect, meeting.LIMIT_S, 1.0
    try:
        x = torch.ones(1)
        world.whole().run("all_reduce", [x])
        return x.item(), tried
    finally:
        gloo._connected, meeting.LIMIT_S = real, before


@pytest.mark.parametrize("stalling", [(0,), (1, 2), (0, 1, 2)])
def test_connections_that_stall_on_some_ranks_are_made_again_on_all(ranks, stalling):
    assert ranks(3).run(_stalled_once, stalling) == [(3.0, ["attempt0", "attempt1"])] * 3


def _never():
    gloo_connected, before = gloo._connected, (meeting.LIMIT_S, meeting.ATTEMPTS)
    gloo._connected = lambda *_: threading.Event().wait()
    meeting.LIMIT_S, meeting.ATTEMPTS = 0.1, 2
    try:
        with pytest.raises(TimeoutError, match=r"2 ranks did not come to be connected .* within 0.1 s, 0.2 s"):
            World.current().whole().run("barrier", [])
    finally:
        gloo._connected, (meeting.LIMIT_S, meeting.ATTEMPTS) = gloo_connected, before


def test_connections_that_never_come_are_an_error(ranks):
    ranks(2).run(_never)


def _aborted():
    """An abort reaches a rank that waits for a member which has not come."""
    world = World.current()
    if world.rank == 0:
        threading.Timer(0.2, world.abort, ["stop"]).start()
        with pytest.raises(Released, match="stop"):
            world.whole().run("barrier", [])
    return world.aborted


def test_an_abort_ends_the_wait_for_a_member(ranks):
    assert ranks(2).run(_aborted) == [True, False]


def _failing():
    def connect(*_):
        raise RuntimeError("no route")

    gloo._connected, real = connect, gloo._connected
    try:
        World.current().whole().run("barrier", [])
    finally:
        gloo._connected = real


def test_what_connecting_raises_is_raised(ranks):
    with pytest.raises(RuntimeError, match="no route"):
        ranks(2).run(_failing)
