"""What recording costs: steps with it on against off, pairs of blocks of 20 steps, tp=2 on two ranks.

tp=2 records the most per step (four collectives a block). The ratio of each pair, its median and a 95% interval.
"""

import argparse
import statistics
import time
from typing import Any

from harness import Figures, Row, finish, interval, on_two_ranks

BLOCK = 20
BATCH, LENGTH = 8, 128
BARS = {64: 1.08, 256: 1.03}


def measure(rank: int, folder: str, hidden: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a block with recording and of one without, per pair; who goes first alternates."""
    import torch
    import torch.distributed as dist

    import colossal_nb as cnb
    from colossal_nb.models import GPT
    from colossal_nb.parallel.world import World

    world = World.start(rank, 2, dist.FileStore(f"{folder}/ours", 2))
    torch.manual_seed(0)
    model = GPT(vocab_size=256, layers=4, hidden=hidden, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model, optimizer = cnb.parallelize(model, optimizer, strategy=cnb.Strategy.parse("tp=2"))
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss_fn(logits: Any, wanted: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def block(*, recording: bool) -> float:
        world.recorder.enabled = recording
        began = time.perf_counter()
        for _ in range(BLOCK):
            optimizer.zero_grad()
            cnb.forward_backward(model, loss_fn, inputs, targets)
            optimizer.step()
        seconds = time.perf_counter() - began
        world.recorder.enabled = True
        world.recorder.drain()
        return seconds

    block(recording=True)
    found = []
    for number in range(pairs):
        if number % 2:
            off, on = block(recording=False), block(recording=True)
        else:
            on, off = block(recording=True), block(recording=False)
        found.append((on, off))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--hidden", type=int, nargs="+", default=list(BARS), help="widths to measure")
    options = parser.parse_args()
    rows = []
    for hidden in options.hidden:
        pairs = on_two_ranks(measure, hidden, options.pairs)
        ratios = [on / off for on, off in pairs]
        low, high = interval(ratios)
        on, off = (Figures.of([pair[which] / BLOCK for pair in pairs]) for which in (0, 1))
        note = f"95% interval {low:.3f} to {high:.3f}"
        bar = BARS.get(hidden, BARS[64])
        what = f"recording on / off, hidden {hidden}"
        rows.append(Row(what, on.text("ms"), off.text("ms"), statistics.median(ratios), bar, note))
    finish("recording", rows)


if __name__ == "__main__":
    main()
