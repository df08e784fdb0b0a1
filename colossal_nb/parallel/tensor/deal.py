"""Dealing features to ranks, by which of them depend on which: heads and groups stay together, and need no name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from colossal_nb.parallel.tensor.values import Parts, even_parts

LEVELS = 6  # kinds of features (by reach and column) that are combined when some must be copied


@dataclass(frozen=True)
class Deal:
    """Which rank gets which features: of the row's input, of all columns' outputs counted through.

    kinds: of how many sizes, and made of how many sets of columns, the groups are. copied: some features of the columns
    are on several ranks, so that the others fall apart.
    """

    row_parts: Parts
    column_parts: Parts
    groups: int
    kinds: int = 1
    copied: bool = False


class NotDealtError(Exception):
    """These features stay whole; the text says why."""


class DoesNotDivideError(Exception):
    """Equal groups of several features (heads) cannot be dealt to the ranks; another number of ranks can."""


class Dealer:
    """The connected components of `reached`, which stay together, ready to be dealt to any number of ranks.

    reached: (row's input features, columns' output features) bool. owners: the column of each of the latter. Every
    rank gets its share of every kind of group, by size and by the columns that it is made of.
    """

    def __init__(self, reached: Tensor, owners: Tensor) -> None:
        self.reached, self.owners = reached, owners
        self.labels = _components(reached)
        self.kinds = self._kinds(self.labels)
        self.groups = sum(len(kind) for kind in self.kinds)
        self.sizes = [int((self.labels == kind[0]).sum()) for kind in self.kinds]

    def deal(self, ranks: int) -> Deal:
        """Whole groups for every rank.

        Fewer groups than ranks (multi-query attention, few key/value heads): features that reach far are copied, so
        that the others fall apart; of these ways the one that copies least. Raises NotDealtError, DoesNotDivideError.
        """
        equal = len(set(self.sizes)) == 1
        if equal and self.sizes[0] == 1 and self.groups < ranks:
            raise NotDealtError(f"{self.groups} features cannot be dealt to {ranks} ranks")
        if self._divides(ranks):
            return self._dealt(self.labels, self.kinds, ranks)
        copied = self._least_copies(ranks) if ranks % self.groups == 0 else None
        if copied is not None:
            return copied
        if self.groups == 1:
            raise NotDealtError("everything depends on everything: something there mixes all features")
        if not equal:
            raise NotDealtError(f"the {self.groups} independent groups are of unequal size")
        raise DoesNotDivideError

    def _divides(self, ranks: int) -> bool:
        """Single features may be one more on some ranks; of larger groups all have equally many."""
        return all(size == 1 or len(kind) % ranks == 0 for kind, size in zip(self.kinds, self.sizes, strict=True))

    def _kinds(self, labels: Tensor) -> list[Tensor]:
        """The labels of the groups, sorted by size and by the columns that reach them."""
        groups, places, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        columns = torch.stack([self.reached[:, self.owners == owner].any(1) for owner in torch.unique(self.owners)], 1)
        counts = torch.zeros(len(groups), columns.shape[1], dtype=torch.int64)
        made_of = counts.index_add_(0, places, columns.long()) > 0
        keys = torch.cat((sizes.unsqueeze(1), made_of), dim=1)
        _, kinds = torch.unique(keys, dim=0, return_inverse=True)
        return [groups[kinds == kind] for kind in range(int(kinds.max()) + 1)]

    def _least_copies(self, ranks: int) -> Deal | None:
        ways = [(labels, kinds) for labels, kinds in self._ways if all(len(kind) % ranks == 0 for kind in kinds)]
        best = min((self._dealt(labels, kinds, ranks) for labels, kinds in ways), key=_held, default=None)
        if best is None or _held(best) > 0.9 * ranks * int(self.reached.any(0).sum()):
            return None  # nearly everything would be copied: nothing to gain
        return best

    @cached_property
    def _ways(self) -> list[tuple[Tensor, list[Tensor]]]:
        """(labels, kinds) where the groups are equal once features of some reach and column are copied."""
        return list(self._fallen_apart())

    def _fallen_apart(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        fan = self.reached.sum(0)
        levels = sorted({level for level in zip(fan.tolist(), self.owners.tolist(), strict=True) if level[0]})[:LEVELS]
        for count in range(1, len(levels) + 1):
            for chosen in combinations(levels, count):
                keep = torch.stack([(fan == reach_of) & (self.owners == owner) for reach_of, owner in chosen]).any(0)
                labels = _components(self.reached[:, keep])
                sizes = torch.unique(labels, return_counts=True)[1]
                if bool((sizes == sizes[0]).all()):
                    yield labels, self._kinds(labels)

    def _dealt(self, labels: Tensor, kinds: list[Tensor], ranks: int) -> Deal:
        """An equal share of each kind; what remains of one kind goes to the ranks after those that have more."""
        nowhere = ~self.reached.any(0)
        shares: list[list[Tensor]] = [[] for _ in range(ranks)]
        first = 0
        for kind in kinds:
            for number, part in enumerate(even_parts(len(kind), ranks)):
                shares[(first + number) % ranks].append(kind[list(part)])
            first += len(kind)
        row_parts, column_parts = [], []
        for share in shares:
            mine = torch.isin(labels, torch.cat(share))
            row_parts.append(tuple(mine.nonzero().flatten().tolist()))
            column_parts.append(tuple((self.reached[mine].any(0) | nowhere).nonzero().flatten().tolist()))
        count = sum(len(kind) for kind in kinds)
        return Deal(tuple(row_parts), tuple(column_parts), count, len(kinds), labels is not self.labels)


def _held(dealt: Deal) -> int:
    """Features of the columns on all ranks together."""
    return sum(len(part) for part in dealt.column_parts)


def _components(reached: Tensor) -> Tensor:
    """A label per row of `reached`, equal for rows that hang together through columns; labels are row numbers."""
    labels = torch.arange(reached.shape[0])
    joining = reached[:, reached.sum(0) > 1]
    if joining.shape[1]:
        for column in torch.unique(joining, dim=1).T:
            members = torch.unique(labels[column])
            if len(members) > 1:
                labels[torch.isin(labels, members)] = members.min()
    return labels
