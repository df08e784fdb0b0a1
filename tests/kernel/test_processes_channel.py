"""The channels between our own processes: who gets in, what is forgiven, what the rendezvous answers."""
from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from torch.distributed import DistStoreError

from colossal_nb.cluster import host, parcel
from colossal_nb.cluster.door import Protocol
from colossal_nb.cluster.rendezvous import Rendezvous
from colossal_nb.cluster.wire import VERSION, Address, Frame, Listener, connect, pack, unpack
from colossal_nb.engine.store import Store


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
    answers: list[tuple[Any, list[bytes]]] = []
    store = Rendezvous(lambda identity, body, blobs: answers.append((body["result"], blobs)))

    def ask(op: str, *keys: str, blobs: tuple[bytes, ...] = (), **fields: Any) -> None:
        store.handle(b"a", Frame("store", {"sequence": 1, "op": op, "keys": list(keys), **fields}, blobs))

    ask("get", "k")
    ask("set", "k", blobs=(b"1",))
    ask("get", "k")
    ask("get", "k", "l")
    ask("add", "l", amount=2)
    ask("add", "l", amount=3)
    ask("get", "k", "l")
    assert answers == [(False, []), (None, []), (True, [b"1"]), (False, []), (2, []), (5, []), (True, [b"1", b"5"])]
    answers.clear()
    ask("compare_set", "m", blobs=(b"", b"first"))
    ask("compare_set", "m", blobs=(b"", b"second"))
    ask("compare_set", "m", blobs=(b"first", b"third"))
    ask("check", "m", "n")
    ask("append", "m", blobs=(b"!",))
    ask("get", "m")
    ask("delete", "m")
    ask("count")
    assert answers == [(None, [b"first"]), (None, [b"first"]), (None, [b"third"]), (False, []), (None, []),
                       (True, [b"third!"]), (True, []), (2, [])]


def test_keys_of_an_earlier_epoch_are_dropped_and_whoever_asks_is_told_so() -> None:
    answers: list[tuple[bool, list[bytes]]] = []
    store = Rendezvous(lambda identity, body, blobs: answers.append((body["over"], blobs)))

    def ask(op: str, key: str, *blobs: bytes) -> None:
        store.handle(b"a", Frame("store", {"sequence": 1, "op": op, "keys": [key]}, blobs))

    for key in ("epoch1/x", "epoch2/x", "epochal/x"):
        ask("set", key, b"v")
    store.keep_epoch(2)
    answers.clear()
    for op in ("check", "get", "set"):
        ask(op, "epoch1/x", b"v")
    ask("get", "epoch2/x")
    ask("get", "epochal/x")
    assert answers == [(True, [])] * 3 + [(False, [b"v"])] * 2


@pytest.fixture
def store(listener: Listener, context: zmq.Context[Any]) -> Iterator[tuple[Store, Rendezvous]]:
    """A rank's end of the rendezvous, and the supervisor's end, served by a thread."""
    rendezvous = Rendezvous(lambda identity, body, blobs: listener.send(identity, "store", body, blobs))
    poller, over = zmq.Poller(), threading.Event()
    poller.register(listener.socket, zmq.POLLIN)
    poller.register(listener.zap, zmq.POLLIN)

    def serve() -> None:
        while not over.is_set():
            ready = dict(poller.poll(20))
            if listener.zap in ready:
                listener.admit()
            if listener.socket in ready and (received := listener.receive()) is not None:
                rendezvous.handle(*received)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield Store(context, listener.address, "store:0:1"), rendezvous
    over.set()
    thread.join()


@contextmanager
def in_a_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """What it returns or raises, in a list, when the block has ended and it too."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.1)
    yield found
    thread.join(20)


def test_who_waits_for_a_key_keeps_nobody_from_asking(store: tuple[Store, Rendezvous]) -> None:
    ours, _ = store
    with in_a_thread(lambda: ours.get("epoch1/late")) as found:
        assert (ours.add("n", 2), ours.check(["epoch1/late"]), ours.waiting) == (2, False, "epoch1/late")
        ours.set("epoch1/late", "come")
    assert (found, ours.waiting) == ([b"come"], "")


def test_a_wait_ends_with_the_groups_that_it_was_for_or_when_it_is_released(store: tuple[Store, Rendezvous]) -> None:
    ours, rendezvous = store
    with in_a_thread(lambda: ours.get("epoch1/never")) as found:
        rendezvous.keep_epoch(2)
    assert found == ["the groups that met under epoch1/never are closed"]
    with in_a_thread(lambda: ours.wait(["epoch2/never"])) as found:
        ours.release("interrupted")
    assert found == ["interrupted"]
    ours.renew()
    with pytest.raises(DistStoreError, match=r"waited 0 s for the rendezvous key epoch2/never"):
        ours.wait(["epoch2/never"], timedelta(seconds=0.1))


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
