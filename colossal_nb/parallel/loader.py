"""Global batches of a dataset, of which each rank reads the part that it uses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.unread import Unread
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as, whole_number

_KEY = 1_000_003  # apart from small seeds that programs take
_MOST_SEED = 2**40


@called_as("cnb.loader(dataset, batch_size=64, shuffle=True)")
def loader(
    dataset: Any,
    batch_size: int,
    shuffle: bool = False,
    seed: int = 0,
    *,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Any = None,
) -> Loader:
    """Batches of `batch_size` samples of a dataset with `len` and `[index]`: the same global batches on every rank.

    Each rank reads only the samples that it uses: those of its replica in `forward_backward` and `model(x)`, all of
    them where the program looks into a batch itself. The order depends on `seed` and epoch alone, as do random numbers
    drawn inside `dataset[index]`. `num_workers` processes read ahead. With a `collate_fn` of your own, and for samples
    that hold more than numbers and tensors, whole batches are read.

    Raises ValueError for a dataset without length or index, or sizes below 1.
    """
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, IterableDataset | Mapping | type):
        raise ValueError(
            f"loader takes a dataset with len() and [index], not {_named(dataset)}: ranks read different "
            "samples of it, so it must be able to give any of them. list(dataset) makes one, if it fits into memory"
        )
    batch_size = whole_number("batch_size", batch_size, least=1)
    num_workers = whole_number("num_workers", num_workers, least=0)
    seed = whole_number("seed", seed, -_MOST_SEED, _MOST_SEED)
    if collate_fn is not None and not callable(collate_fn):
        raise ValueError(f"collate_fn makes a batch of a list of samples; {type(collate_fn).__name__} is no function")
    if not len(dataset) or (drop_last and len(dataset) < batch_size):
        raise ValueError(f"no batch of {batch_size} in a dataset of {len(dataset)} samples")
    return Loader(dataset, batch_size, shuffle, seed, drop_last, num_workers, collate_fn)


def _named(dataset: Any) -> str:
    return f"the class {dataset.__name__}" if isinstance(dataset, type) else type(dataset).__name__


class Loader:
    """An iterable of batches. Each `for` over it is an epoch; a `break` ends its epoch.

    `reads` counts the samples that this process asked the dataset for. `state_dict()` is the position: a loader that
    loads it goes on with the batch after the last one taken, after the last of an epoch with the next epoch.
    """

    def __init__(
        self, dataset: Any, batch_size: int, shuffle: bool, seed: int, drop_last: bool, num_workers: int, collate: Any
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.num_workers, self.collate_fn = drop_last, num_workers, collate
        self.reads = 0
        self._epoch, self._taken = 0, 0
        self._going_on = True  # the next `for` begins at the position, not at a new epoch
        self._used: list[tuple[int, int]] = []  # the rows of the last batch that this rank used
        self._habit: list[tuple[int, int]] = []  # those of two batches in a row

    def __len__(self) -> int:
        count, rest = divmod(len(self.dataset), self.batch_size)
        return count + (rest > 0 and not self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": self._taken, "seed": self.seed, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position. Raises ValueError where seed or batch size differ: the batches would be others."""
        own = {"seed": self.seed, "batch_size": self.batch_size}
        other = {name: state.get(name) for name in own}
        if other != own:
            raise ValueError(f"the position is one of a loader with {other}, this one has {own}")
        self._epoch, self._taken, self._going_on = int(state["epoch"]), int(state["batches"]), True
        if self._taken >= len(self):  # saved inside the loop, after its last batch
            self._epoch, self._taken = self._epoch + 1, 0

    def __iter__(self) -> Iterator[Any]:
        if not self._going_on:
            self._epoch, self._taken = self._epoch + 1, 0
        self._going_on = False
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        order = self._order()
        ahead: Iterator[tuple[list[int], list[Any]]] | None = None
        while self._taken < len(self):
            number = self._taken
            batch = _Batch(self, order[number * self.batch_size : (number + 1) * self.batch_size].tolist())
            if ahead is None and self.num_workers and (self._habit or not self._in_parts):
                ahead = self._read_ahead(order, number)
            if ahead is not None:
                batch.keep(*next(ahead))
            self._taken += 1
            yield batch.tree() if self._in_parts else batch.whole()
            if batch.used == self._used:
                self._habit = self._used
            self._used = batch.used
        self._epoch, self._taken, self._going_on = self._epoch + 1, 0, True

    @property
    def _in_parts(self) -> bool:
        return World.current().world_size > 1 and self.collate_fn is None

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        generator = torch.Generator().manual_seed(self.seed * _KEY + self._epoch)
        return torch.randperm(len(self.dataset), generator=generator)

    def _rows_used(self, batch: _Batch) -> list[int]:
        """The rows that this rank will want, if it does with this batch what it did with others."""
        count = len(batch.indices)
        spans = self._habit if self._in_parts else [(0, count)]
        return [row for start, stop in spans for row in range(start, min(stop, count))]

    def _read_ahead(self, order: Tensor, first: int) -> Iterator[tuple[list[int], list[Any]]]:
        """Rows and samples of the batches from `first` on, as far as they are like those used last."""
        rows, wanted = [], []
        for number in range(first, len(self)):
            batch = _Batch(self, order[number * self.batch_size : (number + 1) * self.batch_size].tolist())
            rows.append(self._rows_used(batch))
            wanted.append([(self._epoch, batch.indices[row]) for row in rows[-1]])
        keyed = _Keyed(self.dataset, self.seed)
        ready = DataLoader(keyed, batch_sampler=wanted, num_workers=self.num_workers, collate_fn=list)
        return zip(rows, ready, strict=True)

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Samples of the dataset, read now in this process."""
        self.reads += len(indices)
        keyed = _Keyed(self.dataset, self.seed)
        return [keyed[self._epoch, index] for index in indices]


class _Keyed(Dataset[Any]):
    """The dataset, random numbers inside it keyed by (seed, epoch, index): whoever reads a sample reads the same."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with _seeded(hash((self._seed, epoch, index)) % 2**32):
            return self._dataset[index]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, torch's, NumPy's and Python's random numbers begin at a seed; outside they go on as if nothing was."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class _Batch:
    """The samples of one batch, read as far as they were used."""

    def __init__(self, source: Loader, indices: list[int]) -> None:
        self._source, self.indices = source, indices
        self._samples: dict[int, Any] = {}
        self._epoch = source._epoch
        self.used: list[tuple[int, int]] = []
        self._joined: dict[tuple[int, int], list[Tensor]] = {}

    def keep(self, rows: list[int], samples: list[Any]) -> None:
        """These rows have been read already."""
        self._samples.update(zip(rows, samples, strict=True))
        self._source.reads += len(rows)

    def _read(self, start: int, stop: int) -> list[Any]:
        missing = [row for row in range(start, stop) if row not in self._samples]
        found = self._source.read([self.indices[row] for row in missing])
        self._samples.update(zip(missing, found, strict=True))
        return [self._samples[row] for row in range(start, stop)]

    def whole(self) -> Any:
        """The batch as a sequential program knows it."""
        return (self._source.collate_fn or default_collate)(self._read(0, len(self.indices)))

    def tree(self) -> Any:
        """The batch with its tensors unread, as far as its samples are made of numbers and tensors."""
        usual = self._source._habit or self._source._used
        row = min(usual[0][0], len(self.indices) - 1) if usual else 0
        one = default_collate(self._read(row, row + 1))
        if not _only_tensors(one):
            return self.whole()
        numbers = iter(range(len(leaves(one))))
        return rebuild(one, lambda leaf: self._unread(leaf, next(numbers)))

    def _unread(self, leaf: Tensor, number: int) -> Unread:
        shape = (len(self.indices), *leaf.shape[1:])
        origin = f"{self._source.seed}/{self._epoch}/{self.indices}/{number}"
        return Unread(lambda start, stop: self._leaf(number, start, stop), shape, leaf.dtype, origin)

    def _leaf(self, number: int, start: int, stop: int) -> Tensor:
        if (start, stop) not in self._joined:
            self.used.append((start, stop))
            self._joined[start, stop] = leaves(default_collate(self._read(start, stop)))
        return self._joined[start, stop][number]


def _only_tensors(collated: Any) -> bool:
    """Whether every leaf of a collated sample is a tensor (texts stay lists of the batch's length)."""
    if isinstance(collated, Tensor):
        return True
    if isinstance(collated, dict):
        return all(_only_tensors(each) for each in collated.values())
    return isinstance(collated, tuple | list) and all(_only_tensors(each) for each in collated)
