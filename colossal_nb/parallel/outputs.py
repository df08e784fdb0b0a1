"""Outputs of the whole batch put together from the parts, and the proof that the parts' losses make the whole loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import cut, move
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.losses import FIX, CountingMeans, part
from colossal_nb.parallel.structure import leaves, rebuild

LossFn = Callable[[Any, Any], Any]
Kept = list[tuple[int, int, Any]]  # start, stop, output of these samples

# Two orders of summation of the same losses differ by rounding alone; parts put together wrongly, by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
COARSE_TOLERANCE = 1e-2
# What the comparison may keep of the outputs of all parts; with larger ones it looks at the first samples of each.
PROOF_BYTES = 64 * 2**20


def on_last_stage(parallel: Parallel, kept: Kept) -> Any:
    """The output of the whole batch, on the host, on every rank of the last stage. Collective over dp."""
    every = objects.all_gather(kept, parallel.group("dp"), "outputs")
    return joined(sorted((piece for pieces in every for piece in pieces), key=lambda piece: piece[0]))


def whole(parallel: Parallel, kept: Kept) -> Any:
    """The output of the whole batch on every rank and its device. Collective."""
    output = on_last_stage(parallel, kept) if parallel.is_last else None
    stages = parallel.group("pp")
    return move(objects.broadcast(output, stages, stages.size - 1, "outputs"), parallel.device)


def joined(pieces: Kept) -> Any:
    """One output from those of consecutive samples: tensors that begin with the samples are joined along dim 0.

    A tensor that does not is taken from the first piece.
    """
    if len(pieces) == 1:
        return pieces[0][2]
    columns = list(zip(*(leaves(output) for _, _, output in pieces), strict=True))
    sizes = [stop - start for start, stop, _ in pieces]
    fresh = iter([_joined_leaf(column, sizes) for column in columns])
    return rebuild(pieces[0][2], lambda _: next(fresh))


def _joined_leaf(column: tuple[Tensor, ...], sizes: list[int]) -> Tensor:
    batched = all(leaf.dim() and leaf.shape[0] == size for leaf, size in zip(column, sizes, strict=True))
    return torch.cat(column) if batched else column[0]


def first_samples(output: Any, samples: int, parts: int) -> tuple[Any, int]:
    """As many samples of one part's output, at least one, as all parts together may keep for the comparison."""
    batched = [leaf for leaf in leaves(output) if leaf.dim() and leaf.shape[0] == samples]
    size_bytes = sum(leaf.numel() * leaf.element_size() for leaf in batched)
    count = max(1, min(samples, PROOF_BYTES * samples // (parts * size_bytes or 1)))
    return cut(output, samples, 0, count), count


def kind(loss_fn: LossFn) -> Any:
    """What functions have in common that are made anew in every step from the same lines."""
    inner = getattr(loss_fn, "func", loss_fn)  # of a functools.partial
    return getattr(getattr(inner, "__func__", inner), "__code__", type(inner))


def compare(
    parallel: Parallel, loss_fn: LossFn, kept: Kept, targets: Any, samples: int, loss: float
) -> None:
    """Evaluate `loss_fn` on the outputs of all kept samples at once and compare with what their parts give.

    Raises ValueError on all ranks alike. Runs on the last stage; random states are left as they were.
    """
    verdict = torch.zeros(3, dtype=torch.float64)
    if parallel.is_last:
        pieces = [piece for each in objects.all_gather(kept, parallel.group("dp"), "outputs") for piece in each]
        verdict[:] = torch.tensor(_differs(parallel, loss_fn, sorted(pieces, key=_start), targets, samples, loss))
    group = parallel.group()
    if group.size > 1:
        group.run("all_reduce", [verdict], of="loss check")
    votes, plain, together = verdict.tolist()
    if votes:
        raise ValueError(
            f"loss_fn gives {plain / votes:.6g} on samples of the whole batch at once, but {together / votes:.6g} when "
            f"it is put together from their parts: it averages over something that forward_backward cannot count: {FIX}"
        )


def _start(piece: tuple[int, int, Any]) -> int:
    return piece[0]


def _differs(
    parallel: Parallel, loss_fn: LossFn, pieces: Kept, targets: Any, samples: int, loss: float
) -> tuple[float, float, float]:
    """(1, plain loss, loss from the parts) where these differ by more than rounding, else zeros."""
    given = [(start, stop, cut(targets, samples, start, stop)) for start, stop, _ in pieces]
    count = sum(stop - start for start, stop, _ in pieces)
    whole = move(joined(pieces), parallel.device), joined(given), count
    plain = _loss(loss_fn, [whole])
    if count < samples:
        moved = (move(output, parallel.device) for _, _, output in pieces)
        split = [(output, target, stop - start) for output, (start, stop, target) in zip(moved, given, strict=True)]
        loss = _loss(loss_fn, split)[0]
    # A nan on both sides is equal, and a loss that is random by itself cannot be compared.
    if abs(plain[0] - loss) > plain[1] * max(abs(plain[0]), abs(loss)) and _loss(loss_fn, [whole]) == plain:
        return 1.0, plain[0], loss
    return 0.0, 0.0, 0.0


def _loss(loss_fn: LossFn, pieces: list[tuple[Any, Any, int]]) -> tuple[float, float]:
    """The loss put together from pieces (output, targets, samples), and the relative difference that is rounding."""
    parts, batch = [], sum(samples for _, _, samples in pieces)
    with torch.random.fork_rng(), torch.no_grad():
        for output, targets, samples in pieces:
            with CountingMeans() as means:
                value = loss_fn(output, targets)
            parts.append(part(value, means.taken(), samples, batch))
    count = sum(one.count for one in parts) or math.nan
    return math.fsum(one.sum for one in parts) / count, TOLERANCE.get(parts[0].dtype, COARSE_TOLERANCE)
