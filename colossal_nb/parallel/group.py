"""The gate: every collective and every message of a rank passes through `Group.run`."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossal_nb.parallel import agreement, calls, compat, forms
from colossal_nb.parallel.board import Board
from colossal_nb.parallel.transports import messages
from colossal_nb.parallel.transports.gloo import Gloo, Handle
from colossal_nb.parallel.transports.messages import Mismatch
from colossal_nb.parallel.work import Finished, Later, Released, Work
from colossal_nb.record.events import group_name, link_name

if TYPE_CHECKING:
    from colossal_nb.parallel.world import Epoch


# How long after a peer's hang-up our own abort may still arrive.
_ABORT_FOLLOWS_S = 0.5
# How long a rank that found others calling something else waits for the rest, to name what each of them calls.
_OTHERS_COME_S = 0.2
# Kinds of calls whose description is kept.
_MOST_BLOCKS = 1024


class Group:
    """The ranks of one mesh axis (or of one user group), seen from one of them.

    `name` is the axis's name, `ranks` the global ranks in the axis's order, `index` this rank's place among them.
    The connections are made at the first operation, by the members alone.
    """

    def __init__(self, epoch: "Epoch", name: str, ranks: tuple[int, ...], index: int) -> None:
        self.epoch, self.name, self.ranks, self.index = epoch, name, ranks, index
        self.size = len(ranks)
        self.seq = 0
        self.careful = False  # no blocking call begins before all ranks have shown that they mean the same
        self._label = group_name(name, ranks)
        self._blocks: dict[agreement.Signature, bytes] = {}
        self._messages: dict[tuple[int, int], int] = {}
        self._wire: Gloo | None = None
        self._board: Board | None = None
        self._ways: dict[tuple[str, int | None, int], Future[Any]] = {}  # the last message under way on each
        self._lock = threading.Lock()
        self._ahead: threading.Thread | None = None

    def run(
        self,
        op: str,
        tensors: Sequence[Tensor],
        *,
        of: str = "",
        wait: bool = True,
        compare: bool | None = None,
        **options: Any,
    ) -> Work:
        """Run one operation on every rank of the group; the only way to other ranks.

        op and tensors: `all_reduce` [*xs], `broadcast` [*xs] (root=), `all_gather` [out, x] or [*outs, x],
        `reduce_scatter` [out, x] or [out, *parts], `all_to_all` [out, x] (got=, given= rows per rank), `reduce` [x]
        (root=), `gather` [*outs, x], `scatter` [out, *parts] (root=), `barrier` [], `send` and `recv` [x] (peer=,
        tag=, eager=). reduce= is one of `forms.REDUCTIONS`; root and peer count inside the group.
        `of` names what is moved, for the record. With wait=False the result is there after `Work.wait()`.
        Ranks of one host see what the others call before bytes move. In a `careful` group, where they wait
        (`compare`; by default as `wait`), all of them do so together and raise together; elsewhere the one that comes
        later raises, and closes the groups of its epoch, which frees the others. Ranks of several hosts compare
        through messages: each kind of call once, all of them where the group is careful.

        Raises ValueError for what cannot be right, Mismatch where ranks differ, Released after an abort
        (KeyboardInterrupt if the rank was interrupted); never hangs once its groups are aborted.
        """
        if op in ("send", "recv"):
            return self._message(op, tensors[0], of=of, wait=wait, **options)
        if op in ("gather", "scatter"):
            options["index"] = self.index
        with torch.no_grad():
            call: calls.Call = getattr(calls, op)(tensors, self.size, **options)
        if self.size == 1:
            return _alone(self, op, tensors)
        self._allowed()
        number, self.seq = self.seq, self.seq + 1
        token = self._begin(op, self._label, number, call.payload_bytes, of)

        def issue() -> Sequence[Handle]:
            wire = self.wire()
            self._agree(op, call, number, wait if compare is None else compare)
            return call.issue(wire)

        return self._started(issue, call.finish, token, wait)

    def _agree(self, op: str, call: calls.Call, number: int, waits: bool) -> None:
        """Raises Mismatch where other ranks call something else under the same number."""
        mine = agreement.signature(op, call)
        block, new = self._blocks.get(mine), False
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            block, new = agreement.block(mine, call, self.size), True
            self._blocks[mine] = block
        if self._board is not None:
            self._look(self._board, op, block, number, waits and self.careful)
        elif waits and (new or self.careful):
            agreement.compare(agreement.exchanged(self.wire(), block, self.size), self.ranks, op)

    def _look(self, board: Board, op: str, block: bytes, number: int, together: bool) -> None:
        board.post(number, block)
        if together and not board.wait(number, self.epoch.check):
            raise Released(f"another rank of the group {self.name} {list(self.ranks)} is gone")
        try:
            agreement.compare(self._seen(board, number), self.ranks, op)
        except Mismatch:
            if not together:
                self._give_up(board, op, number)
            raise

    def _give_up(self, board: Board, op: str, number: int) -> None:
        """Others may be in their operation already, and their bytes on the way: the connections are spoilt.

        Raises Mismatch, with the calls of those ranks too that came meanwhile.
        """
        board.wait(number, lambda: None, _OTHERS_COME_S)
        blocks = self._seen(board, number)
        self.epoch.abort("the ranks of a group called different operations")
        agreement.compare(blocks, self.ranks, op)

    def _seen(self, board: Board, number: int) -> list[bytes | None]:
        return [board.read(other, number) for other in range(self.size)]

    def _started(
        self, issue: Callable[[], Sequence[Handle]], finish: Callable[[], None] | None, token: Any, wait: bool
    ) -> Work:
        work = None
        try:
            work = Work(self, issue(), finish, token)
        except BaseException as error:
            raise self.translated(error) from (None if isinstance(error, Released) else error)
        finally:
            if work is None:
                self.epoch.world.recorder.end(token)
        if wait:
            work.wait()
        return work

    def _begin(self, kind: str, group: str, seq: int, payload_bytes: int, of: str) -> Any:
        return self.epoch.world.recorder.begin(kind, "comm", group=group, seq=seq, payload_bytes=payload_bytes, of=of)

    def _allowed(self) -> None:
        """Raise at once where the call could never end."""
        self.epoch.check()
        if self.epoch.world.alone == threading.get_ident():
            raise RuntimeError("this runs on one rank alone while the others wait: nobody would answer a message")
        subset = self.epoch.world.subset
        missing = [rank for rank in self.ranks if subset is not None and rank not in subset]
        if missing:
            raise ValueError(
                f"this cell runs on ranks {', '.join(map(str, sorted(subset or ())))} alone; the group {self.name} "
                f"also needs {', '.join(map(str, missing))}: run the cell on all of {list(self.ranks)}"
            )

    def connect_ahead(self) -> None:
        """Make the connections in the background, where the next operation may not be one of all members."""

        def connect() -> None:
            with contextlib.suppress(BaseException):  # whoever needs the connections tries again, and is told
                self.wire()

        if self.size > 1 and self._wire is None and self._ahead is None:
            self._ahead = threading.Thread(target=connect, daemon=True, name=f"connect {self.name}")
            self._ahead.start()

    def wire(self) -> Gloo:
        """The group's connections; made now if need be, which waits for all members."""
        if self._wire is None:
            with self._lock:
                if self._wire is None:
                    self._wire, self._board = self.epoch.connect(self.name, self.ranks, self.index)
        return self._wire

    def translated(self, error: BaseException) -> BaseException:
        """What the caller should see instead of a transport's error."""
        if isinstance(error, Released | Mismatch) or not isinstance(error, Exception):
            return error
        disconnected = compat.is_disconnect(error)
        if self.epoch.aborted_within(_ABORT_FOLLOWS_S if disconnected else 0.0):
            return self.epoch.release()
        if disconnected:
            return Released(f"another rank of the group {self.name} {list(self.ranks)} closed it or is gone")
        return error

    def _message(
        self, op: str, x: Tensor, *, of: str, wait: bool, peer: int | None, tag: int = 0, eager: bool = False
    ) -> Work:
        if peer == self.index or not (peer is None or 0 <= peer < self.size):
            raise ValueError(f"{op}: peer {peer} of a group of {self.size} ranks, seen from {self.index}")
        self._allowed()
        token = self._begin(op, *self._channel(op, peer), forms.bytes_of(x), of)
        if op == "send" and eager:
            assert peer is not None
            work = self._started(lambda: messages.send_eager(self.wire(), x.detach(), peer, tag), None, token, wait)
            self.epoch.world.recorder.set_background(token, not wait)
            return work
        step = messages.send if op == "send" else messages.recv

        def transfer() -> Any:
            # Not under no_grad: a KeyboardInterrupt that waits for the end of a blocked call would land in its exit.
            return step(self.wire(), x.detach(), peer, tag, self.ranks, self.index)  # type: ignore[arg-type]

        return self._started(lambda: [self._deliver((op, peer, tag), transfer, wait)], None, token, wait)

    def _channel(self, op: str, peer: int | None) -> tuple[str, int]:
        """Group name and sequence number of a message: counted per sender and receiver, alike on both sides."""
        other = -1 if peer is None else peer
        pair = (self.index, other) if op == "send" else (other, self.index)
        seq = self._messages[pair] = self._messages.get(pair, -1) + 1
        if peer is None:
            return f"{self.name}:>{self.ranks[self.index]}", seq
        return link_name(self.name, *(self.ranks[place] for place in pair)), seq

    def _deliver(self, way: tuple[str, int | None, int], transfer: Callable[[], Any], wait: bool) -> Handle:
        """Run a transfer: here, or in a thread of its own after the one before it on the same way."""
        done: Future[Any] = Future()
        before = self._ways.get(way)
        if wait and (before is None or before.done()):
            done.set_result(transfer())
            return Later(done)
        self._ways[way] = done

        def run() -> None:
            if before is not None:
                futures.wait([before])
            try:
                done.set_result(transfer())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name=f"{self.name} {way[0]}").start()
        return Later(done)

    def close(self) -> None:
        """Drop the connections; what is blocked in them must have been aborted."""
        self._ways.clear()
        self._wire = None


def _alone(group: Group, op: str, tensors: Sequence[Tensor]) -> Work:
    with torch.no_grad():
        if op in ("all_gather", "all_to_all", "reduce_scatter", "gather", "scatter"):
            out, x = tensors
            out.copy_(x.reshape(out.shape))
    return Finished(group)
