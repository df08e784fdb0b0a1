"""The random states of torch, numpy and Python's random as plain values, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def states() -> dict[str, Any]:
    """This process's states, such as `json` can write."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    legacy: Any = numpy.random.get_state(legacy=False)
    inner = {name: part.tolist() if hasattr(part, "tolist") else part for name, part in legacy["state"].items()}
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": None if device is None else _text(device),
        "numpy": {**legacy, "state": inner},
        "random": random.getstate(),
    }


def restore(plain: dict[str, Any]) -> None:
    """Set the states that `states` gave, also after they went through `json`."""
    torch.set_rng_state(_tensor(plain["torch"]))
    if plain["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(plain["cuda"]))
    legacy = plain["numpy"]
    inner = {name: numpy.array(part, numpy.uint32) if name == "key" else part for name, part in legacy["state"].items()}
    numpy.random.set_state({**legacy, "state": inner})
    version, numbers, gauss = plain["random"]
    random.setstate((version, tuple(numbers), gauss))


def _text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
