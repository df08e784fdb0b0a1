"""One copy of a large value for all ranks of a host: what `once` gives back lies in memory that all of them map.

The pages are shared until somebody writes into them; who does so gets a copy of its own of those, as everywhere.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.board import host
from colossal_nb.parallel.group import Group

LEAST_BYTES = 1 << 16
"""Values with less than this in tensors and arrays are simply sent."""
_ALIGN = 64


def shared(value: Any, group: Group, of: str) -> Any:
    """The value of the group's rank 0 on all of them, its tensors and arrays in one place. Collective.

    Anything but rank 0's argument is ignored. Where the ranks share no memory each has a copy. Raises ValueError on all
    for a value that cannot be sent.
    """
    one_host = len(set(objects.all_gather(host(), group, of))) == 1 and hasattr(os, "memfd_create")
    page: Place | None = None
    said: Any = None
    if group.index == 0:
        try:
            page = _written(value, one_host)
            said = None if page is None else page[:2]
        except Exception as error:
            said = ValueError(f"{of} gave a {type(value).__name__} that cannot go to other ranks: {error}")
    said = objects.broadcast(said, group, 0, of)
    if isinstance(said, ValueError):
        raise said
    if said is None:
        return objects.broadcast(value, group, 0, of)
    mapped = _mapped(*said)
    everywhere = all(objects.all_gather(mapped is not None, group, of))
    if page is not None:
        os.close(page[2])
    if not everywhere:
        return objects.broadcast(value, group, 0, of)
    return _read(mapped, said[1])


Place = tuple[str, list[tuple[int, int]], int]
"""Where the memory is, the offset and length of each buffer (the value itself first), the file."""


def _written(value: Any, one_host: bool) -> Place | None:
    """Put a value into a file without a name; None where it is too small for that, or to be sent to other hosts."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    raw = [memoryview(stream.getbuffer()), *(each.raw() for each in buffers)]
    if not one_host or sum(each.nbytes for each in raw[1:]) < LEAST_BYTES:
        return None
    places, end = [], 0
    for each in raw:
        places.append((end, each.nbytes))
        end = -(-(end + each.nbytes) // _ALIGN) * _ALIGN
    number = os.memfd_create("once", os.MFD_CLOEXEC)
    try:
        os.ftruncate(number, end)
        with mmap.mmap(number, end) as room:
            for each, (begin, length) in zip(raw, places, strict=True):
                room[begin : begin + length] = each
    except BaseException:
        os.close(number)
        raise
    return f"/proc/{os.getpid()}/fd/{number}", places, number


def _mapped(path: str, places: list[tuple[int, int]]) -> mmap.mmap | None:
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return mmap.mmap(number, sum(places[-1]), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(number)
    return None


def _read(room: mmap.mmap | None, places: list[tuple[int, int]]) -> Any:
    assert room is not None
    whole = memoryview(room)
    pickled, *buffers = (whole[begin : begin + length] for begin, length in places)
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Arrays leave their bytes outside by themselves; plain tensors in host memory do so here."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
            return NotImplemented
        if value.device.type != "cpu" or not value.numel() or value.is_quantized:
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        buffer = pickle.PickleBuffer(flat.numpy())  # type: ignore[arg-type]
        return _tensor, (buffer, value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
