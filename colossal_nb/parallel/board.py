"""Where ranks of one host write what they are about to call, so that one that means something else is found in time.

Gloo matches operations by their number alone: a rank that calls another one, or one of another size, ends a peer's
process or leaves wrong values. A page of memory that all ranks of a group map shows each of them what the others call
under the same number, for some microseconds and no message.
"""

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# What a rank calls now and the calls before it: one that need not wait for the others may be some calls ahead.
_CALLS = 64
_HEAD = struct.Struct("<Q")
_PAUSE_S, _LONGEST_PAUSE_S = 0.00002, 0.002
_LIVENESS_S = 0.05


class Store(Protocol):
    """The part of a torch.distributed store that is needed to find the page."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Board:
    """One group's page: for each of `size` ranks its last calls, each a number and `block_bytes` that describe it.

    Whoever writes looks afterwards: of two ranks that differ at least one sees it before it goes on.
    """

    def __init__(self, memory: mmap.mmap, index: int, size: int, block_bytes: int) -> None:
        self._memory, self._index, self._size = memory, index, size
        self._block_bytes, self._entry_bytes = block_bytes, _HEAD.size + block_bytes
        self._pids = [0] * size

    @staticmethod
    def shared(store: Store, index: int, size: int, block_bytes: int) -> "Board | None":
        """The page of a group that meets in `store`; None, on all its ranks alike, where they share no memory."""
        length = size * _CALLS * (_HEAD.size + block_bytes)
        descriptor = _create(length) if index == 0 else None
        try:
            if index == 0:
                store.set("board", f"{host()} /proc/{os.getpid()}/fd/{descriptor}" if descriptor else "none")
            memory = _mapped(store.get("board").decode(), length)
            store.set(f"board{index}", f"{os.getpid() if memory else 0}")
            pids = [int(store.get(f"board{other}")) for other in range(size)]
        finally:
            if descriptor is not None:
                os.close(descriptor)
        if memory is None or not all(pids):
            return None
        board = Board(memory, index, size, block_bytes)
        board._pids = pids
        return board

    def post(self, number: int, block: bytes) -> None:
        """Write this rank's call. A reader that meets a half-written one takes it for none."""
        at = self._at(self._index, number)
        _HEAD.pack_into(self._memory, at, 0)
        self._memory[at + _HEAD.size : at + self._entry_bytes] = block
        _HEAD.pack_into(self._memory, at, number + 1)

    def read(self, other: int, number: int) -> bytes | None:
        """What a rank calls under a number; None if it has not come to it, or has left it far behind."""
        at = self._at(other, number)
        if _HEAD.unpack_from(self._memory, at)[0] != number + 1:
            return None
        block = self._memory[at + _HEAD.size : at + self._entry_bytes]
        return block if _HEAD.unpack_from(self._memory, at)[0] == number + 1 else None

    def wait(self, number: int, check: Callable[[], None], limit_s: float = float("inf")) -> bool:
        """Return when every rank has written its call (True), a process has ended or the limit is over (False).

        `check` is called meanwhile and may raise.
        """
        pause_s, began = _PAUSE_S, time.monotonic()
        looked = began
        missing = [other for other in range(self._size) if other != self._index]
        while missing := [other for other in missing if not self._came(other, number)]:
            check()
            now = time.monotonic()
            if now - looked > _LIVENESS_S:
                looked = now
                if any(not _alive(self._pids[other]) for other in missing):
                    return False
            if now - began > limit_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def _came(self, other: int, number: int) -> bool:
        return bool(_HEAD.unpack_from(self._memory, self._at(other, number))[0] > number)

    def _at(self, index: int, number: int) -> int:
        return (index * _CALLS + number % _CALLS) * self._entry_bytes


def _create(length: int) -> int | None:
    """A file without a name, of which nothing is left when the last process closes it; None where there are none."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("calls", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, length)
    return descriptor


def _mapped(place: str, length: int) -> mmap.mmap | None:
    where, _, path = place.partition(" ")
    if where != host():
        return None
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
    return None


def host() -> str:
    """What processes have in common that see one another's files in /proc: the boot of the machine, the namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}".replace(" ", "")
    return f"alone-{os.getpid()}"


def _alive(pid: int) -> bool:
    """Whether a process runs: not gone, and not merely unburied."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False
