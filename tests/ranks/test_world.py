"""The world of a rank: who it is, its groups along a mesh, and what survives a regroup."""

import pytest
import torch
from recorded import record_of

from colossal_nb.parallel import collectives, distributed
from colossal_nb.parallel.layouts import layout_of, set_layout
from colossal_nb.parallel.world import World
from colossal_nb.plan.layout import Layout, Shard
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.volume import sent_bytes
from colossal_nb.record import measures


def _groups():
    world, mesh = World.current(), Mesh({"dp": 2, "pp": 1, "tp": 2})
    seen = {axis: (world.group(mesh, axis).ranks, world.group(mesh, axis).index) for axis in mesh.axes}
    seen["both"] = world.group(mesh, ("dp", "tp")).ranks, world.group(mesh, ("dp", "tp")).index
    assert world.group(mesh, "tp") is world.group(Mesh({"dp": 2, "tp": 2}), "tp")
    return seen


def test_groups_along_the_axes_of_a_mesh(ranks):
    for rank, seen in enumerate(ranks(4).run(_groups)):
        dp, tp = divmod(rank, 2)
        assert seen == {
            "dp": ((tp, 2 + tp), dp),
            "pp": ((rank,), 0),
            "sp": ((rank,), 0),
            "tp": ((2 * dp, 2 * dp + 1), tp),
            "both": ((0, 1, 2, 3), rank),
        }


class _Layer(torch.nn.Module):
    """Holds mesh and axis, as parallel modules do; never a group."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x):
        return collectives.all_reduce(x, self.mesh, "tp")


def _outlives():
    world, mesh = World.current(), Mesh({"tp": World.current().world_size})
    layer, x = _Layer(mesh), torch.ones(2, requires_grad=True)
    out = layer(x)
    world.abort("between forward and backward")
    world.regroup(1, range(world.world_size))
    out.sum().backward()
    return out.tolist(), x.grad.tolist(), layer(x).tolist(), world.epoch


def test_what_holds_a_mesh_works_on_after_a_regroup_even_its_backward(ranks):
    assert ranks(3).run(_outlives) == [([3.0, 3.0], [3.0, 3.0], [3.0, 3.0], 1)] * 3


def _sums_are_alike(dtype):
    world, mesh = World.current(), Mesh({"dp": World.current().world_size})
    torch.manual_seed(world.rank)
    return [collectives.all_reduce(torch.randn(n).to(dtype), mesh, "dp") for n in (1, 1001, 300_001)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_has_the_same_bits_on_every_rank(ranks, size, dtype):
    first, *others = ranks(size).run(_sums_are_alike, dtype)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    for index, n in enumerate((1, 1001, 300_001)):
        exact = sum(_drawn(rank, index).to(dtype).double() for rank in range(size))
        assert (first[index].double() - exact).abs().max() <= size * 4 * torch.finfo(dtype).eps * 4, n


def _drawn(rank, index):
    torch.manual_seed(rank)
    return [torch.randn(n) for n in (1, 1001, 300_001)][index]


def _rooted():
    distributed.start()
    dist = torch.distributed
    x, n, rank = torch.ones(6), dist.get_world_size(), dist.get_rank()
    dist.reduce(x, dst=0)
    dist.gather(torch.ones(6), [torch.empty(6) for _ in range(n)] if rank == 0 else None, dst=0)
    dist.scatter(torch.empty(6), [torch.ones(6) for _ in range(n)] if rank == 0 else None, src=0)
    return measures.sent_bytes(record_of(World.current().recorder.drain()), sent_bytes)


def test_every_operation_of_a_user_has_a_volume(ranks):
    # 24 bytes each way to or from the root by 2 of 3 ranks: 48 bytes in all, 16 charged to each.
    for rank, sent in enumerate(ranks(3).run(_rooted)):
        assert sent == {(rank, kind): 16 for kind in ("reduce", "gather", "scatter")}


def test_a_world_needs_a_rank_inside_it():
    with pytest.raises(ValueError, match=r"a world of 2 has ranks 0..1; 2 is none of them"):
        World.start(2, 2, None)


def test_notes_are_told_once():
    world = World(0, 1, None)
    world.note("a")
    world.note("b")
    world.note("a")
    assert world.notes == ["a", "b"]


def test_a_parameter_carries_its_layout():
    p = torch.nn.Parameter(torch.zeros(2, 4))
    assert layout_of(p) is None
    layout = Layout.of((4, 4), "float32", Mesh({"tp": 2}), tp=Shard(0))
    set_layout(p, layout)
    p.data = torch.ones(2, 4)
    assert layout_of(p) == layout
    set_layout(p, None)
    assert layout_of(p) is None
    set_layout(p, None)
