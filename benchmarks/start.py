"""From nothing to a first cell whose ranks have talked to each other, 4 engines on this machine.

Ours warm: the extension was loaded some seconds ago, as when one reads on before the first parallel cell.
Ours cold: loading the extension and the first cell in one go. Peer: start of a cluster, torch, process group, same sum.
Runs alternate; each has a kernel of its own.
"""

import argparse
import time

from harness import Figures, Kernel, Row, finish, peer

LOAD = "%load_ext colossal_nb"
OURS = """%%colossal dp=4
import torch, torch.distributed as dist
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 4
"""
PEER_CELL = """%%px
import os, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{path}", rank=int(rank), world_size=4)
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 4
"""


def warm(pause_s: float) -> float:
    """Seconds of the first cell, `pause_s` after loading."""
    with Kernel() as kernel:
        kernel.run(LOAD)
        time.sleep(pause_s)
        return kernel.run(OURS).seconds


def cold() -> float:
    """Seconds of loading and the first cell together."""
    with Kernel() as kernel:
        return kernel.run(LOAD).seconds + kernel.run(OURS).seconds


def theirs(number: int) -> float:
    """Seconds of ipyparallel's start, torch's import and the process group."""
    with peer() as (kernel, start_s):
        return start_s + kernel.run(PEER_CELL.format(path=f"/tmp/bench_start_{time.time_ns()}_{number}")).seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=15.0, help="seconds between loading and the first cell")
    options = parser.parse_args()
    warm_s, cold_s, peer_s = [], [], []
    for number in range(options.rounds):
        warm_s.append(warm(options.pause))
        peer_s.append(theirs(number))
        cold_s.append(cold())
    w, c, p = Figures.of(warm_s), Figures.of(cold_s), Figures.of(peer_s)
    finish(
        "start",
        [
            Row("first cell with a process group, warm", w.text("s"), p.text("s"), w.median / p.median, 0.2),
            Row("load and first cell, cold", c.text("s"), p.text("s"), c.median / p.median, 0.5),
        ],
    )


if __name__ == "__main__":
    main()
