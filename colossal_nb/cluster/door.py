"""The ipyparallel door, kernel's side: requests to the ranks' engines, their replies and output.

Speaks the Jupyter protocol straight to the controller's multiplexer and IOPub relay. ipyparallel's own client keeps
every result, re-parses dates and hands text over as one growing string; here each message is read once.
"""
from __future__ import annotations

import hmac
import json
import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import zmq

from colossal_nb.cluster.wire import arrived, unlimited

_DELIMITER = b"<IDS|MSG>"
_RECEIVE_S = 0.05


@dataclass(frozen=True)
class Reply:
    """A message of one engine: the answer to a request (`parent`), or output (then `rank` is its topic's number)."""

    kind: str
    parent: str
    content: dict[str, Any]
    rank: int = -1


class Protocol:
    """Jupyter messages, signed with the cluster's key."""

    def __init__(self, connection: dict[str, Any]) -> None:
        assert connection["signature_scheme"] == "hmac-sha256", connection["signature_scheme"]
        assert connection["pack"] == "json", connection["pack"]
        self._key = connection["key"].encode()
        self.session = uuid.uuid4().hex
        self._count = 0

    def _sign(self, parts: list[bytes]) -> bytes:
        return hmac.new(self._key, b"".join(parts), "sha256").hexdigest().encode()

    def write(self, kind: str, content: dict[str, Any], metadata: dict[str, Any]) -> tuple[str, list[bytes]]:
        """A message's id and its parts."""
        self._count += 1
        identity = f"{self.session}_{os.getpid()}_{self._count}"
        header = {"msg_id": identity, "msg_type": kind, "username": "colossal_nb", "session": self.session,
                  "date": datetime.now(UTC).isoformat(), "version": "5.3"}
        parts = [json.dumps(each).encode() for each in (header, {}, metadata, content)]
        return identity, [_DELIMITER, self._sign(parts), *parts]

    def read(self, frames: list[bytes]) -> Reply | None:
        """The message in these frames; None if it is forged or foreign."""
        try:
            at = frames.index(_DELIMITER)
        except ValueError:
            return None
        signature, *parts = frames[at + 1:at + 6]
        if len(parts) != 4 or not hmac.compare_digest(signature, self._sign(parts)):
            return None
        header, parent, content = (json.loads(part) for part in (parts[0], parts[1], parts[3]))
        topic = frames[0].split(b".", 2)
        rank = int(topic[1]) if topic[0] == b"engine" and len(topic) > 1 and topic[1].isdigit() else -1
        return Reply(header["msg_type"], parent.get("msg_id", ""), content, rank)


class Door:
    """Both sockets to the controller. `connection`: what it wrote into its client file."""

    def __init__(self, context: zmq.Context[Any], connection: dict[str, Any]) -> None:
        self._protocol = Protocol(connection)
        self.shell = context.socket(zmq.DEALER)
        self.output = context.socket(zmq.SUB)
        self.heard: Counter[int] = Counter()           # bytes of each rank's messages on `output`
        for socket in (self.shell, self.output):
            unlimited(socket)
        self.shell.setsockopt(zmq.IDENTITY, self._protocol.session.encode())
        self.output.setsockopt(zmq.SUBSCRIBE, b"engine.")
        self.shell.connect(f"{connection['interface']}:{connection['mux']}")
        self.output.connect(f"{connection['interface']}:{connection['iopub']}")

    def send(self, engine: str, kind: str, content: dict[str, Any], metadata: dict[str, Any] | None = None) -> str:
        """Send a request to one engine; returns the id that its answers will name as parent."""
        identity, parts = self._protocol.write(kind, content, metadata or {})
        self.shell.send_multipart([engine.encode(), *parts])
        return identity

    def receive(self, socket: zmq.Socket[bytes]) -> list[Reply]:
        """What has arrived on `shell` or `output`, as much as a moment has room for: more may come all the time."""
        replies = []
        end = time.monotonic() + _RECEIVE_S
        while arrived(socket) and time.monotonic() < end:
            frames = socket.recv_multipart()
            reply = self._protocol.read(frames)
            if reply is not None:
                replies.append(reply)
                if socket is self.output and reply.rank >= 0:
                    self.heard[reply.rank] += sum(map(len, frames))
        return replies

    def close(self) -> None:
        self.shell.close(0)
        self.output.close(0)


def forget(context: zmq.Context[Any], connection: dict[str, Any], rank: int) -> None:
    """Tell the Hub that this rank's engine has gone, so that its number is free for the replacement."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.connect(f"{connection['interface']}:{connection['registration']}")
    socket.send_multipart(Protocol(connection).write("unregistration_request", {"id": rank}, {})[1])
    socket.close()
