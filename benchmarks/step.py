"""A training step of the GPT (hidden 256, 4 blocks) on two ranks: ours against torch's own, in the same processes.

dp=2 against DistributedDataParallel, tp=2 against DTensor's parallelize_module written by hand: once with the blocks
alone sharded, once with embedding, head and loss sharded too; the faster of the two counts. Same threads, same global
batch, gloo, blocks of steps that alternate in one run.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from harness import Figures, Row, finish, interval, on_two_ranks

SIZES = {"vocab_size": 256, "layers": 4, "hidden": 256, "heads": 4}
BATCH, LENGTH, BLOCK, SETTLE = 8, 128, 4, 1
Step = Callable[[Any, Any], float]


def loss_fn(logits: Any, targets: Any) -> Any:
    """Mean cross entropy over all tokens."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fresh() -> tuple[Any, Any]:
    """The same model and optimizer on both ranks."""
    import torch

    from colossal_nb.models import GPT

    torch.manual_seed(0)
    model = GPT(**SIZES)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def ours(strategy: str) -> Step:
    """A step through parallelize and forward_backward."""
    import colossal_nb as cnb

    model, optimizer = fresh()
    model, optimizer = cnb.parallelize(model, optimizer, strategy=cnb.Strategy.parse(strategy))

    def step(inputs: Any, targets: Any) -> float:
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, loss_fn, inputs, targets)
        optimizer.step()
        return float(loss)

    return step


def ddp(rank: int) -> Step:
    """A step as torch's documentation of DistributedDataParallel writes it."""
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = fresh()
    wrapped = DistributedDataParallel(model)
    half = BATCH // 2

    def step(inputs: Any, targets: Any) -> float:
        mine = slice(rank * half, (rank + 1) * half)
        optimizer.zero_grad()
        loss = loss_fn(wrapped(inputs[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def dtensor(*, everything: bool) -> Step:
    """A step with parallelize_module by hand. The fused qkv is cut by columns: the same work on permuted weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model, optimizer = fresh()
    mesh = init_device_mesh("cpu", (2,))
    plan: dict[str, Any] = {}
    for number in range(SIZES["layers"]):
        plan[f"blocks.{number}.attention.qkv"] = ColwiseParallel()
        plan[f"blocks.{number}.attention.out"] = RowwiseParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel()
        plan[f"blocks.{number}.down"] = RowwiseParallel()
    if everything:
        plan["token"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, plan)

    def step(inputs: Any, targets: Any) -> float:
        optimizer.zero_grad()
        if everything:
            with loss_parallel():
                loss = loss_fn(model(inputs), targets)
                loss.backward()
        else:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        optimizer.step()
        return float(loss.detach().full_tensor() if everything else loss.detach())

    return step


def measure(rank: int, folder: str, names: list[str], blocks: int) -> dict[str, list[float]]:
    """Seconds of every step by name, in alternating blocks; on rank 0, both ranks starting together."""
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist

    from colossal_nb.parallel.world import World

    dist.init_process_group("gloo", init_method=f"file://{folder}/peer", rank=rank, world_size=2)
    World.start(rank, 2, dist.FileStore(f"{folder}/ours", 2))
    make: dict[str, Callable[[], Step]] = {
        "ours dp=2": lambda: ours("dp=2"),
        "DDP": lambda: ddp(rank),
        "ours tp=2": lambda: ours("tp=2"),
        "DTensor blocks": lambda: dtensor(everything=False),
        "DTensor all": lambda: dtensor(everything=True),
    }
    steps = {name: make[name]() for name in names}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for step in steps.values():
        for _ in range(5):
            step(inputs, targets)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks):
        order = names if block % 2 == 0 else names[::-1]
        for name in order:
            for number in range(BLOCK + SETTLE):
                dist.barrier()
                began = time.perf_counter()
                steps[name](inputs, targets)
                if number >= SETTLE:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def blocks_of(seconds: list[float]) -> list[float]:
    """The median of every block."""
    return [statistics.median(seconds[at : at + BLOCK]) for at in range(0, len(seconds), BLOCK)]


def compared(what: str, mine: list[float], theirs: list[float], note: str) -> Row:
    """One row: medians, and the median ratio of neighbouring blocks, which other load on the machine moves together."""
    ratios = [ours_s / peer_s for ours_s, peer_s in zip(blocks_of(mine), blocks_of(theirs), strict=True)]
    low, high = interval(ratios)
    note = f"{note}; 95% interval {low:.3f} to {high:.3f}"
    return Row(what, Figures.of(mine).text("ms"), Figures.of(theirs).text("ms"), statistics.median(ratios), 1.05, note)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    dp = on_two_ranks(measure, ["ours dp=2", "DDP"], options.blocks)
    rows = [compared("GPT step, dp=2", dp["ours dp=2"], dp["DDP"], "DDP")]
    tp = on_two_ranks(measure, ["ours tp=2", "DTensor blocks", "DTensor all"], options.blocks)
    best = min(("DTensor blocks", "DTensor all"), key=lambda name: Figures.of(tp[name]).median)
    other = "DTensor all" if best == "DTensor blocks" else "DTensor blocks"
    note = f"{best}; {other}: {Figures.of(tp[other]).text('ms')}"
    rows.append(compared("GPT step, tp=2", tp["ours tp=2"], tp[best], note))
    finish("step", rows)


if __name__ == "__main__":
    main()
