"""precision=bf16 and recompute=full at one rank against plain torch with the same options, in one process.

The GPT of `step.py`. bf16 against a loop written by hand (a bf16 copy computes, fp32 masters have the optimizer),
recompute against `torch.utils.checkpoint` on the same blocks; one thread, blocks of steps that alternate.
"""

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

from harness import Row, finish
from step import BATCH, BLOCK, LENGTH, SETTLE, Step, compared, fresh, loss_fn, ours


def by_hand() -> Step:
    """bf16 with fp32 masters."""
    import torch

    master, optimizer = fresh()
    model = copy.deepcopy(master).bfloat16()
    low, masters = list(model.parameters()), list(master.parameters())

    def step(inputs: Any, targets: Any) -> float:
        with torch.no_grad():
            torch._foreach_copy_(low, masters)
        model.zero_grad()
        loss = loss_fn(model(inputs).float(), targets)
        loss.backward()
        for p, own in zip(low, masters, strict=True):
            own.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        return float(loss.detach())

    return step


def checkpointed() -> Step:
    """Every block in a checkpoint."""
    from torch.utils.checkpoint import checkpoint

    model, optimizer = fresh()
    for block in model.blocks:
        block.forward = lambda x, own=block.forward: checkpoint(own, x, use_reentrant=False)

    def step(inputs: Any, targets: Any) -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


MAKE: dict[str, Callable[[], Step]] = {
    "ours bf16": lambda: ours("precision=bf16"),
    "bf16 by hand": by_hand,
    "ours recompute": lambda: ours("recompute=full"),
    "torch.utils.checkpoint": checkpointed,
}


def measure(names: list[str], blocks: int) -> dict[str, list[float]]:
    """Seconds of every step by name, in alternating blocks."""
    import torch

    torch.set_num_threads(1)
    steps = {name: MAKE[name]() for name in names}
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses = {name: [step(inputs, targets) for _ in range(3)] for name, step in steps.items()}
    assert len(set(map(tuple, losses.values()))) == 1, losses  # the same program, bit for bit
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for block in range(blocks):
        for name in names if block % 2 == 0 else names[::-1]:
            for number in range(BLOCK + SETTLE):
                began = time.perf_counter()
                steps[name](inputs, targets)
                if number >= SETTLE:
                    seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    rows: list[Row] = []
    # A bf16 step takes ten times as long on a CPU: of the others there are as many more.
    for mine, theirs, times in (("ours bf16", "bf16 by hand", 1), ("ours recompute", "torch.utils.checkpoint", 10)):
        seconds = measure([mine, theirs], options.blocks * times)
        rows.append(compared(f"one rank, {mine} / {theirs}", seconds[mine], seconds[theirs], ""))
    finish("precision", rows)


if __name__ == "__main__":
    main()
