"""What saving and reading cost: steps during an asynchronous save, the save's call, samples that each rank reads.

Blocks of steps of a GPT (hidden 256, 4 blocks) under dp=2, with a save in every other one: it begins with the block and
is over before the next. The median of the steps that ran while it was written, against that of the block before.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from harness import Figures, Row, finish, interval, on_two_ranks
from step import BATCH, LENGTH, fresh, loss_fn

SETTLE, BLOCK = 2, 4
SAMPLES, SIZE = 256, 32


def saving(rank: int, folder: str, rounds: int) -> tuple[list[float], list[float], list[float], list[int], int]:
    """Seconds of a step without and with a save under way (of each round), of the call; steps that a save lasted."""
    import torch
    import torch.distributed as dist

    import colossal_nb as cnb
    from colossal_nb.parallel.world import World

    store = dist.FileStore(f"{folder}/store", 2)
    World.start(rank, 2, store)
    model, optimizer = fresh()
    model, optimizer = cnb.parallelize(model, optimizer, strategy="dp=2")
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (BATCH, LENGTH + 1), generator=generator)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, loss_fn, text[:, :-1], text[:, 1:])
        optimizer.step()
        float(loss)
        return time.perf_counter() - began

    def both(flag: bool) -> bool:
        """Whether it is so on any rank: they take the same number of steps."""
        row = torch.tensor([float(flag)])
        World.current().whole().run("all_reduce", [row])
        return bool(row)

    for _ in range(SETTLE):
        step()
    without, during, calls, lasted = [], [], [], []
    size = 0
    for _ in range(rounds):
        plain = [step() for _ in range(BLOCK)]
        World.current().whole().run("barrier", [])
        began = time.perf_counter()
        job = cnb.save(Path(folder, "run"), model, optimizer, wait=False)
        assert job is not None
        calls.append(time.perf_counter() - began)
        busy = [step()]
        while both(not job.done):
            busy.append(step())
        job.wait()
        without.append(statistics.mean(plain))
        during.append(statistics.mean(busy))
        lasted.append(len(busy))
        size = sum(file.stat().st_size for file in Path(folder, "run").rglob("*.distcp"))
    return without, during, calls, lasted, size


def reads(rank: int, folder: str) -> list[int]:
    """Samples that each of four replicas reads in the second epoch of a dataset, and how many there are.

    Counted, not timed: two processes stand for four by asking for the rows of their replicas.
    """
    import torch

    from colossal_nb.parallel.batch import own_parts
    from colossal_nb.parallel.loader import loader
    from colossal_nb.parallel.world import World

    World.current().ranks = tuple(range(4))
    counted = []
    for replica in range(4):
        given = loader(torch.utils.data.TensorDataset(torch.arange(SAMPLES)), SIZE)
        for (inputs,) in given:
            for start, stop in own_parts(len(inputs), 4, 1, replica):
                inputs[start:stop]
        before = given.reads
        for (inputs,) in given:
            for start, stop in own_parts(len(inputs), 4, 1, replica):
                inputs[start:stop]
        counted.append(given.reads - before)
    return counted


def rows(rounds: int) -> list[Row]:
    without, during, calls, lasted, size = on_two_ranks(saving, rounds)
    ratios = [b / a for a, b in zip(without, during, strict=True)]
    low, high = interval(ratios)
    note = (
        f"GPT 256, dp=2, {size / 2**20:.0f} MiB; 95% interval {low:.3f} to {high:.3f}; a save lasts "
        f"{statistics.median(lasted):g} steps, its call {Figures.of(calls).text('ms')}"
    )
    made = [
        Row(
            "steps during an asynchronous save / without",
            Figures.of(during).text("ms"), Figures.of(without).text("ms"),
            statistics.median(ratios), 1.10, note,
        )
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        counted = reads(0, folder)
    made.append(
        Row(
            "samples that a rank reads at dp=4 / the dataset", f"{max(counted)}", f"{SAMPLES}",
            max(counted) / SAMPLES, 0.25, "counted, an epoch of 256 samples in batches of 32",
        )
    )  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    finish("saving", rows(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
