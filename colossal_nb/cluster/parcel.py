"""Values between the kernel and its own ranks through a file that only this user can read.

The bytes are a cloudpickle (classes and functions of cells travel by value) with its large buffers beside it, so that
an array is written once and read once. Read only files that our own processes wrote, told of over a signed channel.
"""
from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import cloudpickle

_COUNT = struct.Struct("<Q")


def write(path: str | Path, value: Any) -> None:
    """Write a value; raises what pickling raises, leaving no file."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(_COUNT.pack(len(views)))
        file.write(b"".join(_COUNT.pack(view.nbytes) for view in views))
        file.write(_COUNT.pack(len(body)))
        file.write(body)
        for view in views:
            file.write(view)


def read(path: str | Path) -> Any:
    """The value in a file that `write` made; arrays in it are writable."""
    with open(path, "rb") as file:
        count = _COUNT.unpack(file.read(_COUNT.size))[0]
        sizes = [_COUNT.unpack(file.read(_COUNT.size))[0] for _ in range(count)]
        body = file.read(_COUNT.unpack(file.read(_COUNT.size))[0])
        buffers = []
        for size in sizes:
            buffer = bytearray(size)
            file.readinto(buffer)
            buffers.append(buffer)
    return pickle.loads(body, buffers=buffers)
