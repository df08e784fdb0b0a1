"""Outputs of the whole batch put together from the parts, and the proof that the parts' losses make the whole loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import cut, move
from colossal_nb.parallel.counting import CountingMeans
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.losses import FIX, NO_COUNT, Part, part
from colossal_nb.parallel.structure import leaves, rebuild

LossFn = Callable[[Any, Any], Any]
Kept = list[tuple[int, int, Any]]  # start, stop, output of these samples

# Two orders of summation of the same losses differ by rounding alone; parts put together wrongly, by far more.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
COARSE_TOLERANCE = 1e-2
# Of gradients with respect to the outputs, as a part of the largest: rounding is relative to each element's own terms.
SLOPE_TIMES = 10
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


def compare(parallel: Parallel, loss_fn: LossFn, kept: Kept, targets: Any, samples: int) -> None:
    """Evaluate `loss_fn` on the outputs of all kept samples at once, and on those of each part; compare the losses and
    their gradients with respect to the outputs.

    Raises ValueError on all ranks alike. Runs on the last stage; random states are left as they were.
    """
    verdict = torch.zeros(7, dtype=torch.float64)
    if parallel.is_last:
        pieces = [piece for each in objects.all_gather(kept, parallel.group("dp"), "outputs") for piece in each]
        verdict[:] = torch.tensor(_differs(parallel, loss_fn, sorted(pieces, key=_start), targets, samples))
    group = parallel.group()
    if group.size > 1:
        group.run("all_reduce", [verdict], of="loss check")
    votes, plain, together, slope, odd_counts, *counts = verdict.tolist()
    if odd_counts:
        raise ValueError(NO_COUNT.format(*(count / odd_counts for count in counts)))
    if votes:
        plain, together, slope = plain / votes, together / votes, slope / votes
        dp, microbatches = parallel.strategy.dp or 1, parallel.microbatches
        raise ValueError(
            f"loss_fn gives {plain:.6g} on samples of the whole batch at once, but {together:.6g} when it is put "
            f"together from their parts (gradients differ by {slope:.1%} of the largest): it is more than a mean or a "
            f"sum over samples, and forward_backward cannot know of what: {FIX}\n"
            "A loss that compares samples with one another (a contrastive one) needs the whole batch in one part: dp=1 "
            f"and microbatches=1, as under tp alone; here dp={dp} and microbatches={microbatches} cut it into "
            f"{dp * microbatches} parts"
        )


def _start(piece: tuple[int, int, Any]) -> int:
    return piece[0]


@dataclass(frozen=True)
class _Evaluated:
    """A loss put together from pieces, its gradient with respect to the outputs, the difference that is rounding.

    `broken`: a count is no whole number.
    """

    loss: float
    count: float
    broken: bool
    slopes: list[Tensor]
    tolerance: float


def _differs(
    parallel: Parallel, loss_fn: LossFn, pieces: Kept, targets: Any, samples: int
) -> tuple[float, ...]:
    """(1, plain loss, loss from the parts, difference of gradients) where more differs than rounding, else zeros; then
    (1, plain count, sum of the parts' counts) where fractions that loss_fn called counts do not add up, else zeros."""
    split = []
    for start, stop, output in pieces:
        split.append((move(output, parallel.device), cut(targets, samples, start, stop), stop - start))
    given = [(start, stop, target) for (start, stop, _), (_, target, _) in zip(pieces, split, strict=True)]
    whole = move(joined(pieces), parallel.device), joined(given), sum(count for _, _, count in split)
    plain, together = _evaluated(loss_fn, [whole]), _evaluated(loss_fn, split)
    difference = abs(plain.loss - together.loss)
    one_nan = math.isnan(plain.loss) != math.isnan(together.loss)
    slope = max(map(_slope_difference, plain.slopes, together.slopes), default=0.0)
    wrong = one_nan or difference > plain.tolerance * max(abs(plain.loss), abs(together.loss))
    wrong = wrong or slope > SLOPE_TIMES * plain.tolerance
    apart = abs(plain.count - together.count) > COARSE_TOLERANCE * max(plain.count, together.count)
    odd = apart and (plain.broken or together.broken)
    # A loss that is random by itself cannot be compared.
    if not (wrong or odd) or _evaluated(loss_fn, [whole]).loss != plain.loss:
        return (0.0,) * 7
    losses = (1.0, plain.loss, together.loss, slope) if wrong else (0.0,) * 4
    return *losses, *((1.0, plain.count, together.count) if odd else (0.0,) * 3)


def _slope_difference(plain: Tensor, together: Tensor) -> float:
    largest = plain.abs().max().item() if plain.numel() else 0.0
    if plain.shape != together.shape or not math.isfinite(largest) or not largest:
        return 0.0
    return (plain - together).abs().max().item() / largest


def _evaluated(loss_fn: LossFn, pieces: list[tuple[Any, Any, int]]) -> _Evaluated:
    """The loss of pieces (output, targets, samples)."""
    batch, parts, variables, pairs = sum(samples for _, _, samples in pieces), [], [], []
    with torch.random.fork_rng(), torch.enable_grad():
        for detached, targets, samples in pieces:
            output = rebuild(detached, lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()))
            variables.append([leaf for leaf in leaves(output) if leaf.requires_grad and leaf.dim()])
            with CountingMeans(by_hand=True) as means:
                value = loss_fn(output, targets)
            parts.append(part(value, means.taken(), samples, batch))
            pairs += [parts[-1].count] if isinstance(value, tuple | list) else []
    count = sum(one.count for one in parts) or math.nan
    slopes = [_slopes(one, inputs, count) for one, inputs in zip(parts, variables, strict=True)]
    return _Evaluated(
        math.fsum(one.sum for one in parts) / count,
        sum(pairs),
        any(not each.is_integer() for each in pairs),
        [torch.cat(column) for column in zip(*slopes, strict=True)],
        TOLERANCE.get(parts[0].dtype, COARSE_TOLERANCE),
    )


def _slopes(one: Part, inputs: list[Tensor], count: float) -> list[Tensor]:
    if not one.value.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    seed = torch.full_like(one.value, one.weight / count)
    found = torch.autograd.grad(one.value, inputs, seed, allow_unused=True)
    return [torch.zeros_like(x) if each is None else each for x, each in zip(inputs, found, strict=True)]
