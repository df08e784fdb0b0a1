"""Tensors by global name through torch's distributed checkpoint (DCP): a file that knows no strategy.

Each rank writes, as chunks of the global tensor, what it is the first to hold; each reads what its layout asks for,
from whichever chunks that lies in. What is not consecutive in the global tensor (a rank's heads of a fused qkv) becomes
several chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _metadata_fn,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.outcome import alike, together
from colossal_nb.parallel.saving.values import dtype
from colossal_nb.plan import Layout, On, Shard

METADATA = _metadata_fn  # the file that torch's own reader of such a folder looks for; ours goes without
Runs = list[tuple[int, int, int]]
"""Of one dim: where a run of consecutive indices begins in the global tensor, where in the local one, its length."""


@dataclass(frozen=True)
class Box:
    """A block of a tensor: where it begins in the global one and in the local one, its sizes."""

    offsets: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, part: Tensor) -> Tensor:
        """The block in the local tensor."""
        return part[tuple(slice(at, at + size) for at, size in zip(self.local, self.sizes, strict=True))]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor to be written. `part`: what this rank holds of it, None where that is nothing.

    layout: None for a whole tensor that one rank writes (it alone has a `part`).
    """

    name: str
    layout: Layout | None
    part: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.part is not None
        return tuple(self.part.shape) if self.layout is None else self.layout.global_shape


def held(shape: Sequence[int], layout: Layout | None, rank: int) -> list[Box]:
    """The blocks of a tensor that a rank holds; without a layout all of it."""
    slices = tuple(range(size) for size in shape) if layout is None else layout.slices(rank)
    return [] if slices is None else _boxes([_runs(indices, frozenset()) for indices in slices])


def written(shape: Sequence[int], layout: Layout | None, rank: int) -> list[Box]:
    """Those of the blocks that no earlier rank holds too: over all ranks, every element once."""
    if layout is None:
        return held(shape, None, rank)
    place, slices = layout.mesh.coordinate(rank), layout.slices(rank)
    if slices is None:
        return []
    earlier: list[frozenset[int]] = [frozenset() for _ in slices]
    for axis, placement in zip(layout.mesh.axes, layout.placements, strict=True):
        if isinstance(placement, Shard):
            if placement.parts is not None:
                earlier[placement.dim] |= frozenset().union(*placement.parts[: place[axis]])
        elif place[axis] != (placement.coordinate if isinstance(placement, On) else 0):
            return []
    return _boxes([_runs(indices, others) for indices, others in zip(slices, earlier, strict=True)])


def _runs(indices: Sequence[int], without: frozenset[int]) -> Runs:
    if isinstance(indices, range) and not without:
        return [(indices.start, 0, len(indices))]
    runs: Runs = []
    for local, index in enumerate(indices):
        if index in without:
            continue
        start, begin, length = runs[-1] if runs else (0, 0, 0)
        if runs and (start + length, begin + length) == (index, local):
            runs[-1] = start, begin, length + 1
        else:
            runs.append((index, local, 1))
    return runs


def _boxes(runs: list[Runs]) -> list[Box]:
    return [Box(*zip(*combined, strict=True)) if combined else Box((), (), ()) for combined in product(*runs)]


class _Writing(DefaultSavePlanner):
    """DCP asks it what this rank writes, and for the data."""

    def __init__(self, pieces: Sequence[Piece], rank: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.items: list[WriteItem] = []
        self.data: dict[MetadataIndex, Tensor] = {}
        self.pause: Callable[[], None] | None = None
        for piece in pieces:
            if piece.part is not None:
                for box in written(piece.shape, piece.layout, rank):
                    if prod(box.sizes) or not prod(piece.shape):
                        self._add(piece, piece.part, box)

    def _add(self, piece: Piece, part: Tensor, box: Box) -> None:
        index = MetadataIndex(piece.name, box.offsets)
        size = torch.Size(piece.shape)
        tensor_data = TensorWriteData(box.chunk, TensorProperties(part.dtype), size)
        self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=tensor_data))
        self.data[index] = box.of(part)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if self.pause is not None:
            self.pause()
        return self.data[write_item.index].detach().contiguous()


@dataclass(frozen=True)
class Stored:
    """Where a chunk lies. DCP reads these four attributes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass
class Index:
    """What a folder holds: per tensor its dtype, its shape, its chunks."""

    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    places: dict[MetadataIndex, Stored] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Such as `json` can write."""
        return {name: self._plain(name, tensor) for name, tensor in self.tensors.items()}

    def _plain(self, name: str, tensor: TensorStorageMetadata) -> dict[str, Any]:
        chunks = []
        for chunk in tensor.chunks:
            at = self.places[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), at.relative_path, at.offset, at.length])
        kind = str(tensor.properties.dtype).removeprefix("torch.")
        return {"dtype": kind, "shape": list(tensor.size), "chunks": chunks}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Index:
        index = cls()
        for name, entry in plain.items():
            chunks = []
            for offsets, sizes, path, offset, length in entry["chunks"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                index.places[MetadataIndex(name, offsets)] = Stored(path, offset, length)
            properties = TensorProperties(dtype(entry["dtype"]))
            index.tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return index


class Job:
    """What a rank writes into a folder that exists. Made by all ranks together (collective); `write` is each one's own
    work, `finish` that of one of them, with the results of all."""

    def __init__(self, folder: Path, pieces: Sequence[Piece], group: Group, rank: int) -> None:
        self._planner, self._writer = _Writing(pieces, rank), FileSystemWriter(folder)
        self._writer.set_up_storage_writer(group.index == 0)
        own = self._planner.create_local_plan()
        plans = together(lambda: self._writer.prepare_local_plan(own), group, "save")
        mine, self._metadata = self._planner.create_global_plan(plans)
        self._plan = self._writer.prepare_global_plan(mine)[group.index]

    def copy(self) -> None:
        """Take the data as it is now: what is written is a copy, in host memory."""
        for index, value in self._planner.data.items():
            self._planner.data[index] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def write(self, pause: Callable[[], None] | None = None) -> list[WriteResult]:
        """`pause` is called before each chunk."""
        self._planner.pause = pause
        results = list(self._writer.write_data(self._plan, self._planner).wait())
        self._planner.data.clear()
        return results

    def finish(self, results: list[list[WriteResult]]) -> None:
        """Write METADATA."""
        self._writer.finish(self._metadata, results)

    def index(self, results: list[list[WriteResult]]) -> Index:
        tensors: Any = dict(self._metadata.state_dict_metadata)  # there are no other entries than tensors
        return Index(tensors, {each.index: _stored(each) for rows in results for each in rows})


def write(folder: Path, pieces: Sequence[Piece], group: Group, rank: int) -> Index:
    """Write all ranks' pieces into an existing folder. Collective; errors rise on all ranks alike."""
    job = Job(folder, pieces, group, rank)
    results = together(job.write, group, "save")
    alike(lambda: job.finish(results) if group.index == 0 else None, group, "save")
    return job.index(results)


def plain_results(results: list[WriteResult]) -> list[list[Any]]:
    """Such as `json` can write."""
    return [
        [each.index.fqn, list(each.index.offset or ()), *vars(_stored(each)).values(), each.size_in_bytes]
        for each in results
    ]


def results_of(plain: list[list[Any]]) -> list[WriteResult]:
    return [
        WriteResult(MetadataIndex(name, offsets), size, _StorageInfo(path, offset, length))
        for name, offsets, path, offset, length, _, size in plain
    ]


def _stored(result: WriteResult) -> Stored:
    at = result.storage_data
    return Stored(at.relative_path, at.offset, at.length)


class _Reading(DefaultLoadPlanner):
    """DCP asks it where in `target` a part of a box goes."""

    def __init__(self, target: Tensor, boxes: Sequence[Box]) -> None:
        super().__init__()
        self.places = {torch.Size(box.offsets): box.of(target) for box in boxes}

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        place = self.places[read_item.dest_index.offset]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, start, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """The data is where it belongs already."""


class Reader:
    """Reads tensors of a folder, one at a time: beside its target one chunk of it is in memory."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.index = index
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(Metadata(dict(index.tensors), storage_data=index.places), True)

    def into(self, target: Tensor, name: str, layout: Layout | None, rank: int) -> None:
        """Fill `target`, what a rank holds of a tensor under a layout (whole without one)."""
        stored = self.index.tensors[name]
        boxes = [box for box in held(stored.size, layout, rank) if prod(box.sizes)]
        items = create_read_items_for_chunk_list(name, stored, [box.chunk for box in boxes])
        self._reader.read_data(LoadPlan(items), _Reading(target.detach(), boxes)).wait()

    def whole(self, name: str) -> Tensor:
        """A tensor by itself, in host memory."""
        stored = self.index.tensors[name]
        target = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.into(target, name, None, 0)
        return target
