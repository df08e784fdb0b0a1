"""The gate: what it refuses, what it carries although gloo does not, how messages are compared."""

import pytest
import torch
from ranks_fixture import RankFailure

from colossal_nb.parallel.transports.messages import Mismatch
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh


def _refused():
    group = World.current().whole()
    whole = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="avg of int64"):
        group.run("all_reduce", [whole], reduce="avg")
    with pytest.raises(ValueError, match="one of sum, avg, max"):
        group.run("all_reduce", [whole], reduce="mean")
    with pytest.raises(ValueError, match="can be moved but not reduced"):
        group.run("all_reduce", [torch.ones(2).to(torch.float8_e4m3fn)])
    with pytest.raises(ValueError, match="max of complex"):
        group.run("all_reduce", [torch.ones(2, dtype=torch.complex64)], reduce="max")
    with pytest.raises(
        ValueError, match=r"2 ranks give float32 \[3\] each, 6 elements; the output float32 \[5\] has 5"
    ):
        group.run("all_gather", [torch.empty(5), torch.ones(3)])
    with pytest.raises(ValueError, match="differ in dtype"):
        group.run("all_gather", [torch.empty(6), torch.ones(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match="5 rows, no multiple of 2 ranks"):
        group.run("all_to_all", [torch.empty(5), torch.ones(5)])
    with pytest.raises(ValueError, match="peer 0 of a group of 2 ranks" if group.index == 0 else "peer 1"):
        group.run("send", [whole], peer=group.index)
    assert group.seq == 0, "a refused call takes no sequence number: the ranks would fall out of step"
    group.run("all_reduce", [whole])
    return whole.tolist()


def test_what_cannot_be_right_is_refused_before_anything_moves(ranks):
    assert ranks(2).run(_refused) == [[2, 2]] * 2


MOVED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def _moved(dtype):
    """Every moving operation on a non-contiguous tensor; True where each element is what it should be."""
    world, group = World.current(), World.current().whole()

    def sample(rank):
        return torch.arange(6).add(10 * rank).reshape(2, 3).to(torch.float32).to(dtype).t()

    def same(a, b):
        return a.dtype == b.dtype and torch.equal(a.to(torch.complex128), b.to(torch.complex128))

    mine, other = sample(world.rank), 1 - world.rank
    results = []
    x = mine.clone()
    group.run("broadcast", [x], root=1)
    results.append(same(x, sample(1)))
    outs = [torch.zeros(3, 2, dtype=torch.float32).to(dtype) for _ in range(2)]
    group.run("all_gather", [*outs, mine])
    results += [same(outs[rank], sample(rank)) for rank in range(2)]
    out = torch.zeros(2, 6).to(dtype)
    group.run("all_gather", [out, mine])
    results += [same(out[rank].view(3, 2), sample(rank)) for rank in range(2)]
    out = torch.zeros(2, 3).to(dtype)
    group.run("all_to_all", [out, mine.t()])
    results += [same(out[rank], sample(rank).t()[world.rank]) for rank in range(2)]
    got = torch.zeros(3, 2).to(dtype)
    work = group.run("send", [mine], peer=other, wait=False)
    group.run("recv", [got], peer=other)
    work.wait()
    results.append(same(got, sample(other)))
    return results


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_every_dtype_can_be_moved(ranks, dtype):
    assert all(all(results) for results in ranks(2).run(_moved, dtype))


REDUCED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.complex64, torch.uint16, torch.uint32,
]  # fmt: skip


def _reduced(dtype):
    group = World.current().whole()
    x = torch.tensor([[1, 2, 3], [4, 5, 6]]).to(dtype).t()
    group.run("all_reduce", [x])
    parts = [torch.tensor([1, 2]).to(dtype), torch.tensor([3]).to(dtype)]
    out = torch.zeros(2 if group.index == 0 else 1).to(dtype)
    group.run("reduce_scatter", [out, *parts])
    return x.to(torch.complex64).real.tolist(), out.to(torch.complex64).real.tolist()


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_sums_in_every_dtype_that_has_one(ranks, dtype):
    for rank, (x, out) in enumerate(ranks(2).run(_reduced, dtype)):
        assert x == [[2, 8], [4, 10], [6, 12]]
        assert out == ([2, 4] if rank == 0 else [6])


def _reductions():
    group = World.current().whole()
    seen = {}
    for reduce in ("avg", "max", "min", "product"):
        x = torch.tensor([1.0, 4.0]) if group.index == 0 else torch.tensor([3.0, 2.0])
        group.run("all_reduce", [x], reduce=reduce)
        out = torch.zeros(1)
        given = torch.tensor([1.0, 4.0]) if group.index == 0 else torch.tensor([3.0, 2.0])
        group.run("reduce_scatter", [out, given], reduce=reduce)
        seen[reduce] = x.tolist()
        assert out.item() == x[group.index].item()
    return seen


def test_reductions(ranks):
    expected = {"avg": [2.0, 3.0], "max": [3.0, 4.0], "min": [1.0, 2.0], "product": [3.0, 8.0]}
    assert ranks(2).run(_reductions) == [expected, expected]


def _mismatched(sent_shape, expected_shape, dtype):
    group = World.current().whole()
    for wait in (True, False):
        with pytest.raises(Mismatch) as caught:
            if group.index == 0:
                group.run("send", [torch.zeros(sent_shape)], peer=1, wait=wait).wait()
            else:
                group.run("recv", [torch.zeros(expected_shape, dtype=dtype)], peer=0, wait=wait).wait()
    x = torch.full((2, 3), float(group.index))
    group.run("send" if group.index == 0 else "recv", [x.t() if group.index else x.view(3, 2)], peer=1 - group.index)
    return str(caught.value), x.tolist()


@pytest.mark.parametrize(
    ("sent", "expected", "dtype"), [((4,), (5,), None), ((5, 2), (3,), None), ((4,), (4,), torch.int64)]
)
def test_a_message_of_another_size_or_dtype_raises_on_both_sides_and_spoils_nothing(ranks, sent, expected, dtype):
    name = "int64" if dtype else "float32"
    text = f"rank 0 sends float32 {list(sent)}, rank 1 expects {name} {list(expected)}: nothing was transferred"
    for told, later in ranks(2).run(_mismatched, sent, expected, dtype):
        assert told == text
        assert later == [[0.0] * 3] * 2


def _eager():
    """Both send before either receives: right for an eager send, a deadlock for a careful one."""
    group = World.current().whole()
    work = group.run("send", [torch.full((1 << 16,), float(group.index))], peer=1 - group.index, eager=True, wait=False)
    x = torch.empty(1 << 16)
    group.run("recv", [x], peer=1 - group.index)
    work.wait()
    return x[0].item(), x[-1].item()


def test_eager_sends_cross(ranks):
    assert ranks(2).run(_eager) == [(1.0, 1.0), (0.0, 0.0)]


def _subset():
    world = World.current()
    world.subset = frozenset({0, 1})
    if world.rank == 2:
        return
    with pytest.raises(ValueError, match=r"ranks 0, 1 alone; the group world also needs 2"):
        world.whole().run("barrier", [])
    world.some("pair", (0, 1)).run("barrier", [])


def test_a_cell_on_some_ranks_cannot_wait_for_the_others(ranks):
    ranks(3).run(_subset)


def _outside():
    world = World.current()
    with pytest.raises(ValueError, match=r"rank 2 waits in this strategy: its mesh \(dp=2\) has 2 ranks"):
        world.group(Mesh({"dp": 2}), "dp")


def test_a_rank_outside_the_mesh_has_no_group(ranks):
    for error in [value for value in ranks(3).run(_only_on_rank_2, _outside) if value]:
        raise error


def _only_on_rank_2(function):
    if World.current().rank == 2:
        function()


def test_a_plain_process_is_a_world_of_one():
    world = World.current()
    x = torch.ones(2)
    world.whole().run("all_reduce", [x])
    out = torch.empty(2)
    world.whole().run("all_gather", [out, x])
    assert (world.rank, world.world_size, out.tolist()) == (0, 1, [1.0, 1.0])
    assert world.recorder.open() == []
    world.stop()


def _hang():
    if World.current().rank == 1:
        World.current().whole().run("recv", [torch.ones(3)], peer=0, of="the missing one")


def test_the_fixture_explains_a_hang_and_goes_on(ranks):
    with pytest.raises(RankFailure) as caught:
        ranks(2).run(_hang, limit_s=1.0)
    text = str(caught.value)
    assert "--- rank 1" in text and "--- rank 0" not in text
    assert "kind='recv'" in text and "the missing one" in text and "world:0>1" in text
    assert "_hang" in text
    assert ranks(2).run(_reductions)


def _fails():
    if World.current().rank == 1:
        raise LookupError("one rank's own")
    World.current().whole().run("barrier", [])


def test_the_fixture_raises_the_first_error_and_frees_the_others(ranks):
    with pytest.raises(LookupError, match="one rank's own") as caught:
        ranks(3).run(_fails)
    assert "on rank 1" in caught.value.__notes__[0] and "_fails" in caught.value.__notes__[0]
    assert [ranks(3).answers[rank][0] for rank in range(3)] == ["error"] * 3


def _out_of_order():
    group = World.current().whole()
    if group.index == 0:
        works = [group.run("send", [torch.full((2,), float(tag))], peer=1, tag=tag, wait=False) for tag in (0, 7)]
        for work in works:
            work.wait()
        return []
    seen = []
    for tag in (7, 0):
        x = torch.empty(2)
        group.run("recv", [x], peer=0, tag=tag)
        seen += x.tolist()
    return seen


def test_messages_with_tags_may_be_taken_out_of_order(ranks):
    assert ranks(2).run(_out_of_order) == [[], [7.0, 7.0, 0.0, 0.0]]
