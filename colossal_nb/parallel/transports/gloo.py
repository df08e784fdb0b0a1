"""Gloo over TCP: the transport for CPU ranks, on one host or several."""

import datetime
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from colossal_nb.parallel import compat
from colossal_nb.parallel.transports import sockets

# A wait for a rank that still computes is never an error: a hang is explained by the record and ended by an abort.
_NEVER = datetime.timedelta(days=300)
_THREADS = 2


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


class PatientStore(compat.Store):  # type: ignore[misc]
    """A store whose waits look at `check` while they wait, so that an abort reaches a rank that waits for others."""

    def __init__(self, store: Any, prefix: str, check: Callable[[], None]) -> None:
        super().__init__()
        self._store, self._prefix, self._check = store, prefix, check

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._store.get(self._prefix + key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Return when all keys are there; raises what `check` raises."""
        names, pause_s = [self._prefix + key for key in keys], 0.0002
        while not self._store.check(names):
            self._check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([self._prefix + key for key in keys]))


class Gloo:
    """The connections of one group. `index` and `root` and `peer` count inside the group."""

    name = "gloo"

    def __init__(self, endpoint: Endpoint, store: PatientStore, index: int, size: int) -> None:
        store.set(f"at{index}", endpoint.address)
        for other in range(size):
            endpoint.meet(store.get(f"at{other}").decode())
        options = compat.gloo_options(endpoint.device, _THREADS, _NEVER)
        self._inner: Any = dist.ProcessGroupGloo(store, index, size, options)

    def all_reduce(self, x: torch.Tensor, reduce: str) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp = compat.reduce_op(reduce)
        return self._inner.allreduce([x], options)  # type: ignore[no-any-return]

    def reduce(self, x: torch.Tensor, reduce: str, root: int) -> Handle:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = compat.reduce_op(reduce), root
        return self._inner.reduce([x], options)  # type: ignore[no-any-return]

    def broadcast(self, x: torch.Tensor, root: int) -> Handle:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._inner.broadcast([x], options)  # type: ignore[no-any-return]

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> Handle:
        return self._inner._allgather_base(out, x, compat.all_gather_options())  # type: ignore[no-any-return]

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, got: list[int], given: list[int]) -> Handle:
        return self._inner.alltoall_base(out, x, got, given, dist.AllToAllOptions())  # type: ignore[no-any-return]

    def barrier(self) -> Handle:
        return self._inner.barrier(dist.BarrierOptions())  # type: ignore[no-any-return]

    def send(self, x: torch.Tensor, peer: int, tag: int) -> Handle:
        return self._inner.send([x], peer, tag)  # type: ignore[no-any-return]

    def recv(self, x: torch.Tensor, peer: int | None, tag: int) -> Handle:
        """`peer` None takes what comes first; the handle's `_source_rank()` names the sender."""
        if peer is None:
            return self._inner.recv_anysource([x], tag)  # type: ignore[no-any-return]
        return self._inner.recv([x], peer, tag)  # type: ignore[no-any-return]
