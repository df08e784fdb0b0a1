"""The channels between our own processes: who gets in, what is forgiven, what the rendezvous answers."""
from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from colossal_nb.cluster import host, parcel
from colossal_nb.cluster.door import Protocol
from colossal_nb.cluster.rendezvous import Rendezvous
from colossal_nb.cluster.wire import VERSION, Address, Frame, Listener, connect, pack, unpack


def served(listener: Listener, limit_ms: int = 1000) -> list[Frame]:
    """What reaches the supervisor's end within the limit."""
    poller = zmq.Poller()
    poller.register(listener.socket, zmq.POLLIN)
    poller.register(listener.zap, zmq.POLLIN)
    found = []
    while ready := dict(poller.poll(limit_ms)):
        if listener.zap in ready:
            listener.admit()
        if listener.socket in ready:
            received = listener.receive()
            if received is not None:
                found.append(received[1])
                break
    return found


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(0)


def test_a_member_gets_in(listener: Listener, context: zmq.Context[Any]) -> None:
    member = connect(context, Address(**listener.address.to_json()), "side:0:1")
    member.send_multipart(pack("state", {"what": "x"}, [b"\0\1"]))
    assert served(listener, 10_000) == [Frame("state", {"what": "x"}, (b"\0\1",))]


def test_a_stranger_with_keys_of_its_own_does_not(listener: Listener, context: zmq.Context[Any]) -> None:
    public, secret = zmq.curve_keypair()
    address = Address(listener.address.url, listener.address.server_public, public.decode(), secret.decode())
    connect(context, address, "side:0:1").send_multipart(pack("state"))
    assert served(listener) == []


def test_a_stranger_without_keys_does_not(listener: Listener, context: zmq.Context[Any]) -> None:
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(listener.address.url)
    plain.send_multipart(pack("stop"))
    with socket.create_connection(("127.0.0.1", int(listener.address.url.rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        assert served(listener) == []
    member = connect(context, listener.address, "kernel")
    member.send_multipart(pack("hello"))
    assert [frame.kind for frame in served(listener, 10_000)] == ["hello"]


def test_the_listener_is_on_loopback_only(listener: Listener) -> None:
    assert listener.address.url.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("parts", [[], [b"x"], [b"other/1", b"stop", b"{}"], [VERSION, b"stop", b"[]"],
                                   [VERSION, b"stop", b"{"], [VERSION, b"stop"]])
def test_frames_of_another_kind_are_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(parts)


def test_engine_messages_are_signed() -> None:
    connection = {"key": "secret", "signature_scheme": "hmac-sha256", "pack": "json"}
    ours, other = Protocol(connection), Protocol({**connection, "key": "guessed"})
    identity, parts = ours.write("stream", {"text": "a"}, {})
    topic = b"engine.3.stdout"
    read = ours.read([topic, *parts])
    assert read is not None
    assert (read.kind, read.content, read.rank) == ("stream", {"text": "a"}, 3)
    assert json.loads(parts[2])["msg_id"] == identity
    assert other.read([topic, *parts]) is None
    assert ours.read([topic, *parts[:5], b'{"text": "b"}']) is None
    assert ours.read([topic, b"garbage"]) is None


def test_the_rendezvous() -> None:
    answers: list[tuple[bytes, Any, list[bytes]]] = []
    store = Rendezvous(lambda identity, body, blobs: answers.append((identity, body["result"], blobs)))

    def ask(who: bytes, op: str, *keys: str, blobs: tuple[bytes, ...] = (), **fields: Any) -> None:
        store.handle(who, Frame("store", {"sequence": 1, "op": op, "keys": list(keys), **fields}, blobs))

    ask(b"a", "get", "k")
    ask(b"b", "wait", "k", "l")
    assert answers == []
    ask(b"c", "set", "k", blobs=(b"1",))
    assert answers == [(b"c", None, []), (b"a", None, [b"1"])]
    answers.clear()
    ask(b"c", "add", "l", amount=2)
    ask(b"c", "add", "l", amount=3)
    assert answers == [(b"c", 2, []), (b"b", None, []), (b"c", 5, [])]
    answers.clear()
    ask(b"a", "compare_set", "m", blobs=(b"", b"first"))
    ask(b"b", "compare_set", "m", blobs=(b"", b"second"))
    ask(b"b", "compare_set", "m", blobs=(b"first", b"third"))
    ask(b"a", "check", "m", "n")
    ask(b"a", "append", "m", blobs=(b"!",))
    ask(b"a", "get", "m")
    ask(b"a", "delete", "m")
    ask(b"a", "count")
    assert [(result, blobs) for _who, result, blobs in answers] == [
        (None, [b"first"]), (None, [b"first"]), (None, [b"third"]), (False, []), (None, []), (None, [b"third!"]),
        (True, []), (2, [])]


def test_one_who_asks_again_has_given_up_its_wait_and_old_epochs_are_dropped() -> None:
    answers: list[bytes] = []
    store = Rendezvous(lambda identity, body, blobs: answers.append(identity))

    def ask(who: bytes, op: str, key: str, *blobs: bytes) -> None:
        store.handle(who, Frame("store", {"sequence": 1, "op": op, "keys": [key]}, blobs))

    ask(b"a", "wait", "later")
    ask(b"a", "check", "later")
    ask(b"gone", "wait", "later")
    store.leave(b"gone")
    ask(b"b", "set", "later", b"")
    assert answers == [b"a", b"b"]
    for key in ("epoch1/x", "epoch2/x", "epochal/x"):
        ask(b"b", "set", key, b"v")
    store.keep_epoch(2)
    answers.clear()
    for key in ("epoch1/x", "epoch2/x", "epochal/x"):
        ask(key.encode(), "get", key)
    assert answers == [b"epoch2/x", b"epochal/x"]


def test_a_parcel_keeps_values_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    array = np.arange(12.0).reshape(3, 4)
    parcel.write(tmp_path / "p", {"array": array, "same": array, "text": "é", "call": lambda x: x + 1})
    assert stat.S_IMODE(os.stat(tmp_path / "p").st_mode) == 0o600
    read = parcel.read(tmp_path / "p")
    assert np.array_equal(read["array"], array)
    assert read["array"] is read["same"]
    assert read["array"].flags.writeable
    assert (read["text"], read["call"](1)) == ("é", 2)
    with pytest.raises(TypeError):
        parcel.write(tmp_path / "q", {"x": (i for i in range(2))})
    assert not (tmp_path / "q").exists()


def test_how_a_process_ended_in_words() -> None:
    assert host.describe_exit(9) == "killed by SIGKILL"
    assert host.describe_exit(11) == "killed by SIGSEGV"
    assert host.describe_exit(3 << 8) == "exit code 3"
    assert host.threads_per_engine(10 * host.usable_cores()) == 1
    assert host.threads_per_engine(1) == host.usable_cores()
