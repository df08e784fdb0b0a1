"""Whole Python values between ranks: small, rare, and only among ranks that already trust each other."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.structure import rebuild


def broadcast(value: Any, group: Group, root: int, of: str) -> Any:
    """The value of the group's rank `root`, on all. Others may pass anything."""
    if group.size == 1:
        return value
    data = _packed(value) if group.index == root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    group.run("broadcast", [length], root=root, of=of)
    if group.index != root:
        data = torch.empty(int(length), dtype=torch.uint8)
    group.run("broadcast", [data], root=root, of=of)
    return pickle.loads(data.numpy().tobytes())


def all_gather(value: Any, group: Group, of: str) -> list[Any]:
    """Every rank's value, in the group's order."""
    if group.size == 1:
        return [value]
    data = _packed(value)
    lengths = torch.empty(group.size, dtype=torch.int64)
    group.run("all_gather", [lengths, torch.tensor([len(data)])], of=of)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    everything = torch.empty(group.size * longest, dtype=torch.uint8)
    group.run("all_gather", [everything, padded], of=of)
    rows = everything.view(group.size, longest)
    return [pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def _packed(value: Any) -> torch.Tensor:
    # A view would be pickled with the whole storage behind it.
    own = rebuild(value, lambda tensor: tensor.detach().cpu().clone())
    return torch.frombuffer(bytearray(pickle.dumps(own, protocol=5)), dtype=torch.uint8)
