"""The rendezvous: the key-value store by which ranks find each other, kept by the supervisor.

A request that must wait for a key is parked and answered when the key arrives; nothing here ever blocks.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossal_nb.cluster.wire import Frame

Answer = Callable[[bytes, dict[str, Any], list[bytes]], None]


@dataclass(frozen=True)
class _Waiter:
    identity: bytes
    sequence: int
    keys: tuple[str, ...]
    reads: bool


class Rendezvous:
    """Keys and values of all epochs still in use. `answer(identity, body, blobs)` sends a reply."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._values: dict[str, bytes] = {}
        self._waiters: list[_Waiter] = []

    def handle(self, identity: bytes, frame: Frame) -> None:
        """Serve one request of a rank: body has `sequence`, `op`, `keys`; values are blobs."""
        self._forget(identity)                # one caller asks one thing at a time: an older wait was given up
        op, keys, sequence = frame.body["op"], tuple(frame.body["keys"]), int(frame.body["sequence"])
        if op in ("get", "wait"):
            self._waiters.append(_Waiter(identity, sequence, keys, op == "get"))
            self._serve()
            return
        result, blobs = self._change(op, keys, frame)
        self._answer(identity, {"sequence": sequence, "result": result}, blobs)
        self._serve()

    def _change(self, op: str, keys: tuple[str, ...], frame: Frame) -> tuple[Any, list[bytes]]:
        key, values = (keys or ("",))[0], self._values
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

    def _serve(self) -> None:
        still = []
        for waiter in self._waiters:
            if all(key in self._values for key in waiter.keys):
                blobs = [self._values[key] for key in waiter.keys] if waiter.reads else []
                self._answer(waiter.identity, {"sequence": waiter.sequence, "result": None}, blobs)
            else:
                still.append(waiter)
        self._waiters = still

    def _forget(self, identity: bytes) -> None:
        self._waiters = [waiter for waiter in self._waiters if waiter.identity != identity]

    def leave(self, identity: bytes) -> None:
        """A rank has gone."""
        self._forget(identity)

    def keep_epoch(self, epoch: int) -> None:
        """Drop what earlier epochs left (keys begin with `epochN/`)."""
        def old(key: str) -> bool:
            prefix = key.partition("/")[0]
            number = prefix.removeprefix("epoch")
            return prefix != number and number.isdigit() and int(number) < epoch
        self._values = {key: value for key, value in self._values.items() if not old(key)}
