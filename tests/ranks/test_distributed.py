"""The user's own torch.distributed, as in any tutorial, inside ranks."""

import copy

import pytest
import torch
import torch.distributed as dist

from colossal_nb.parallel import distributed
from colossal_nb.parallel.process_group import UserGroup
from colossal_nb.parallel.transports.messages import Mismatch
from colossal_nb.parallel.work import Released
from colossal_nb.parallel.world import World
from colossal_nb.record.store import RecordBuilder


def _tour():
    distributed.start()
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = {}
    x = torch.full((4,), float(rank))
    dist.all_reduce(x)
    seen["all_reduce"] = x[0].item()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    seen["async"] = x[0].item()
    y = torch.full((3,), float(rank))
    dist.broadcast(y, src=1)
    seen["broadcast"] = y.tolist()
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    seen["all_gather"] = torch.cat(parts).tolist()
    uneven = [torch.empty(index + 1) for index in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    seen["uneven"] = torch.cat(uneven).tolist()
    out = torch.empty(1)
    dist.reduce_scatter(out, [torch.tensor([float(index)]) for index in range(size)])
    seen["reduce_scatter"] = out.item()
    out = torch.empty(size)
    dist.all_to_all_single(out, torch.arange(float(size)) + 10 * rank)
    seen["all_to_all_single"] = out.tolist()
    outs = [torch.empty(1) for _ in range(size)]
    dist.all_to_all(outs, [torch.tensor([10.0 * rank + index]) for index in range(size)])
    seen["all_to_all"] = torch.cat(outs).tolist()
    got = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), got, dst=0)
    seen["gather"] = None if got is None else torch.cat(got).tolist()
    out = torch.empty(1)
    dist.scatter(out, [torch.tensor([5.0 + index]) for index in range(size)] if rank == 1 else None, src=1)
    seen["scatter"] = out.item()
    z = torch.ones(2)
    dist.reduce(z, dst=1)
    seen["reduce"] = z.tolist() if rank == 1 else None
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    seen["objects"] = objects
    one = [{"a": 1} if rank == 0 else None]
    dist.broadcast_object_list(one, src=0)
    seen["one"] = one
    return seen


def test_every_collective_of_a_tutorial(ranks):
    for rank, seen in enumerate(ranks(2).run(_tour)):
        assert seen == {
            "all_reduce": 1.0, "async": 2.0, "broadcast": [1.0] * 3, "all_gather": [0.0, 0.0, 1.0, 1.0],
            "uneven": [0.0, 1.0, 1.0], "reduce_scatter": 2.0 * rank, "all_to_all_single": [rank, 10.0 + rank],
            "all_to_all": [rank, 10.0 + rank], "gather": [0.0, 1.0] if rank == 0 else None, "scatter": 5.0 + rank,
            "reduce": [2.0, 2.0] if rank == 1 else None, "objects": [{"rank": 0}, {"rank": 1}], "one": [{"a": 1}],
        }  # fmt: skip


def _messages():
    distributed.start()
    rank, size = dist.get_rank(), dist.get_world_size()
    seen = []
    if rank == 0:
        dist.send(torch.arange(3.0), dst=1)
        dist.send(torch.arange(2), dst=1, tag=7)
    elif rank == 1:
        x = torch.empty(3)
        assert dist.recv(x) == 0
        seen.append(x.tolist())
        y = torch.empty(2, dtype=torch.int64)
        dist.recv(y, src=0, tag=7)
        seen.append(y.tolist())
    z = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % size),
        dist.P2POp(dist.irecv, z, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return seen, z.item()


def test_messages(ranks):
    results = ranks(3).run(_messages)
    assert results == [([], 2.0), ([[0.0, 1.0, 2.0], [0, 1]], 0.0), ([], 1.0)]


def _ddp():
    distributed.start()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    data = torch.arange(16.0).reshape(4, 4)
    wrapped(data[2 * dist.get_rank() :][:2]).square().mean().backward()
    first = model.weight.grad.clone()
    World.current().regroup(1, range(2))
    distributed.start()
    model.zero_grad()
    wrapped(data[2 * dist.get_rank() :][:2]).square().mean().backward()
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 2)
    plain(data).square().mean().backward()
    record = RecordBuilder()
    record.feed(World.current().recorder.drain())
    kinds = list(record.record().slices["kind"])
    return first, model.weight.grad, plain.weight.grad, kinds, World.current().recorder.open()


def test_ddp_goes_through_the_gate_and_outlives_a_regroup(ranks):
    for first, second, plain, kinds, still_open in ranks(2).run(_ddp):
        torch.testing.assert_close(first, plain)
        torch.testing.assert_close(second, plain)
        assert kinds.count("all_reduce") >= 2
        assert still_open == []


def _pasted():
    distributed.start()
    dist.init_process_group("nccl", rank=0, world_size=99)
    dist.init_process_group("nccl", rank=0, world_size=99)
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    dist.all_reduce(x)
    return x.item(), World.current().notes


def test_pasted_init_and_destroy_do_no_harm_and_are_noted_once(ranks):
    for value, notes in ranks(2).run(_pasted):
        assert value == 4.0
        assert [note.split(":")[0] for note in notes] == ["init_process_group", "destroy_process_group"]
        assert "world_size=99 was ignored" in notes[0]


def _groups():
    distributed.start()
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3], backend="gloo")
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=low if dist.get_rank() < 2 else high)
    dist.destroy_process_group(low)
    every = torch.ones(1)
    dist.all_reduce(every)
    return x.item(), every.item()


def test_groups_of_the_user(ranks):
    assert ranks(4).run(_groups) == [(3.0, 4.0), (3.0, 4.0), (7.0, 4.0), (7.0, 4.0)]


def _coalescing():
    distributed.start()
    from torch.distributed import distributed_c10d as c10d

    xs = [torch.ones(2), torch.full((3,), 2.0)]
    with c10d._coalescing_manager(device=torch.device("cpu")):
        for x in xs:
            dist.all_reduce(x)
    with pytest.raises(ZeroDivisionError), c10d._coalescing_manager():
        dist.all_reduce(xs[0])
        raise ZeroDivisionError
    distributed.start()
    later = torch.ones(1)
    dist.all_reduce(later)
    return [x.tolist() for x in xs], later.item()


def test_coalescing_works_and_a_broken_block_does_not_poison_what_follows(ranks):
    for xs, later in ranks(2).run(_coalescing):
        assert xs == [[2.0, 2.0], [4.0, 4.0, 4.0]]
        assert later == 2.0


def _aborted():
    distributed.start()
    World.current().abort("rank 9 died")
    with pytest.raises(Released, match="rank 9 died"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(Released, match="rank 9 died"):
        dist.send(torch.ones(1), 1 - dist.get_rank())


def test_an_abort_closes_the_users_groups(ranks):
    ranks(2).run(_aborted)


def test_no_name_of_torchs_process_group_is_missing():
    """What the class does not forward is a fact about the group, not an operation."""
    inherited = {
        "BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL",
        "_backend_id", "_device_types", "_enable_collectives_timing", "_get_backend", "_get_backend_name",
        "_has_hooks", "_id", "_register_backend", "_register_on_completion_hook", "_set_default_backend",
        "_set_group_desc", "_set_group_name", "_wait_for_pending_works", "_pybind11_conduit_v1_", "bound_device_id",
        "boxed", "unbox", "get_group_store", "group_desc", "merge_remote_group", "rank", "size", "split_group",
        "use_pg_for_symm_mem_rendezvous",
    }  # fmt: skip
    names = {name for name in dir(dist.ProcessGroup) if not name.startswith("__")}
    ours = set(vars(UserGroup))
    assert names - inherited - ours == set()


def _differing(case):
    distributed.start()
    rank = dist.get_rank()
    calls = {
        "size": lambda: dist.all_reduce(torch.ones(9 if rank == 0 else 4)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32)),
        "reduction": lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM),
        "root": lambda: dist.broadcast(torch.ones(4), src=rank),
        "operation": lambda: dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(4)),
        "output": lambda: dist.all_gather([torch.ones(3)] * 2, torch.ones(3 + rank)),
        "parts": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4 + rank), [2, 2], [2 + rank, 2]),
    }
    with pytest.raises(Mismatch) as caught:
        calls[case]()
    x = torch.ones(1)
    dist.all_reduce(x)
    return str(caught.value), x.item(), World.current().recorder.open()


DIFFERENT = "the ranks of a group call different operations: rank 0 calls {}, rank 1 calls {}; nothing was transferred"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("size", DIFFERENT.format("all_reduce (sum) float32 [9]", "all_reduce (sum) float32 [4]")),
        ("dtype", DIFFERENT.format("all_reduce (sum) float64 [4]", "all_reduce (sum) float32 [4]")),
        ("reduction", DIFFERENT.format("all_reduce (max) float32 [4]", "all_reduce (sum) float32 [4]")),
        ("root", DIFFERENT.format("broadcast (root 0) float32 [4]", "broadcast (root 1) float32 [4]")),
        ("operation", DIFFERENT.format("barrier", "all_reduce (sum) float32 [4]")),
        ("output", "all_gather: rank 1 gives rank 0 4 elements, rank 0 expects 3; nothing was transferred"),
        ("parts", "all_to_all: rank 1 gives rank 0 3 elements, rank 0 expects 2; nothing was transferred"),
    ],
)
def test_ranks_that_call_different_things_all_say_so_and_live(ranks, case, text):
    results = ranks(2).run(_differing, case)
    assert [value for _, value, _ in results] == [2.0, 2.0]
    assert [still_open for _, _, still_open in results] == [[], []]
    assert text in [told for told, _, _ in results]


def _dtensor():
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    distributed.start()
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    a = torch.arange(16.0).reshape(4, 4)
    rows, columns = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(a, mesh, [Shard(1)])
    products = [(rows @ columns).full_tensor(), (columns @ rows).redistribute(mesh, [Replicate()]).to_local()]
    summed = functional.all_reduce(torch.ones(3), "sum", mesh.get_group())
    gathered = functional.all_gather_single_autograd(torch.full((1,), float(rank)), 0, mesh.get_group())
    sums, parts = summed.tolist(), gathered.tolist()
    return [torch.equal(product, a @ a) for product in products], sums, parts, World.current().recorder.open()


def test_dtensor_and_functional_collectives(ranks):
    assert ranks(2).run(_dtensor) == [([True, True], [2.0] * 3, [0.0, 1.0], [])] * 2


def _fsdp():
    from torch.distributed.fsdp import fully_shard

    distributed.start()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    data = torch.randn(4, 8)
    model(data[2 * dist.get_rank() :][:2]).square().mean().backward()
    plain(data).square().mean().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return max((a - p.grad).abs().max().item() for a, p in zip(grads, plain.parameters(), strict=True))


def test_fsdp(ranks):
    assert max(ranks(2).run(_fsdp)) < 1e-6
