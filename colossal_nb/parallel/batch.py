"""Cutting a global batch into parts, and saying whether all ranks were given the same one."""

from __future__ import annotations

import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.structure import leaves, named_leaves, rebuild
from colossal_nb.parallel.unread import Unread
from colossal_nb.parallel.work import Released

_OURS = "colossal_nb.parallel"
_MOST_NAMED = 6


@dataclass(frozen=True)
class Piece:
    """One part of a batch: `inputs` and `targets` of the samples `start` to `stop` - 1. Never empty."""

    inputs: Any
    targets: Any
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


def batch_size(inputs: Any) -> int:
    """Dim 0 of the first tensor in `inputs` that has dims. Raises ValueError if there is none, or no sample."""
    for tensor in leaves(inputs):
        if tensor.dim():
            if not tensor.shape[0]:
                raise ValueError(f"the batch is empty: a tensor of inputs has shape {list(tensor.shape)}")
            return tensor.shape[0]
    raise ValueError(f"no tensor with a batch dim in the inputs ({_given(inputs)}): what should be cut?")


def _given(inputs: Any) -> str:
    """What was found in the place of tensors; arrays are what people forget to convert."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple | list) else ()
    arrays = [each for each in (inputs, *values) if hasattr(each, "__array_interface__")]
    if arrays:
        return f"a NumPy {type(arrays[0]).__name__}; inputs are tensors: torch.from_numpy(inputs)"
    return type(inputs).__name__


def bounds(samples: int, parts: int) -> list[tuple[int, int]]:
    """Start and stop of each part: sizes differ by at most one, the larger ones first.

    >>> bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    small, larger = divmod(samples, parts)
    starts = [part * small + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(starts))


def own_parts(samples: int, replicas: int, microbatches: int, replica: int) -> list[tuple[int, int]]:
    """Start and stop of one replica's parts, those without a sample left out.

    Part k goes to replica k mod `replicas`, so that a remainder is spread over the replicas.
    """
    mine = bounds(samples, replicas * microbatches)[replica::replicas]
    return [(start, stop) for start, stop in mine if stop > start]


def pieces(inputs: Any, targets: Any, replicas: int, microbatches: int, replica: int) -> list[Piece]:
    """One replica's parts of a global batch: tensors whose dim 0 is the batch size are cut, anything else is whole."""
    samples = batch_size(inputs)
    if replicas * microbatches > 1 and isinstance(targets, Tensor) and targets.dim() and len(targets) != samples:
        raise ValueError(
            f"the inputs have {samples} samples, targets of shape {list(targets.shape)} do not begin with that number: "
            "one entry per sample is cut like the inputs (targets.view(len(inputs), -1) where they were flattened); "
            "what belongs to the whole batch goes in a tuple or dict beside the targets"
        )
    return [
        Piece(cut(inputs, samples, start, stop), cut(targets, samples, start, stop), start, stop)
        for start, stop in own_parts(samples, replicas, microbatches, replica)
    ]


def cut(value: Any, samples: int, start: int, stop: int) -> Any:
    """The samples `start` to `stop` - 1 of every tensor inside `value` whose dim 0 has `samples` entries."""
    everything = start == 0 and stop == samples

    def part(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != samples or (everything and not isinstance(tensor, Unread)):
            return tensor
        return tensor[start:stop]

    return rebuild(value, part)


@contextmanager
def explaining(whole: dict[str, Any], part: dict[str, Any], samples: int) -> Iterator[None]:
    """Around what runs a part of a batch. An error of the model's or of torch's gets a note of what was cut and what
    was not: that a mask was cut like the samples can be read from neither."""
    try:
        yield
    except Exception as error:
        note = _cut_note(whole, part, samples)
        if note and _is_of_forward(error) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def _is_of_forward(error: Exception) -> bool:
    """Not a sentence of ours, which says what is wrong; not of a backward, where inputs are long used."""
    if isinstance(error, Released | torch.OutOfMemoryError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = isinstance(error, ValueError) and str(frames[-1].f_globals.get("__name__")).startswith(_OURS)
    return not ours and all(frame.f_code.co_name != "_engine_run_backward" for frame in frames)


def _cut_note(whole: dict[str, Any], part: dict[str, Any], samples: int) -> str:
    """Empty where nothing was cut."""
    was_cut, left = [], []
    for (name, before), (_, after) in zip(_all_named(whole), _all_named(part), strict=True):
        if before.shape != after.shape:
            was_cut.append(f"{name} {list(before.shape)} -> {list(after.shape)}")
        elif before.dim():
            left.append(f"{name} {list(before.shape)}")
    if not was_cut:
        return ""
    given = f"; given whole: {_few(left)}" if left else ""
    return (
        f"The batch of {samples} samples was cut along dim 0: {_few(was_cut)}{given}.\n"
        "What belongs to the whole batch (a mask, a graph, a state) is made inside the model: a buffer, or from the "
        "input's shape."
    )


def _all_named(given: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return (each for name, value in given.items() for each in named_leaves(value, name))


def _few(texts: list[str]) -> str:
    more = len(texts) - _MOST_NAMED
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How inputs call the model: a dict by keyword, a tuple by position, anything else as the one argument."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def move(value: Any, device: torch.device | str) -> Any:
    """The same structure with its tensors on `device`."""
    return rebuild(value, lambda tensor: tensor.to(device, non_blocking=True))


def checksum(values: list[Tensor], most: int | None = None) -> int:
    """32 bits over the bytes, shapes and dtypes of tensors: equal tensors give equal numbers on every rank.

    Of tensors with more than `most` elements about so many are taken, spread evenly.
    """
    total = 0
    for tensor in values:
        total = zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode(), total)
        if isinstance(tensor, Unread):
            total = zlib.crc32(tensor.origin.encode(), total)
            continue
        flat = tensor.detach().reshape(-1)
        flat = flat[:: -(-flat.numel() // most)].contiguous() if most and flat.numel() > most else flat.contiguous()
        if flat.numel():
            total = zlib.crc32(flat.view(torch.uint8).cpu().numpy().data, total)
    return total


def odd_ranks(sums: list[int]) -> list[int]:
    """The ranks whose checksum is not that of the majority (of rank 0 where there is none)."""
    common = Counter(sums).most_common(1)[0]
    usual = common[0] if common[1] > len(sums) / 2 else sums[0]
    return [rank for rank, value in enumerate(sums) if value != usual]


def ranks_text(ranks: list[int]) -> str:
    """For people: `rank 2`, `ranks 1 and 3`, `ranks 1, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
