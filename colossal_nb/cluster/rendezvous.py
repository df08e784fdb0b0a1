"""The rendezvous: the key-value store by which ranks find each other, kept by the supervisor.

Every request is answered at once. Who waits for a key asks again: a request that stayed open would keep its rank's
channel from all others, and for ever if the key belongs to groups that have been closed meanwhile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossal_nb.cluster.wire import Frame

Answer = Callable[[bytes, dict[str, Any], list[bytes]], None]


class Rendezvous:
    """Keys and values of the epoch in use, and keys of none. `answer(identity, body, blobs)` sends a reply."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._values: dict[str, bytes] = {}
        self._epoch = 0

    def handle(self, identity: bytes, frame: Frame) -> None:
        """Serve one request of a rank: body has `sequence`, `op`, `keys`; values are blobs.

        The answer's `over`: the keys are of an earlier epoch, which nothing can be asked about any more.
        """
        keys = tuple(frame.body["keys"])
        over = any(map(self._is_old, keys))
        result, blobs = (None, []) if over else self._change(frame.body["op"], keys, frame)
        self._answer(identity, {"sequence": frame.body["sequence"], "result": result, "over": over}, blobs)

    def _change(self, op: str, keys: tuple[str, ...], frame: Frame) -> tuple[Any, list[bytes]]:
        key, values = (keys or ("",))[0], self._values
        if op == "get":
            there = all(each in values for each in keys)
            return there, [values[each] for each in keys] if there else []
        if op == "set":
            values.update(zip(keys, frame.blobs, strict=True))
        elif op == "add":
            total = int(values.get(key, b"0")) + int(frame.body["amount"])
            values[key] = str(total).encode()
            return total, []
        elif op == "append":
            values[key] = values.get(key, b"") + frame.blobs[0]
        elif op == "check":
            return all(each in values for each in keys), []
        elif op == "delete":
            return values.pop(key, None) is not None, []
        elif op == "count":
            return len(values), []
        elif op == "compare_set":
            expected, desired = frame.blobs
            held = values.get(key)
            if held == expected or (held is None and expected == b""):
                values[key] = held = desired
            return None, [held if held is not None else expected]
        return None, []

    def keep_epoch(self, epoch: int) -> None:
        """Drop what earlier epochs left (keys begin with `epochN/`)."""
        self._epoch = epoch
        self._values = {key: value for key, value in self._values.items() if not self._is_old(key)}

    def _is_old(self, key: str) -> bool:
        prefix = key.partition("/")[0]
        number = prefix.removeprefix("epoch")
        return prefix != number and number.isdigit() and int(number) < self._epoch
