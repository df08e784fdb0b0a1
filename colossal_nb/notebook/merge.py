"""Lines of several ranks become one text: equal ones once, different ones side by side.

Every rank has a queue of what it printed. The heads of the queues are compared: when all ranks have one, or the
oldest has waited long enough (`HOLD_S`; longer on a machine whose ranks come late with the same), they are shown as one
*row*, grouped by equality. A head that another rank still has further back in its queue waits for it, so one additional
line on one rank does not put the ranks out of step. A line that comes after its row was shown is counted and told as
"the same", never shown twice. Each line costs a constant: 40,000 of them are no problem.
"""
from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from colossal_nb.notebook.digits import skeleton
from colossal_nb.run import Output

HOLD_S = 0.2
MOST_HOLD_S = 2.0
MOST_OWED = 20_000


class Item(NamedTuple):
    """Something one rank showed. `kind`: stdout, stderr, display, result, update, clear or bars.

    Bars are no output: they mark where a rank began to draw on the stream `text`, and are passed on in its order.
    `text` is a line without its newline, and for rich output a digest: items with equal kind and text are the same.
    """

    kind: str
    text: str
    output: Output | None = None


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


Key = tuple[str, str]
"""Kind and text of an item; a rank owes two of them, the item's and the one without digits."""
Entry = tuple[Key, Output | None, float]
"""Its key, its output and when it arrived."""


def alike_key(key: Key) -> Key:
    """Equal for lines that differ only in digits; rich output is alike only if it is the same."""
    kind, text = key
    return (f"~{kind}", skeleton(text)) if kind in ("stdout", "stderr") else key


class _Rank:
    """One rank's queue, what it owes (shown by others, not yet by it), and how many debts it paid late."""

    def __init__(self) -> None:
        self.queue: deque[Entry] = deque()
        self.waiting: dict[Key, int] = {}
        self.owed: deque[tuple[Key, Key, float]] = deque()
        self.owes: Counter[Key] = Counter()
        self.late: list[Key] = []
        self.alike = 0

    def push(self, key: Key, output: Output | None, now: float) -> None:
        self.queue.append((key, output, now))
        self.waiting[key] = self.waiting.get(key, 0) + 1

    def push_lines(self, kind: str, lines: Sequence[str], now: float) -> None:
        keys = [(kind, line) for line in lines]
        self.queue.extend([(key, None, now) for key in keys])
        waiting = self.waiting
        for key in keys:
            waiting[key] = waiting.get(key, 0) + 1

    def pop(self) -> Entry:
        entry = self.queue.popleft()
        count = self.waiting.pop(entry[0])
        if count > 1:
            self.waiting[entry[0]] = count - 1
        return entry

    def owe(self, key: Key, alike: Key, since: float) -> None:
        self.owed.append((key, alike, since))
        self.owes.update((key, alike))
        if len(self.owed) > MOST_OWED:
            self._forgive()

    def pay(self, fold: bool) -> float:
        """Take heads off the queue that others have shown already: the same, or (`fold`) but for digits the same.

        Returns by how much the latest of them came after the others'.
        """
        lag = 0.0
        while self.owed and self.queue:
            wanted = self.queue[0][0]
            if self.owes[wanted] <= 0:
                wanted = alike_key(wanted)
                if not fold or self.owes[wanted] <= 0:
                    break
                self.alike += 1
            debt = self._forgive()
            while wanted not in debt:
                debt = self._forgive()
            key, _, arrived = self.pop()
            self.late.append(key)
            lag = max(lag, arrived - debt[2])
        return lag

    def _forgive(self) -> tuple[Key, Key, float]:
        debt = self.owed.popleft()
        self.owes.subtract(debt[:2])
        return debt


class Merger:
    """Pure: `add` what arrives, `take` what can be shown by now. Times are seconds of any one clock."""

    def __init__(self, ranks: Sequence[int], fold: bool = True) -> None:
        self.ranks = tuple(sorted(ranks))
        self._fold = fold
        self._hold_s = HOLD_S
        self._of = {rank: _Rank() for rank in self.ranks}

    def add(self, rank: int, item: Item, now: float) -> None:
        if rank not in self._of:  # a rank that joined while the cell runs
            self._of[rank] = _Rank()
            self.ranks = tuple(sorted(self._of))
        self._of[rank].push(item[:2], item.output, now)

    def add_lines(self, rank: int, kind: str, lines: Sequence[str], now: float) -> None:
        """The same for many lines of a stream."""
        if lines:
            self.add(rank, Item(kind, lines[0]), now)
            self._of[rank].push_lines(kind, lines[1:], now)

    def pending(self, rank: int) -> int:
        """How many items of a rank wait to be shown."""
        return len(self._of[rank].queue) if rank in self._of else 0

    @property
    def empty(self) -> bool:
        return not any(each.queue for each in self._of.values())

    def take(self, now: float, most: int = sys.maxsize) -> list[Row]:
        """The rows that are complete or have waited long enough; about `most` of them."""
        rows: list[Row] = []
        while len(rows) < most:
            for each in self._of.values():
                if each.owed and each.queue:
                    self._learn(each.pay(self._fold))
            bars = self._bars()
            if bars:
                rows += bars
                continue
            heads = {rank: self._of[rank].queue[0] for rank in self.ranks if self._of[rank].queue}
            if not heads:
                break
            due = now
            if len(heads) < len(self.ranks):
                oldest = min(since for _, _, since in heads.values())
                if now - oldest < self._hold_s:
                    break
                due = max(oldest, now - self._hold_s)
            self._step(heads, due, rows)
        return rows

    def finish(self) -> list[Row]:
        """Everything that is left."""
        return self.take(float("inf")) + self._late(self.ranks)

    def drain(self) -> dict[int, list[Item]]:
        """Take all queues away, unmerged and without debts."""
        left = {rank: [Item(*key, output) for key, output, _ in self._of[rank].queue] for rank in self.ranks}
        self._of = {rank: _Rank() for rank in self.ranks}
        return left

    def _step(self, heads: dict[int, Entry], due: float, rows: list[Row]) -> None:
        groups: dict[Key, list[int]] = {}
        for rank, (key, _, _) in heads.items():
            groups.setdefault(key, []).append(rank)
        shown = groups if len(groups) == 1 else self._ahead(groups, heads, due)
        for ranks in shown.values():
            for rank in ranks:
                if self._of[rank].late:
                    rows += self._late([rank for ranks in shown.values() for rank in ranks])
        rows.append(Row(tuple([self._pop(ranks) for ranks in shown.values()])))
        if len(heads) < len(self.ranks):
            for key, ranks in shown.items():
                alike, since = alike_key(key) if self._fold else key, heads[ranks[0]][2]
                for rank in self.ranks:
                    if rank not in heads:
                        self._of[rank].owe(key, alike, since)

    def _bars(self) -> list[Row]:
        """Marks that have come to the head of a queue: nothing to compare, nothing to wait for."""
        reached = [rank for rank, each in self._of.items() if each.queue and each.queue[0][0][0] == "bars"]
        return [Row((Group((rank,), Item(*self._of[rank].pop()[0])),)) for rank in reached]

    def _learn(self, lag_s: float) -> None:
        """A rank came late with what others had shown: on this machine it is worth to wait a little longer."""
        if lag_s > 0:
            self._hold_s = max(self._hold_s, min(MOST_HOLD_S, 1.5 * lag_s))

    def _ahead(self, groups: dict[Key, list[int]], heads: dict[int, Entry], due: float) -> dict[Key, list[int]]:
        """The groups to show: old enough, and not still to come on another rank."""
        old = groups
        if len(heads) < len(self.ranks):
            old = {key: ranks for key, ranks in groups.items() if any(heads[rank][2] <= due for rank in ranks)}
        ahead = {key: ranks for key, ranks in old.items() if not self._comes_later(key, ranks)}
        return ahead or old

    def _comes_later(self, key: Key, ranks: list[int]) -> bool:
        return any(key in each.waiting and rank not in ranks for rank, each in self._of.items())

    def _pop(self, ranks: list[int]) -> Group:
        (kind, text), output, _ = self._of[ranks[0]].pop()
        outputs = (output,) if len(ranks) == 1 else (output, *[self._of[rank].pop()[1] for rank in ranks[1:]])
        return Group(tuple(ranks), Item(kind, text, output), outputs)

    def _late(self, ranks: Sequence[int]) -> list[Row]:
        """Rows that say how much these ranks showed after the others, ranks with equal counts together."""
        counts: dict[tuple[int, int], list[int]] = {}
        for rank in ranks:
            mine = self._of[rank]
            if mine.late:
                counts.setdefault((len(mine.late), mine.alike), []).append(rank)
        rows = [Row((Group(tuple(sorted(which)), Item(*self._of[which[0]].late[0])),), late, alike)
                for (late, alike), which in counts.items()]
        for which in counts.values():
            for rank in which:
                self._of[rank].late, self._of[rank].alike = [], 0
        return rows
