"""Equal random states at the begin of each cell: torch's, numpy's and random's, rank 0's on all ranks."""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from typing import Any

import torch

from colossal_nb.parallel import objects
from colossal_nb.parallel.world import World


def share() -> None:
    """Give every rank rank 0's random states. Collective over all ranks; one small broadcast."""
    group = World.current().whole()
    if group.size > 1:
        restore(objects.broadcast(states() if group.index == 0 else None, group, 0, "random states"))


def fingerprint() -> int:
    """32 bits that are equal on ranks whose random states are: where all agree, `share` can be left out."""
    return zlib.crc32(pickle.dumps(states()))


def states() -> dict[str, Any]:
    """The states of the generators in use; numpy only if something has imported it."""
    found: dict[str, Any] = {"torch": torch.get_rng_state().numpy().tobytes(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def restore(found: dict[str, Any]) -> None:
    """Continue from states that `states` took."""
    torch.set_rng_state(_bytes(found["torch"]))
    random.setstate(found["random"])
    if "numpy" in found:
        import numpy

        numpy.random.set_state(found["numpy"])
    if "cuda" in found:
        torch.cuda.set_rng_state(_bytes(found["cuda"]))


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
