"""One question to the supervisor at a time, and its answer.

A Stop raises in no frame of this file (`engine.interrupts`): a message that was left half sent or half read would spoil
the next one, whose answer would then never come.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq

from colossal_nb.cluster.wire import Address, Frame, connect, pack, unpack

_SLICE_MS = 50        # how soon one who waits for an answer notices that it was released
_LIMIT_S = 60.0       # the supervisor answers at once, unless it is stuck or gone


class Asking:
    """A channel to the supervisor for questions, from any thread. `released` (a reason) ends them all."""

    def __init__(self, context: zmq.Context[Any], address: Address, identity: str) -> None:
        self._socket = connect(context, address, identity)
        self._lock = threading.Lock()
        self._sequence = 0
        self.released = ""

    def ask(self, op: str, keys: Sequence[str], blobs: Sequence[bytes] = (), **fields: Any) -> Frame:
        """The answer. Raises RuntimeError when released, or when the supervisor says nothing for a minute."""
        with self._lock:
            self._sequence += 1
            body = {"sequence": self._sequence, "op": op, "keys": list(keys), **fields}
            self._socket.send_multipart(pack("store", body, blobs))
            end = time.monotonic() + _LIMIT_S
            while time.monotonic() < end:
                if self._socket.poll(_SLICE_MS):
                    frame = unpack(self._socket.recv_multipart())
                    if frame.body["sequence"] == self._sequence:      # an older one was given up
                        return frame
                elif self.released:
                    raise RuntimeError(self.released)
        raise RuntimeError(f"the supervisor of the cluster has not answered for {_LIMIT_S:g} s")
