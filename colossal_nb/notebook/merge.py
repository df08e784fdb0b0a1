"""Lines of several ranks become one text: equal ones once, different ones side by side.

Every rank has a queue of what it printed. The heads of the queues are compared: when all ranks have one, or the
oldest has waited `HOLD_S`, they are shown as one *row*, grouped by equality. A head that another rank still has further
back in its queue waits for it, so one additional line on one rank does not put the ranks out of step. A line that comes
after its row was shown is counted and told as "the same", never shown twice. Each line costs a constant: 40,000 of them
are no problem.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from colossal_nb.notebook.digits import skeleton
from colossal_nb.run import Output

HOLD_S = 0.2
MOST_OWED = 20_000


class Item(NamedTuple):
    """Something one rank showed. `kind`: stdout, stderr, display, result, update or clear.

    `text` is a line without its newline, and for rich output a digest: items with equal kind and text are the same.
    """

    kind: str
    text: str
    output: Output | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.text


class Group(NamedTuple):
    """Ranks that showed the same."""

    ranks: tuple[int, ...]
    item: Item
    outputs: tuple[Output | None, ...] = ()


class Row(NamedTuple):
    """What the ranks showed at one position. `late`: so many items these ranks showed after others, the same ones.

    `alike`: so many of the late ones differ from what was shown in digits.
    """

    groups: tuple[Group, ...]
    late: int = 0
    alike: int = 0


Owed = tuple[tuple[str, str], tuple[str, str]]
"""What a rank has not shown yet and others have: the item's key, and its key without digits."""


def alike_key(item: Item) -> tuple[str, str]:
    """Equal for lines that differ only in digits; rich output is alike only if it is the same."""
    return (f"~{item.kind}", skeleton(item.text)) if item.kind in ("stdout", "stderr") else item.key


class _Rank:
    """One rank's queue, what it owes (shown by others, not yet by it), and how many debts it paid late."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Item, float]] = deque()
        self.waiting: Counter[tuple[str, str]] = Counter()
        self.owed: deque[Owed] = deque()
        self.owes: Counter[tuple[str, str]] = Counter()
        self.late: list[Item] = []
        self.alike = 0

    def push(self, item: Item, now: float) -> None:
        self.queue.append((item, now))
        self.waiting[item.key] += 1

    def pop(self) -> Item:
        item, _ = self.queue.popleft()
        if self.waiting[item.key] == 1:
            del self.waiting[item.key]
        else:
            self.waiting[item.key] -= 1
        return item

    def owe(self, debt: Owed) -> None:
        self.owed.append(debt)
        self.owes.update(debt)
        if len(self.owed) > MOST_OWED:
            self._forgive()

    def pay(self, fold: bool) -> None:
        """Take heads off the queue that others have shown already: the same, or (`fold`) but for digits the same."""
        while self.owed and self.queue:
            item = self.queue[0][0]
            wanted = item.key
            if self.owes[wanted] <= 0:
                wanted = alike_key(item)
                if not fold or self.owes[wanted] <= 0:
                    return
                self.alike += 1
            while wanted not in self._forgive():
                pass
            self.late.append(self.pop())

    def _forgive(self) -> Owed:
        debt = self.owed.popleft()
        self.owes.subtract(debt)
        return debt


class Merger:
    """Pure: `add` what arrives, `take` what can be shown by now. Times are seconds of any one clock."""

    def __init__(self, ranks: Sequence[int], hold_s: float = HOLD_S, fold: bool = True) -> None:
        self.ranks = tuple(sorted(ranks))
        self._fold = fold
        self._hold_s = hold_s
        self._of = {rank: _Rank() for rank in self.ranks}

    def add(self, rank: int, item: Item, now: float) -> None:
        if rank not in self._of:  # a rank that joined while the cell runs
            self._of[rank] = _Rank()
            self.ranks = tuple(sorted(self._of))
        self._of[rank].push(item, now)

    @property
    def empty(self) -> bool:
        return not any(each.queue for each in self._of.values())

    def take(self, now: float) -> list[Row]:
        """The rows that are complete or have waited long enough."""
        rows: list[Row] = []
        while True:
            for each in self._of.values():
                if each.owed:
                    each.pay(self._fold)
            heads = {rank: each.queue[0] for rank, each in self._of.items() if each.queue}
            if not heads:
                return rows
            if len(heads) < len(self.ranks):
                oldest = min(since for _, since in heads.values())
                if now - oldest < self._hold_s:
                    return rows
                rows += self._step(heads, max(oldest, now - self._hold_s))
            else:
                rows += self._step(heads, now)

    def finish(self) -> list[Row]:
        """Everything that is left."""
        return self.take(float("inf")) + self._late(self.ranks)

    def _step(self, heads: dict[int, tuple[Item, float]], due: float) -> list[Row]:
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in self.ranks:
            if rank in heads:
                groups.setdefault(heads[rank][0].key, []).append(rank)
        shown = groups
        if len(groups) > 1:
            old = {key: ranks for key, ranks in groups.items() if any(heads[rank][1] <= due for rank in ranks)}
            ahead = {key: ranks for key, ranks in old.items() if not self._comes_later(key, ranks)}
            shown = ahead or old
        rows = self._late([rank for ranks in shown.values() for rank in ranks])
        rows.append(Row(tuple(self._pop(ranks) for ranks in shown.values())))
        missing = [rank for rank in self.ranks if rank not in heads]
        if missing:
            for group in rows[-1].groups:
                for rank in missing:
                    self._of[rank].owe((group.item.key, alike_key(group.item)))
        return rows

    def _comes_later(self, key: tuple[str, str], ranks: list[int]) -> bool:
        return any(self._of[rank].waiting[key] > 0 for rank in self.ranks if rank not in ranks)

    def _pop(self, ranks: list[int]) -> Group:
        items = [self._of[rank].pop() for rank in ranks]
        return Group(tuple(ranks), items[0], tuple(item.output for item in items))

    def _late(self, ranks: Sequence[int]) -> list[Row]:
        """Rows that say how much these ranks showed after the others, ranks with equal counts together."""
        counts: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            mine = self._of[rank]
            if mine.late:
                counts.setdefault((len(mine.late), mine.alike), []).append(rank)
        rows = [Row((Group(tuple(sorted(which)), self._of[which[0]].late[0]),), late, alike)
                for (late, alike), which in counts.items()]
        for which in counts.values():
            for rank in which:
                self._of[rank].late, self._of[rank].alike = [], 0
        return rows
