"""The ranks' end of the rendezvous: a torch Store over the authenticated channel to the supervisor."""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import zmq

from colossal_nb.cluster.wire import Address, Frame, connect, pack, unpack

_SLICE_MS = 50        # how soon a blocked wait notices that it was released


class Store(dist.Store):                                             # type: ignore[misc, name-defined]
    """get, set, wait, add, check, compare_set as gloo and `torch.distributed` need them.

    A wait runs in Python, so an interrupt lands in it; `release(reason)` from any thread makes it raise RuntimeError.
    """

    def __init__(self, context: zmq.Context[Any], address: Address, identity: str,
                 timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        self._socket = connect(context, address, identity)
        self._lock = threading.RLock()
        self._sequence = 0
        self._limit = timeout
        self._released = ""
        self.waiting = ""
        """The keys somebody waits for now, "" when nobody does: read by the side thread."""

    def release(self, reason: str) -> None:
        """Every wait, now and until `renew`, raises RuntimeError(reason)."""
        self._released = reason

    def renew(self) -> None:
        """Waits work again (after a regroup)."""
        self._released = ""

    def _ask(self, op: str, keys: Sequence[str], blobs: Sequence[bytes] = (), limit: timedelta | None = None,
             **fields: Any) -> Frame:
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            body = {"sequence": sequence, "op": op, "keys": list(keys), **fields}
            self._socket.send_multipart(pack("store", body, blobs))
            end = time.monotonic() + (limit or self._limit).total_seconds()
            self.waiting = ", ".join(keys) if op in ("get", "wait") else ""
            try:
                while True:
                    if self._socket.poll(_SLICE_MS):
                        frame = unpack(self._socket.recv_multipart())
                        if frame.body["sequence"] == sequence:
                            return frame
                        continue
                    if self._released:
                        raise RuntimeError(self._released)
                    if time.monotonic() > end:
                        raise dist.DistStoreError(f"waited {(limit or self._limit).total_seconds():.0f} s for the "
                                                  f"rendezvous key {', '.join(keys)}: another rank has not come")
            finally:
                self.waiting = ""

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).blobs[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, limit=timeout)

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], amount=value).body["result"])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], [_bytes(value)])

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).body["result"])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask("compare_set", [key], [_bytes(expected_value), _bytes(desired_value)]).blobs[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).body["result"])

    def num_keys(self) -> int:
        return int(self._ask("count", []).body["result"])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(self._ask("get", keys).blobs)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._ask("set", keys, [_bytes(value) for value in values])

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
