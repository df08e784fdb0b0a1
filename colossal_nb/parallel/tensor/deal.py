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

    copied: some features of the columns are on several ranks, so that the others fall apart.
    """

    row_parts: Parts
    column_parts: Parts
    groups: int
    copied: bool = False


class NotDealtError(Exception):
    """These features stay whole; the text says why."""


class DoesNotDivideError(Exception):
    """Equal groups of several features (heads) cannot be dealt to the ranks; another number of ranks can."""


class Dealer:
    """The connected components of `reached`, which stay together, ready to be dealt to any number of ranks.

    reached: (row's input features, columns' output features) bool. owners: the column of each of the latter.
    """

    def __init__(self, reached: Tensor, owners: Tensor) -> None:
        self.reached, self.owners = reached, owners
        self.labels = _components(reached)
        groups, sizes = torch.unique(self.labels, return_counts=True)
        self.groups = len(groups)
        self.is_equal = bool((sizes == sizes[0]).all())
        self.is_single = bool((sizes == 1).all())

    def deal(self, ranks: int) -> Deal:
        """Whole groups for every rank.

        Fewer groups than ranks (multi-query attention, few key/value heads): features that reach far are copied, so
        that the others fall apart; of these ways the one that copies least. Raises NotDealtError, DoesNotDivideError.
        """
        if self.is_single and self.groups < ranks:
            raise NotDealtError(f"{self.groups} features cannot be dealt to {ranks} ranks")
        if self.is_single or (self.is_equal and self.groups % ranks == 0):
            return self._dealt(self.labels, self.groups, ranks)
        copied = self._least_copies(ranks) if ranks % self.groups == 0 else None
        if copied is not None:
            return copied
        if self.groups == 1:
            raise NotDealtError("everything depends on everything: something there mixes all features")
        if not self.is_equal:
            raise NotDealtError(f"the {self.groups} independent groups are of unequal size")
        raise DoesNotDivideError

    def _least_copies(self, ranks: int) -> Deal | None:
        dealt = [self._dealt(labels, groups, ranks) for labels, groups in self._ways if groups % ranks == 0]
        best = min(dealt, key=_held, default=None)
        if best is None or _held(best) > 0.9 * ranks * int(self.reached.any(0).sum()):
            return None  # nearly everything would be copied: nothing to gain
        return best

    @cached_property
    def _ways(self) -> list[tuple[Tensor, int]]:
        """(labels, number of groups) where the groups are equal once features of some reach and column are copied."""
        return list(self._fallen_apart())

    def _fallen_apart(self) -> Iterator[tuple[Tensor, int]]:
        fan = self.reached.sum(0)
        levels = sorted({level for level in zip(fan.tolist(), self.owners.tolist(), strict=True) if level[0]})[:LEVELS]
        for count in range(1, len(levels) + 1):
            for chosen in combinations(levels, count):
                keep = torch.stack([(fan == reach_of) & (self.owners == owner) for reach_of, owner in chosen]).any(0)
                labels = _components(self.reached[:, keep])
                groups, sizes = torch.unique(labels, return_counts=True)
                if bool((sizes == sizes[0]).all()):
                    yield labels, len(groups)

    def _dealt(self, labels: Tensor, count: int, ranks: int) -> Deal:
        groups = torch.unique(labels)
        nowhere = ~self.reached.any(0)
        row_parts, column_parts = [], []
        for share in even_parts(count, ranks):
            mine = torch.isin(labels, groups[list(share)])
            row_parts.append(tuple(mine.nonzero().flatten().tolist()))
            column_parts.append(tuple((self.reached[mine].any(0) | nowhere).nonzero().flatten().tolist()))
        return Deal(tuple(row_parts), tuple(column_parts), count, labels is not self.labels)


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
