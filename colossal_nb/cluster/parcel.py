"""Values between the kernel and its own ranks through a file that only this user can read.

The bytes are a cloudpickle (classes and functions of cells travel by value) with its large buffers beside it, so that
an array is written once and read once. Read only files that our own processes wrote, told of over a signed channel.

A function of a cell travels without its globals when the names of cells are given as `namespace`: where it is read, the
names of cells there are its globals, as if its cell had been run there.
"""
from __future__ import annotations

import io
import os
import pickle
import struct
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle

_COUNT = struct.Struct("<Q")


def _here() -> dict[str, Any]:
    """Stands in the bytes for the names of cells where they are read (see `_Unpickler`)."""
    raise pickle.UnpicklingError("these bytes hold functions of cells: read them with a namespace")


class _Here:
    def __reduce__(self) -> tuple[Any, ...]:
        return _here, ()


class Pickler(cloudpickle.Pickler):                    # type: ignore[misc]
    """`namespace`: the names of cells here, None to send functions with copies of the globals that they use.

    `needed`: afterwards the names in `namespace` that the functions read.
    """

    def __init__(self, file: Any, namespace: dict[str, Any] | None = None,
                 buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.namespace = namespace
        self.needed: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented or type(obj) is not types.FunctionType or obj.__globals__ is not self.namespace:
            return reduced
        make, (code, _globals, *rest), (state, slots), *more = reduced
        self.needed |= set(slots["__globals__"])
        return make, (code, _Here(), *rest), (state, {**slots, "__globals__": {}}), *more


class _Unpickler(pickle.Unpickler):
    namespace: dict[str, Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        namespace = self.namespace
        if namespace is not None and (module, name) == (_here.__module__, _here.__name__):
            return lambda: namespace
        return super().find_class(module, name)


PicklerMaker = Callable[[Any, Callable[[pickle.PickleBuffer], Any] | None], Pickler]
"""Makes the pickler for a file and what takes the buffers."""


def _usual(file: Any, take: Callable[[pickle.PickleBuffer], Any] | None) -> Pickler:
    return Pickler(file, None, take)


def write(path: str | Path, value: Any, pickler: PicklerMaker = _usual) -> None:
    """Write a value; raises what pickling raises, leaving no file."""
    body, views = _pickled(value, pickler)
    with _private(path) as file:
        _put(file, body, views)


def write_each(path: str | Path, values: Iterable[Any], pickler: PicklerMaker = _usual) -> None:
    """Write values one after another, each on its own. Raises what pickling raises."""
    with _private(path) as file:
        for value in values:
            _put(file, *_pickled(value, pickler))


def _private(path: str | Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def _pickled(value: Any, pickler: PicklerMaker) -> tuple[io.BytesIO, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    pickler(body, buffers.append).dump(value)
    return body, [buffer.raw() for buffer in buffers]


def _put(file: BinaryIO, body: io.BytesIO, views: list[memoryview]) -> None:
    file.write(_COUNT.pack(len(views)))
    file.write(b"".join(_COUNT.pack(view.nbytes) for view in views))
    file.write(_COUNT.pack(body.tell()))
    file.write(body.getbuffer())
    file.writelines(views)


def needs(value: Any, pickler: PicklerMaker = _usual) -> set[str]:
    """Names that functions in a value read from the pickler's namespace. Raises what pickling raises."""
    made = pickler(io.BytesIO(), lambda buffer: None)
    made.dump(value)
    return made.needed


def read(path: str | Path, namespace: dict[str, Any] | None = None) -> Any:
    """The value in a file that `write` made; arrays in it are writable. `namespace`: the names of cells here."""
    with open(path, "rb") as file:
        return _take(file, namespace)


def unreadable(path: str | Path, names: Iterable[str], namespace: dict[str, Any] | None = None) -> dict[str, Exception]:
    """Of the values that `write_each` wrote, by these names in their order: those that cannot be read here, and why."""
    failed: dict[str, Exception] = {}
    with open(path, "rb") as file:
        for name in names:
            try:
                _take(file, namespace)
            except Exception as error:                 # the file stands at the next value all the same
                failed[name] = error
    return failed


def _take(file: io.BufferedReader, namespace: dict[str, Any] | None) -> Any:
    count = _COUNT.unpack(file.read(_COUNT.size))[0]
    sizes = [_COUNT.unpack(file.read(_COUNT.size))[0] for _ in range(count)]
    body = file.read(_COUNT.unpack(file.read(_COUNT.size))[0])
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        file.readinto(buffer)
        buffers.append(buffer)
    unpickler = _Unpickler(io.BytesIO(body), buffers=buffers)
    unpickler.namespace = namespace
    builtins = {} if namespace is None else {name: namespace[name] for name in ("__builtins__",) if name in namespace}
    try:
        return unpickler.load()
    finally:
        if namespace is not None:
            namespace.update(builtins)                 # cloudpickle writes its own into the globals of functions
