"""Outputs of the whole batch put together from the parts, and the proof that the parts' losses make the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import move
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.losses import FIX, CountingMeans, part
from colossal_nb.parallel.structure import leaves, rebuild

Kept = list[tuple[int, int, Any]]  # start, stop, output of these samples

# Two orders of summation of the same losses differ by rounding alone; parts put together wrongly, by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
COARSE_TOLERANCE = 1e-2


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


def compare(
    parallel: Parallel, loss_fn: Callable[[Any, Any], Any], kept: Kept, targets: Any, samples: int, loss: float
) -> None:
    """Evaluate `loss_fn` on the whole batch's outputs and compare with the loss put together from the parts.

    Raises ValueError on all ranks alike. Runs once, on the last stage; random states are left as they were.
    """
    plain, tolerance = loss, 0.0
    if parallel.is_last:
        output = move(on_last_stage(parallel, kept), parallel.device)
        plain, tolerance = _plain_loss(loss_fn, output, targets, samples)
    # A nan on both sides is equal, and a loss that is random by itself cannot be compared.
    wrong = abs(plain - loss) > tolerance * max(abs(plain), abs(loss))
    if wrong and _plain_loss(loss_fn, output, targets, samples)[0] != plain:
        wrong = False
    verdict = torch.tensor([float(wrong), plain if wrong else 0.0], dtype=torch.float64)
    group = parallel.group()
    if group.size > 1:
        group.run("all_reduce", [verdict], of="loss check")
    parallel.compared = True
    votes, total = verdict.tolist()
    if votes:
        raise ValueError(
            f"loss_fn gives {total / votes:.6g} on the whole batch of {samples} samples, but {loss:.6g} when it is put "
            f"together from its parts: it averages over something that forward_backward cannot count: {FIX}"
        )


def _plain_loss(
    loss_fn: Callable[[Any, Any], Any], output: Any, targets: Any, samples: int
) -> tuple[float, float]:
    """The loss of the whole batch and the relative difference that rounding explains."""
    with torch.random.fork_rng(), torch.no_grad(), CountingMeans() as means:
        value = loss_fn(output, targets)
    one = part(value, means.counts, samples)
    count = one.count or float("nan")
    return one.sum / count, TOLERANCE.get(one.dtype, COARSE_TOLERANCE)
