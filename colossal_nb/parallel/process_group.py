"""A process group of torch whose every operation goes through the gate: recorded, guarded, abortable.

It finds its `Group` by name at use, so that what holds it (DDP, a mesh of DTensor) outlives a regroup of the same
ranks.
"""

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossal_nb.parallel import compat
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.work import Work
from colossal_nb.parallel.world import World

BACKEND = "colossal"


class UserWork(dist.Work):
    """What `async_op=True` returns; its future completes the operation where nobody waits (DDP)."""

    def __init__(self, works: Sequence[Work], tensors: Any) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors
        self._future: Any = None
        self._begun: Any = None
        self._settled = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # a future that is done calls back at once

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> Any:
        return None

    def result(self) -> Any:
        return self._tensors

    def _source_rank(self) -> int:
        self.wait()
        return int(self._works[0].handles[0].wait())

    source_rank = _source_rank

    def get_future(self) -> Any:
        """Ends with the operation, or with an abort: gloo may lose the end of what was cut."""
        with self._lock:
            if self._future is None:
                self._begun = torch.futures.Future()
                self._future = self._begun.then(self._arrived)
                for work in self._works:
                    work.group.epoch.waiting.add(self)
                handles = [handle.get_future() for work in self._works for handle in work.handles]
                torch.futures.collect_all(handles).add_done_callback(self._settle)
        if any(work.group.epoch.aborted for work in self._works):
            self.release()
        return self._future

    def release(self) -> None:
        """The groups were closed: whoever waits for the future gets Released."""
        self._settle(None)

    def _settle(self, done: Any) -> None:
        with self._lock:
            if self._settled:
                return
            self._settled = True
        try:
            if done is None:
                self._works[0].group.epoch.check()
            else:
                for one in done.value():
                    one.value()
        except BaseException as error:
            self._error = error
        self._begun.set_result(None)

    def _arrived(self, _: Any) -> Any:
        for work in self._works:
            if self._error is None:
                work.complete()
            else:
                work.close()
        if self._error is not None:
            raise self._error
        return self._tensors


def _reduction(options: Any) -> str:
    name: str = options.reduceOp.op.name.lower()
    return name


class UserGroup(compat.ProcessGroup):  # type: ignore[misc]
    """A process group of the user: `name` and global `ranks` say which `Group` it stands for."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, torch_name: str) -> None:
        super().__init__(rank, len(ranks))
        self._name, self.ranks, self._torch_name = name, ranks, torch_name
        self._together: list[UserWork] | None = None

    @property
    def group(self) -> Group:
        group = World.current().some(self._name, self.ranks)
        group.careful = True
        return group

    @property
    def group_name(self) -> str:
        return self._torch_name

    @property
    def pg_name(self) -> str:
        return self._torch_name

    def _run(
        self, op: str, tensors: Sequence[Tensor], opts: Any = None, result: Any = None, **options: Any
    ) -> UserWork:
        return self._made([self._work(op, tensors, opts, **options)], tensors if result is None else result)

    def _work(self, op: str, tensors: Sequence[Tensor], opts: Any = None, **options: Any) -> Work:
        """A blocking call of the user is compared between the ranks; one under way (async_op, DDP) cannot be."""
        compare = getattr(opts, "asyncOp", True) is False
        return self.group.run(op, tensors, wait=False, compare=compare, **options)

    def _made(self, works: list[Work], result: Any) -> UserWork:
        work = UserWork(works, list(result))
        if self._together is not None:
            self._together.append(work)
        return work

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> UserWork:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if opts is None:
            reduce = "sum"
        else:
            reduce = _reduction(opts) if hasattr(opts, "reduceOp") else opts.op.name.lower()
        return self._run("all_reduce", tensors, opts, reduce=reduce)

    def allreduce_coalesced(self, tensors: Any, opts: Any) -> UserWork:
        return self._run("all_reduce", tensors, opts, reduce=_reduction(opts))

    def reduce(self, tensors: Any, opts: Any) -> UserWork:
        return self._run("reduce", tensors, opts, reduce=_reduction(opts), root=opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any) -> UserWork:
        return self._run("broadcast", tensors, opts, root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> UserWork:
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._run("all_gather", [*outputs[0], inputs[0]], opts, outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> UserWork:
        works = [
            self._work("all_gather", [*(out[index] for out in outputs), x], opts) for index, x in enumerate(inputs)
        ]
        return self._made(works, outputs)

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> UserWork:
        return self._run("all_gather", [output, x], opts, [output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> UserWork:
        works = [self._work("all_gather", pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._made(works, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> UserWork:
        outs = outputs[0] if outputs else []
        return self._run("gather", [*outs, inputs[0]], opts, outputs, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> UserWork:
        parts = inputs[0] if inputs else []
        return self._run("scatter", [outputs[0], *parts], opts, outputs, root=opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> UserWork:
        return self._run("reduce_scatter", [outputs[0], *inputs[0]], opts, outputs, reduce=_reduction(opts))

    def _reduce_scatter_base(self, output: Tensor, x: Tensor, opts: Any = None) -> UserWork:
        reduce = "sum" if opts is None else _reduction(opts)
        return self._run("reduce_scatter", [output, x], opts, [output], reduce=reduce)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> UserWork:
        reduce = "sum" if opts is None else _reduction(opts)
        pairs = zip(outputs, inputs, strict=True)
        works = [self._work("reduce_scatter", pair, opts, reduce=reduce) for pair in pairs]
        return self._made(works, outputs)

    def alltoall_base(self, output: Tensor, x: Tensor, got: Any, given: Any, opts: Any = None) -> UserWork:
        return self._run("all_to_all", [output, x], opts, [output], got=list(got), given=list(given))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> UserWork:
        return self._run("all_to_all", [*outputs, *inputs], opts, outputs)

    def barrier(self, opts: Any = None) -> UserWork:
        return self._run("barrier", [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._run("barrier", []).wait()

    def send(self, tensors: Any, dst: int, tag: int = 0) -> UserWork:
        return self._run("send", tensors, peer=dst, tag=tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> UserWork:
        return self._run("recv", tensors, peer=src, tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> UserWork:
        return self._run("recv", tensors, peer=None, tag=tag)

    # torch 2.13's names of the same.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _start_coalescing(self, device: Any = None) -> None:
        self._together = []

    def _end_coalescing(self, device: Any = None) -> UserWork:
        """One work for all that was started meanwhile; gloo itself has none of this and breaks when asked."""
        together, self._together = self._together or [], None
        return UserWork([each for work in together for each in work._works], [])

    def _get_sequence_number_for_group(self) -> int:
        return self.group.seq

    def _set_sequence_number_for_group(self) -> None:
        """Ours begins at 0 by itself."""

    def set_timeout(self, timeout: Any) -> None:
        """A wait has no limit here: a hang is explained and ended by the cluster."""

    def shutdown(self) -> None:
        """The world ends the groups."""

    def abort(self) -> None:
        self.group.epoch.abort("the process group was aborted")

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def name(self) -> str:
        return BACKEND
