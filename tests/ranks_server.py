"""The process behind `ranks_fixture`: imports torch once, then forks ranks on request. Not a test."""

import faulthandler
import gc
import json
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import traceback
from typing import Any

from ranks_fixture import recv_message, send_message


def serve(orders: socket.socket) -> None:
    """Fork and kill on request until the tests are gone; then end what is left."""
    children: set[int] = set()
    try:
        while True:
            order, fds, _, _ = socket.recv_fds(orders, 4096, 2)
            if not order:
                return
            what = json.loads(order)
            if what["verb"] == "fork":
                pid = os.fork()
                if pid == 0:
                    orders.close()
                    _be_rank(what, *(socket.socket(fileno=fd) for fd in fds))
                for fd in fds:
                    os.close(fd)
                children.add(pid)
                send_message(orders, str(pid).encode())
            else:
                _end(what["pid"], children)
                send_message(orders, b"done")
    finally:
        for pid in list(children):
            _end(pid, children)


def _end(pid: int, children: set[int]) -> None:
    if pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.discard(pid)


def _be_rank(what: dict[str, int], calls: socket.socket, control: socket.socket) -> None:
    try:
        _rank_loop(what, calls, control)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _rank_loop(what: dict[str, int], calls: socket.socket, control: socket.socket) -> None:
    import torch.distributed as dist

    from colossal_nb.parallel.world import World
    from colossal_nb.record.recorder import Recorder

    threading.Thread(target=_controlled, args=(control,), daemon=True, name="control").start()
    store = dist.TCPStore("127.0.0.1", what["port"], is_master=False, wait_for_workers=False)
    recorder = Recorder(what["rank"])
    while True:
        try:
            epoch, function, args, keywords = pickle.loads(recv_message(calls))
        except EOFError:
            return
        except Exception as error:
            send_message(calls, _answer("error", traceback.format_exc(), error))
            continue
        try:
            recorder.drain()
            World.start(what["rank"], what["count"], dist.PrefixStore(f"call{epoch}", store), recorder=recorder)
            answer = _answer("ok", function(*args, **keywords), None)
        except BaseException as error:
            answer = _answer("error", traceback.format_exc(), error)
        send_message(calls, answer)


def _answer(kind: str, value: Any, error: BaseException | None) -> bytes:
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps((kind, value, error))
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(("error", f"{value}\ncould not be sent:\n{traceback.format_exc()}", None))
    return packed


def _controlled(control: socket.socket) -> None:
    """Answer `look` and `abort` while the main thread is anywhere; end the process when the tests are gone."""
    from colossal_nb.parallel.world import World

    while True:
        try:
            verb = recv_message(control)
        except EOFError:
            os._exit(1)
        if verb == b"abort":
            World.current().abort("the test was ended")
            send_message(control, b"done")
            continue
        with tempfile.TemporaryFile("w+") as room:
            faulthandler.dump_traceback(room, all_threads=True)
            room.seek(0)
            opened = "\n".join(map(str, World.current().recorder.open())) or "no open slice"
            send_message(control, f"{opened}\n{room.read()}".encode())


def main() -> None:
    import torch

    # Warm: every rank needs them, and the first optimizer of a process would import torch._dynamo.
    import torch._dynamo

    import colossal_nb.parallel.parallelize
    import colossal_nb.parallel.step  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays shared with the children
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
