"""Gloo over TCP: the transport for CPU ranks, on one host or several."""

import contextlib
import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from colossal_nb.parallel import compat
from colossal_nb.parallel.transports import sockets
from colossal_nb.parallel.transports.meeting import PatientStore, together

# A wait for a rank that still computes is never an error: a hang is explained by the record and ended by an abort.
_NEVER = datetime.timedelta(days=300)
_THREADS = 2
_PATIENCE_S = 0.25
_GLANCE_S = 0.02
_LOOK = datetime.timedelta(milliseconds=100)


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Endpoint:
    """Where the other ranks reach this process: one gloo device for all groups and epochs of the process.

    Its own listening address, and the addresses of the peers that were met, are what tells gloo's sockets from
    all others, so that `cut` needs no help from gloo, which offers none.
    """

    def __init__(self, interface: str | None = "lo") -> None:
        before = sockets.listening()
        self.device = compat.make_device(interface)
        self._own = sockets.listening() - before
        assert self._own, "the gloo device opened no listening socket"
        self.peers: set[sockets.Address] = set()

    @property
    def address(self) -> str:
        host, port = min(self._own)
        return f"{host} {port}"

    def meet(self, address: str) -> None:
        host, port = address.split(" ")
        self.peers.add((host, int(port)))

    def cut(self) -> int:
        """Shut down every connection to another rank; whoever is blocked in one, here or there, gets an error."""
        return sockets.shut_down(self._own, self.peers - self._own)


class Collective:
    """A collective under way, whose wait looks at `check` now and then.

    Gloo can lose the end of a send whose connection is cut: the collective then never ends, and neither would a wait
    for it. (Only for collectives: a time limit on a single send or receive would end all others of its group.)
    """

    def __init__(self, work: Any, check: Callable[[], None]) -> None:
        self._work, self._check = work, check

    def wait(self) -> Any:
        while True:
            try:
                return self._work.wait(_LOOK)
            except RuntimeError:
                if self._work.is_completed():  # by now: the error may be no more than our look's own limit
                    return self._work.wait()
                self._check()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Sent:
    """A send under way, whose wait looks at `check` now and then.

    Gloo can lose the end of a send whose connection is cut, and its own wait has no limit that would not end all
    other messages of the group: so a thread waits, and is left behind after an abort.
    """

    def __init__(self, works: Sequence[Any], check: Callable[[], None]) -> None:
        self._works, self._check = works, check
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sent")
        self._thread.start()

    def _watch(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            self._error = error

    def wait(self) -> None:
        while self._thread.is_alive():
            self._thread.join(_GLANCE_S)
            if self._thread.is_alive():
                self._check()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()


def _take_apart(box: list[Any]) -> None:
    """Destroy a process group: its destructor waits for its collectives, of which one may never end."""
    box.clear()


def _connected(place: PatientStore, index: int, size: int, options: Any) -> Any:
    """A process group whose connections have carried a first message each way."""
    made: Any = dist.ProcessGroupGloo(place, index, size, options)
    made.barrier(dist.BarrierOptions()).wait()
    return made


class Gloo:
    """The connections of one group. `index` and `root` and `peer` count inside the group."""

    name = "gloo"

    def __init__(self, endpoint: Endpoint, store: PatientStore, index: int, size: int) -> None:
        store.set(f"at{index}", endpoint.address)
        for other in range(size):
            endpoint.meet(store.get(f"at{other}").decode())
        options = compat.gloo_options(endpoint.device, _THREADS, _NEVER)
        self._check = store.check_alive
        self._inner: Any = together(lambda place: _connected(place, index, size, options), store, index, size)

    def __del__(self) -> None:
        """Taken apart in a thread of its own: nobody waits long for a collective that has lost its end."""
        box = [self.__dict__.pop("_inner", None)]
        with contextlib.suppress(RuntimeError):  # at the end of the process there are no more threads
            helper = threading.Thread(target=_take_apart, args=(box,), daemon=True)
            helper.start()
            helper.join(_PATIENCE_S)

    def _collective(self, work: Any) -> Collective:
        return Collective(work, self._check)

    def all_reduce(self, x: torch.Tensor, reduce: str) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = compat.reduce_op(reduce)
        return self._collective(self._inner.allreduce([x], options))

    def reduce(self, x: torch.Tensor, reduce: str, root: int) -> Handle:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = compat.reduce_op(reduce), root
        return self._collective(self._inner.reduce([x], options))

    def broadcast(self, x: torch.Tensor, root: int) -> Handle:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._collective(self._inner.broadcast([x], options))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        return self._collective(self._inner._allgather_base(out, x, compat.all_gather_options()))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, got: list[int], given: list[int]) -> Handle:
        return self._collective(self._inner.alltoall_base(out, x, got, given, dist.AllToAllOptions()))

    def barrier(self) -> Handle:
        return self._collective(self._inner.barrier(dist.BarrierOptions()))

    def send(self, x: torch.Tensor, peer: int, tag: int) -> Handle:
        """Its wait is safe only when something from the peer has proved that it arrived; else see `sent`."""
        return self._inner.send([x], peer, tag)  # type: ignore[no-any-return]

    def sent(self, *works: Handle) -> Handle:
        """What ends when all these sends have, or with an abort."""
        return Sent(works, self._check)

    def recv(self, x: torch.Tensor, peer: int | None, tag: int) -> Handle:
        """`peer` None takes what comes first; the handle's `_source_rank()` names the sender."""
        if peer is None:
            return self._inner.recv_anysource([x], tag)  # type: ignore[no-any-return]
        return self._inner.recv([x], peer, tag)  # type: ignore[no-any-return]
