"""`init`: the same program under torchrun, without a notebook."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy
from colossal_nb.validation import called_as

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@called_as('cnb.init("tp=2 pp=2")')
def init(strategy: Strategy | str | None = None) -> None:
    """Join the ranks that torchrun started and name the strategy of the program: `cnb.init("tp=2 pp=2")`.

    Does nothing inside a notebook's ranks, which are joined already. Raises ValueError outside of torchrun.
    """
    wanted = strategy if strategy is None or isinstance(strategy, Strategy) else Strategy.parse(strategy)
    world = World.current()
    if world.store is not None:
        if wanted is not None and world.strategy is not None and wanted != world.strategy:
            raise ValueError(f"init({str(wanted)!r}) in a program that runs under {world.strategy}: leave init out")
        return
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ValueError(
            f"init is for programs under torchrun ({', '.join(missing)} not set): torchrun --nproc-per-node 4 "
            "train.py; in a notebook a cell begins with %%colossal instead"
        )
    _join(wanted)


def _join(strategy: Strategy | None) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if strategy is not None:
        strategy.check(size)
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', rank)) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    # torchrun's agent holds the port unless it says otherwise.
    master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, size, is_master=master, timeout=timedelta(minutes=5)
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size
    prefixed = dist.PrefixStore("colossal_nb/", store)  # type: ignore[attr-defined]
    world = World.start(
        rank, size, prefixed, device=device, strategy=strategy, interface="lo" if local else None
    )
    world.notes = _Printed() if rank == 0 else []


class _Printed(list[str]):
    """Notes without a notebook: said at once, each line once."""

    def append(self, line: Any) -> None:
        if line not in self:
            print(line, flush=True)
            super().append(line)
