"""The one global of a rank's process: who it is, and the groups it can talk in."""

import contextlib
import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from colossal_nb.parallel.agreement import block_bytes
from colossal_nb.parallel.board import Board
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.ledger import Ledger
from colossal_nb.parallel.stopping import Stopping
from colossal_nb.parallel.transports.gloo import Endpoint, Gloo
from colossal_nb.parallel.transports.meeting import PatientStore
from colossal_nb.parallel.work import Released
from colossal_nb.record.recorder import Recorder

if TYPE_CHECKING:
    from colossal_nb.plan.mesh import Mesh
    from colossal_nb.plan.strategy import Strategy


class Epoch:
    """The groups between two regroupings. An abort ends it; what still runs inside gets Released."""

    def __init__(self, world: "World", number: int, store: Any) -> None:
        self.world, self.number, self._store = world, number, store
        self.reason = ""
        self._ended = threading.Event()
        self.waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # have a `release` to be called by an abort
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._connecting = 0
        self._lock = threading.Lock()

    @property
    def aborted(self) -> bool:
        return self._ended.is_set()

    def aborted_within(self, limit_s: float) -> bool:
        """Whether an abort comes soon: when all ranks are aborted, a peer's may be felt before our own is told."""
        return self._ended.wait(limit_s)

    def group(self, name: str, ranks: tuple[int, ...]) -> Group:
        found = self._groups.get((name, ranks))
        if found is None:
            if self.world.rank not in ranks:
                raise ValueError(f"rank {self.world.rank} is no member of the group {name} {list(ranks)}")
            with self._lock:
                new = Group(self, name, ranks, ranks.index(self.world.rank))
                found = self._groups.setdefault((name, ranks), new)
        return found

    def connect(self, name: str, ranks: tuple[int, ...], index: int) -> tuple[Gloo, Board | None]:
        """Connect one group, and give it a board where its ranks share a host; returns when all members have come.

        Raises Released after an abort.
        """
        prefix = f"epoch{self.number}/{name}/{'-'.join(map(str, ranks))}/"
        store = PatientStore(self._store, prefix, self.check)
        with self._lock:
            self._connecting += 1
        try:
            board = Board.shared(store, index, len(ranks), block_bytes(len(ranks)))
            wire = Gloo(self.world.endpoint(), store, index, len(ranks))
        finally:
            with self._lock:
                self._connecting -= 1
        self.check()
        return wire, board

    def check(self) -> None:
        if self.aborted:
            raise self.release()

    def release(self) -> BaseException:
        if self.world.interrupted:
            return KeyboardInterrupt()
        return Released(self.reason)

    def abort(self, reason: str) -> None:
        """Free whoever is blocked in a group of this epoch; safe in any thread, and again."""
        self.reason = self.reason or reason
        self._ended.set()
        endpoint = self.world.made_endpoint
        if endpoint is not None:
            endpoint.cut()
            # A connection that was being made while we looked was not there to be cut.
            pause = threading.Event()
            for _ in range(200):
                if not self._connecting:
                    break
                pause.wait(0.005)
                endpoint.cut()
        for each in list(self.waiting):
            each.release()

    def close(self) -> None:
        for group in list(self._groups.values()):
            group.close()
        self._groups.clear()


class World:
    """This process as a rank.

    Attributes: `rank`, `ranks` (the global ranks that work together), `world_size`, `epoch`, `device`, `recorder`,
    `ledger` (its device's memory, of `capacity_bytes` if given), `strategy` (the running cell's default, or None),
    `notes` (lines to tell the user once), `subset` (the ranks of a cell that runs on some alone, or None), `alone`
    (the thread that may not talk to other ranks, because they wait elsewhere), `stepping` (the parallel model that is
    at work on parts of a batch, or None), `elsewhere` (whether that one's loss or forward has called another parallel
    model, which runs), `verify` (whether the next forward_backward is to be compared with the sequential program
    first), `interrupted` (set before an abort that means KeyboardInterrupt), `lives` (rank -> which process with that
    number it is, where it is not the first), `parallels` (what the parallel models of this process carry).
    """

    _current: ClassVar["World | None"] = None

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        *,
        epoch: int = 0,
        device: str = "cpu",
        recorder: Recorder | None = None,
        strategy: "Strategy | None" = None,
        interface: str | None = "lo",
        capacity_bytes: int | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"a world of {world_size} has ranks 0..{world_size - 1}; {rank} is none of them")
        self.rank, self.ranks, self.store = rank, tuple(range(world_size)), store
        self.device, self.strategy, self.interface = device, strategy, interface
        self.recorder = recorder if recorder is not None else Recorder(rank)
        self.ledger = Ledger(rank, self.recorder, capacity_bytes)
        self.notes: list[str] = []
        self.subset: frozenset[int] | None = None
        self.alone: int | None = None
        self.stepping: Any = None
        self.elsewhere = False
        self.verify = False
        self.verified: Any = None  # the model and the verdict of a cell with --verify, until the cell ends
        self.interrupted = False
        self.lives: dict[int, int] = {}
        self.parallels: weakref.WeakSet[Any] = weakref.WeakSet()
        self.stopping = Stopping()
        self.saving: Any = None  # a save that may still be written in the background
        self.model: Any = None  # what the parallel model that ran last carries
        self.made_endpoint: Endpoint | None = None
        self._epoch = Epoch(self, epoch, store)
        self._lock = threading.Lock()

    @classmethod
    def current(cls) -> "World":
        """The world of this process; one rank where nobody started one (a plain kernel)."""
        if World._current is None:
            World._current = World(0, 1, None)
        return World._current

    @classmethod
    def start(cls, rank: int, world_size: int, store: Any, **options: Any) -> "World":
        """Make this process a rank; ends the world before. Options as in `World`.

        `store`: a torch.distributed store (get, set, check) that all ranks share. `interface`: the network interface
        of the ranks (None: the one of the host's name).
        """
        before = World._current
        new = World(rank, world_size, store, **options)
        if before is not None:
            before.stop()
            if before.interface == new.interface:
                new.made_endpoint = before.made_endpoint
        World._current = new
        return new

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def epoch(self) -> int:
        return self._epoch.number

    @property
    def era(self) -> object:
        """The same object until the next `regroup`, which follows every stop and every error."""
        return self._epoch

    @property
    def aborted(self) -> bool:
        """Whether the groups are closed until the next `regroup`."""
        return self._epoch.aborted

    def endpoint(self) -> Endpoint:
        with self._lock:
            if self.made_endpoint is None:
                self.made_endpoint = Endpoint(self.interface)
            return self.made_endpoint

    def group(self, mesh: "Mesh", axis: str | tuple[str, ...]) -> Group:
        """The group of this rank along an axis, or along several at once ("dp", "sp"): found anew at each use, so
        that whoever holds mesh and axis outlives a regroup."""
        if self.rank >= mesh.size:
            raise ValueError(f"rank {self.rank} waits in this strategy: its mesh ({mesh}) has {mesh.size} ranks")
        if isinstance(axis, str):
            return self._epoch.group(axis, mesh.ranks(axis, self.rank))
        together = {self.rank}
        for one in axis:
            together = set(itertools.chain.from_iterable(mesh.ranks(one, rank) for rank in together))
        return self._epoch.group("+".join(axis), tuple(sorted(together)))

    def whole(self) -> Group:
        """The group of all ranks."""
        return self._epoch.group("world", self.ranks)

    def taking_part(self) -> Group:
        """The group of the ranks that run this cell."""
        return self.whole() if self.subset is None else self._epoch.group("cell", tuple(sorted(self.subset)))

    def some(self, name: str, ranks: tuple[int, ...]) -> Group:
        """A group of its own for the given ranks, this one among them."""
        return self._epoch.group(name, ranks)

    def note(self, text: str) -> None:
        """Tell the user once."""
        if text not in self.notes:
            self.notes.append(text)

    def abort(self, reason: str = "the groups were closed") -> None:
        """From any thread: whoever is in a collective is freed within some 10 ms, and later calls raise at once."""
        self._epoch.abort(reason)

    def regroup(
        self,
        epoch: int,
        ranks: "tuple[int, ...] | list[int]",
        rank: int | None = None,
        lives: dict[int, int] | None = None,
    ) -> None:
        """Begin a new epoch with the given global ranks, all of which call this; groups are made again at use.

        `lives`: as in `World`; None if they are what they were.

        Raises ValueError for an epoch that is not newer.
        """
        if epoch <= self._epoch.number:
            raise ValueError(f"epoch {epoch} is not newer than {self._epoch.number}")
        old = self._epoch
        old.abort(f"epoch {epoch} began")
        self.rank = self.rank if rank is None else rank
        self.ranks = tuple(ranks)
        self.lives = self.lives if lives is None else lives
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not among {list(self.ranks)}")
        self._epoch = Epoch(self, epoch, self.store)
        self.interrupted = False
        old.close()
        self.recorder.abandon()

    def tell_positions(self) -> None:
        """After a regroup: leave in the store where this rank stands with each model, for looks that are no collective.
        """
        for each in [each for each in self.parallels if each.number and self.store is not None]:
            with contextlib.suppress(Exception):  # who finds nothing compares at the next collective use
                self.store.set(self._place(each.number, self.rank), each.position().to_json())

    def told(self, number: str, ranks: list[int]) -> list[bytes]:
        """What ranks have left in the store about a model as this epoch began; [] where it is not all there."""
        keys = [self._place(number, rank) for rank in ranks]
        if self.store is None or not self.store.check(keys):
            return []
        return [bytes(self.store.get(key)) for key in keys]

    def _place(self, number: str, rank: int) -> str:
        return f"epoch{self.epoch}/position/{number}/{rank}"

    def stop(self) -> None:
        """End the groups; the process is a rank of nothing."""
        self._epoch.abort("the world was stopped")
        self._epoch.close()
        if World._current is self:
            World._current = None
