"""The authenticated channel of our own: versioned JSON frames with binary blobs over ZMQ CURVE, never a pickle.

Every cluster makes its own two key pairs. Only a peer that holds the client's secret gets past the handshake; keys
live in memory and in the pipes between our own processes.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import zmq
from zmq.utils import z85

VERSION = b"colossal_nb/1"
_HANDSHAKE_MS = 5000          # a stranger who says nothing is hung up on
Socket = zmq.Socket[bytes]


@dataclass(frozen=True)
class Frame:
    """One message: what it is, its JSON fields, its binary parts."""

    kind: str
    body: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Address:
    """Where a supervisor listens and the keys that open the door."""

    url: str
    server_public: str
    public: str
    secret: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def pack(kind: str, body: dict[str, Any] | None = None, blobs: Sequence[bytes] = ()) -> list[bytes]:
    """The parts of a message on the wire."""
    return [VERSION, kind.encode(), json.dumps(body or {}).encode(), *blobs]


def unpack(parts: Sequence[bytes]) -> Frame:
    """The message in these parts. Raises ValueError for anything that is not of this version."""
    if len(parts) < 3 or parts[0] != VERSION:
        raise ValueError(f"a frame of another version: {bytes(parts[0])[:40]!r}" if parts else "an empty frame")
    body = json.loads(parts[2])
    if not isinstance(body, dict):
        raise ValueError("a frame's body must be a JSON object")
    return Frame(parts[1].decode(), body, tuple(bytes(part) for part in parts[3:]))


def connect(context: zmq.Context[Socket], address: Address, identity: str) -> Socket:
    """A client's end of the channel. Nothing is dropped for want of room, and closing never waits."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.curve_serverkey = address.server_public.encode()
    socket.curve_publickey = address.public.encode()
    socket.curve_secretkey = address.secret.encode()
    unlimited(socket)
    socket.connect(address.url)
    return socket


def unlimited(socket: Socket) -> None:
    """No high-water mark (frames are never dropped) and no wait at the end."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)


def arrived(socket: Socket) -> bool:
    """Whether a message can be received without waiting."""
    return bool(socket.poll(0))


class Listener:
    """The supervisor's end: a ROUTER on loopback that admits only the one client key (ZAP)."""

    def __init__(self) -> None:
        self.context: zmq.Context[Socket] = zmq.Context()
        self.zap = self.context.socket(zmq.REP)
        self.zap.bind("inproc://zeromq.zap.01")
        server_public, server_secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self._client_key = z85.decode(public)
        self.socket = self.context.socket(zmq.ROUTER)
        unlimited(self.socket)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self.socket.curve_server = True
        self.socket.curve_secretkey = server_secret
        self.socket.zap_domain = b"colossal_nb"
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = Address(f"tcp://127.0.0.1:{port}", server_public.decode(), public.decode(), secret.decode())

    def admit(self) -> None:
        """Answer one handshake."""
        version, sequence, _domain, _peer, _identity, mechanism, *credentials = self.zap.recv_multipart()
        good = mechanism == b"CURVE" and credentials[:1] == [self._client_key]
        status = (b"200", b"OK", b"member") if good else (b"400", b"not a member of this cluster", b"")
        self.zap.send_multipart([version, sequence, *status, b""])

    def send(self, identity: bytes, kind: str, body: dict[str, Any] | None = None, blobs: Sequence[bytes] = ()) -> None:
        self.socket.send_multipart([identity, *pack(kind, body, blobs)])

    def receive(self) -> tuple[bytes, Frame] | None:
        """The next message and who sent it; None for garbage."""
        identity, *parts = self.socket.recv_multipart()
        try:
            return identity, unpack(parts)
        except ValueError:
            return None

    def close(self) -> None:
        """Close the door. The context ends with the process: ending it would wait for strangers half way in."""
        self.socket.close(0)
        self.zap.close(0)
