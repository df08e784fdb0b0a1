"""Values and gradients of every collective against the same arithmetic in one process, and what is recorded."""

import pytest
import torch
from recorded import record_of

from colossal_nb.parallel import collectives
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh


def _inputs(size, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size)]


def _differentiate(name, shape, keywords, out_shapes):
    """This rank's value and input gradient of sum(weight * result), with a weight of its own on every rank."""
    world = World.current()
    mesh = Mesh({"tp": world.world_size})
    x = _inputs(world.world_size, shape, 1)[world.rank].requires_grad_()
    out = getattr(collectives, name)(x, mesh, "tp", of="x", **keywords)
    weight = [_inputs(1, each, 10 + index)[0] for index, each in enumerate(out_shapes)][world.rank]
    (out * weight).sum().backward()
    return out.detach(), x.grad, world.recorder.open()


def _expected(shape, model, size, out_shapes):
    """The same on all ranks' inputs at once: `model` maps the list of inputs to the list of outputs."""
    inputs = [x.requires_grad_() for x in _inputs(size, shape, 1)]
    outs = model(inputs)
    weights = [_inputs(1, each, 10 + index)[0] for index, each in enumerate(out_shapes)]
    sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)).backward()
    return [out.detach() for out in outs], [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]


def _check(ranks, size, name, shape, model, out_shapes, **keywords):
    values, grads = _expected(shape, model, size, out_shapes)
    for rank, (value, grad, still_open) in enumerate(
        ranks(size).run(_differentiate, name, shape, keywords, out_shapes)
    ):
        torch.testing.assert_close(value, values[rank])
        torch.testing.assert_close(grad, grads[rank])
        assert still_open == []


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_and_its_all_reduce_backward(ranks, size):
    _check(ranks, size, "all_reduce", (3, 4), lambda xs: [sum(xs)] * size, [(3, 4)] * size)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_and_its_reduce_scatter_backward(ranks, dim):
    out = [6, 4] if dim == 0 else [2, 12]
    _check(ranks, 3, "all_gather", (2, 4), lambda xs: [torch.cat(xs, dim)] * 3, [out] * 3, dim=dim)


@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, None), (1, [1, 5, 1]), (0, [0, 2, 3])])
def test_reduce_scatter_and_its_all_gather_backward(ranks, dim, sizes):
    cut = sizes or ([2, 2, 1] if dim == 0 else [3, 2, 2])
    outs = [[n, 7] if dim == 0 else [5, n] for n in cut]
    _check(ranks, 3, "reduce_scatter", (5, 7), lambda xs: list(sum(xs).split(cut, dim)), outs, dim=dim, sizes=sizes)


def test_all_to_all_and_its_way_back(ranks):
    def model(xs):
        return [torch.cat([x.chunk(3)[rank] for x in xs]) for rank in range(3)]

    _check(ranks, 3, "all_to_all", (6, 2), model, [(6, 2)] * 3)


def test_broadcast_and_its_backward_to_the_root(ranks):
    _check(ranks, 3, "broadcast", (2, 2), lambda xs: [xs[1]] * 3, [(2, 2)] * 3, root=1)


def _pairs():
    """A two-layer column- and row-parallel product, alike on every rank: its gradients against the whole one's."""
    world = World.current()
    mesh = Mesh({"tp": world.world_size})
    torch.manual_seed(0)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    whole = x.detach().clone().requires_grad_()
    (whole @ a @ b).square().sum().backward()
    sizes = collectives.parts_of(7, world.world_size)
    mine = collectives.copy_to(x, mesh, "tp") @ a.split(sizes, 1)[world.rank]
    out = collectives.reduce_from(mine @ b.split(sizes)[world.rank], mesh, "tp")
    out.square().sum().backward()
    y = whole.detach().clone().requires_grad_()
    part = collectives.split_to(y, mesh, "tp", dim=1) * 2
    back = collectives.gather_from(part, mesh, "tp", dim=1, sizes=collectives.parts_of(5, world.world_size))
    back.square().sum().backward()
    return (out.detach(), (x @ a @ b).detach()), (x.grad, whole.grad), (y.grad, 8 * y.detach())


def test_the_conjugate_pairs_of_tensor_parallelism(ranks):
    for pairs in ranks(3).run(_pairs):
        for ours, whole in pairs:
            torch.testing.assert_close(ours, whole)


def _sent():
    world, mesh = World.current(), Mesh({"pp": 2})
    if world.rank == 0:
        x = torch.arange(3.0, requires_grad=True)
        collectives.send(2 * x, mesh, "pp", peer=1).backward()
        return x.grad.tolist()
    got = collectives.recv(torch.empty(3, requires_grad=True), mesh, "pp", peer=0)
    got.square().sum().backward()
    return got.tolist()


def test_send_and_recv_carry_the_gradient_back(ranks):
    assert ranks(2).run(_sent) == [[0.0, 8.0, 16.0], [0.0, 2.0, 4.0]]


def _recorded():
    world, mesh = World.current(), Mesh({"dp": 2, "tp": 2})
    x = torch.ones(4, 6)
    collectives.all_reduce(x, mesh, "tp", of="w")
    collectives.all_gather(x, mesh, "dp", of="w")
    collectives.reduce_scatter(x, mesh, "tp", dim=1, of="w")
    collectives.all_to_all(x, mesh, "tp", of="w")
    collectives.broadcast(x.to(torch.bfloat16), mesh, "dp", of="w")
    collectives.all_reduce(x, mesh, "pp", of="an axis of one rank")
    world.group(mesh, ("dp", "tp")).run("barrier", [])
    if world.rank in (0, 2):
        world.group(mesh, "dp").run("send" if world.rank == 0 else "recv", [x], peer=1 - world.rank // 2, of="w")
    rows = record_of(world.recorder.drain()).slices
    assert all(row["t1"] >= row["t0"] and row["lane"] == "comm" for row in rows)
    return [tuple(row[name] for name in ("kind", "group", "seq", "payload_bytes", "of")) for row in rows]


def test_each_operation_is_recorded_with_the_bytes_of_the_whole_tensor(ranks):
    # x is 4 x 6 fp32: 96 bytes. All-gather over 2 counts its output, 192; reduce-scatter and all-to-all their input.
    for rank, rows in enumerate(ranks(4).run(_recorded)):
        tp, dp = ("tp:0,1", "tp:2,3")[rank // 2], ("dp:0,2", "dp:1,3")[rank % 2]
        expected = [
            ("all_reduce", tp, 0, 96, "w"),
            ("all_gather", dp, 0, 192, "w"),
            ("reduce_scatter", tp, 1, 96, "w"),
            ("all_to_all", tp, 2, 96, "w"),
            ("broadcast", dp, 1, 48, "w"),
            ("barrier", "dp+tp:0,1,2,3", 0, 0, ""),
        ]
        if rank in (0, 2):
            expected.append(("send" if rank == 0 else "recv", "dp:0>2", 0, 96, "w"))
        assert rows == expected
