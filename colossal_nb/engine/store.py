"""The ranks' end of the rendezvous: a torch Store over the authenticated channel to the supervisor."""
from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import zmq

from colossal_nb.cluster.wire import Address, Frame
from colossal_nb.engine.asking import Asking

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.01


class Store(dist.Store):                                             # type: ignore[misc, name-defined]
    """get, set, wait, add, check, compare_set as gloo and `torch.distributed` need them.

    A wait asks again and again, so that an interrupt lands in it and no thread keeps another from asking;
    `release(reason)` from any thread makes it raise RuntimeError. So does a key of groups that have been closed.
    """

    def __init__(self, context: zmq.Context[Any], address: Address, identity: str,
                 timeout: timedelta = timedelta(seconds=300)) -> None:
        super().__init__()
        self._asking = Asking(context, address, identity)
        self._limit = timeout
        self.waiting = ""
        """The keys somebody waits for now, "" when nobody does: read by the side thread."""

    def release(self, reason: str) -> None:
        """Every wait, now and until `renew`, raises RuntimeError(reason)."""
        self._asking.released = reason

    def renew(self) -> None:
        """Waits work again (after a regroup)."""
        self._asking.released = ""

    def _ask(self, op: str, keys: Sequence[str], blobs: Sequence[bytes] = (), **fields: Any) -> Frame:
        answer = self._asking.ask(op, keys, blobs, **fields)
        if answer.body["over"]:
            raise RuntimeError(f"the groups that met under {', '.join(keys)} are closed")
        return answer

    def _until(self, op: str, keys: list[str], limit: timedelta) -> Frame:
        """The answer, once all keys are there. Raises DistStoreError after the limit."""
        end, pause_s = time.monotonic() + limit.total_seconds(), _FIRST_PAUSE_S
        try:
            while not (answer := self._ask(op, keys)).body["result"]:
                self.waiting = ", ".join(keys)
                if self._asking.released:
                    raise RuntimeError(self._asking.released)
                if time.monotonic() > end:
                    raise dist.DistStoreError(f"waited {limit.total_seconds():.0f} s for the rendezvous key "
                                              f"{', '.join(keys)}: another rank has not come")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self.waiting = ""
        return answer

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._until("get", [key], self._limit).blobs[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._until("check", keys, timeout or self._limit)

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
        return list(self._until("get", keys, self._limit).blobs)

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
