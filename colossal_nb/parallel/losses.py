"""What a loss is the mean *of*: the counts that torch's mean losses divide by, so that parts add up to the whole."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FIX = (
    "return (sum, count) from loss_fn instead of a mean: the sum of the losses of this part and the number that the "
    "mean divides by, for example\n"
    "    return F.cross_entropy(logits, targets, reduction='sum'), (targets != -100).sum()"
)


@dataclass(frozen=True)
class Part:
    """The loss of one part of a batch: `value` * `weight` is its sum, which divided by `count` is its mean.

    `mixed` is the sum of all counts that means inside loss_fn divided by.
    """

    value: Tensor
    weight: float
    count: float
    mixed: float

    @property
    def sum(self) -> float:
        return self.value.item() * self.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def backward(self, divisor: float = 1.0) -> None:
        """Add the gradients of the sum divided by `divisor`."""
        torch.autograd.backward(self.value, torch.full_like(self.value, self.weight / divisor))

    def detached(self) -> Part:
        """The same without its graph."""
        return Part(self.value.detach(), self.weight, self.count, self.mixed)


@dataclass(frozen=True)
class Seen:
    """What torch's losses did while a loss was computed: denominators of the means, results of the sums."""

    counts: tuple[float, ...] = ()
    sums: tuple[Tensor, ...] = ()


class CountingMeans(TorchFunctionMode):
    """Notes the denominator of every mean loss that torch computes inside; a mean over nothing is 0, not nan."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: list[float] = []
        self._sums: list[Tensor] = []

    def taken(self) -> Seen:
        """What was seen since the last call."""
        seen = Seen(tuple(self._counts), tuple(self._sums))
        self._counts, self._sums = [], []
        return seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        given = _signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        reduction = _reduction(given.arguments)
        if reduction not in ("mean", "batchmean"):
            result = func(*args, **kwargs)
            if reduction == "sum":
                self._sums.append(result)
            return result
        batch = reduction == "batchmean"
        count = float(given.arguments["input"].shape[0]) if batch else rule(func, given.arguments)
        self._counts.append(count)
        if count:
            return func(*args, **kwargs)
        given.arguments.update(_reduced(given.arguments, "sum"))
        return func(*given.args, **given.kwargs)


def part(value: Any, seen: Seen, samples: int, batch: int) -> Part:
    """The sum and the count behind the loss of `samples` samples of `batch`, given what was seen at its computation.

    A loss that is one of torch's sums stays the sum over the batch: its parts add up, and their counts to one.
    Raises ValueError for what is neither a scalar nor a pair.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        total, count = _scalar(value[0]), float(value[1])
        return Part(total, 1.0, count, count)
    scalar, counts = _scalar(value), seen.counts
    if not counts and any(value is total for total in seen.sums):
        share = samples / batch
        return Part(scalar, 1.0, share, share)
    count = counts[0] if counts else float(samples)
    return Part(scalar, count, count, sum(counts) if counts else count)


def own_loss(output: Any) -> Any:
    """The loss that the model computed itself: `.loss` or `["loss"]` of its output."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            "loss_fn=None takes the model's own loss, but its output "
            f"({type(output).__name__}) has no .loss: pass labels in the inputs, or give a loss_fn"
        )
    return loss


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"loss_fn must return a scalar tensor or (sum, count), not {type(value).__name__}")
    if value.numel() != 1:
        shape = list(value.shape)
        raise ValueError(f"loss_fn must return a scalar or (sum, count); it returned a tensor {shape}: {FIX}")
    return value.reshape(())


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _reduction(given: dict[str, Any]) -> str:
    size_average, reduce = given.get("size_average"), given.get("reduce")
    if size_average is None and reduce is None:
        return str(given["reduction"])
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _classes(func: Callable[..., Any], given: dict[str, Any]) -> float:
    """cross_entropy and nll_loss: targets that are not ignored, each with the weight of its class."""
    logits, target, weight = given["input"], given["target"], given["weight"]
    if target.is_floating_point():
        rows = logits.numel() // logits.shape[1 if logits.dim() > 1 else 0]
        return float(rows if func is functional.cross_entropy else target.numel())
    ignored = given["ignore_index"]
    kept = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
    return float(kept.sum() if weight is None else weight.detach()[target[kept]].sum(dtype=torch.float64))


def _elements(func: Callable[..., Any], given: dict[str, Any]) -> float:
    """Losses of each element: as many as the two inputs have after broadcasting."""
    target = given["target"] if "target" in given else given["input"]
    shape = torch.broadcast_shapes(given["input"].shape, target.shape)  # type: ignore[no-untyped-call]
    return float(math.prod(shape))


def _weighted(func: Callable[..., Any], given: dict[str, Any]) -> float:
    """mse_loss and l1_loss divide by the sum of the weights where there are any."""
    weight = given.get("weight")
    return _elements(func, given) if weight is None else float(weight.detach().sum(dtype=torch.float64))


def _rows(func: Callable[..., Any], given: dict[str, Any]) -> float:
    """Losses of each sample: as many as the loss has values without a reduction."""
    with torch.no_grad():
        return float(func(**given | _reduced(given, "none")).numel())


def _reduced(given: dict[str, Any], reduction: str) -> dict[str, Any]:
    """The arguments that choose a reduction, the older two included where the loss has them."""
    return {"reduction": reduction} | {name: None for name in ("size_average", "reduce") if name in given}


def _sequences(func: Callable[..., Any], given: dict[str, Any]) -> float:
    """ctc_loss: one value per sequence."""
    return float(given["target_lengths"].numel())


_RULES: dict[Callable[..., Any], Callable[[Callable[..., Any], dict[str, Any]], float]] = {
    functional.cross_entropy: _classes,
    functional.nll_loss: _classes,
    functional.mse_loss: _weighted,
    functional.l1_loss: _weighted,
    functional.ctc_loss: _sequences,
    **dict.fromkeys(
        (
            functional.binary_cross_entropy,
            functional.binary_cross_entropy_with_logits,
            functional.gaussian_nll_loss,
            functional.hinge_embedding_loss,
            functional.huber_loss,
            functional.kl_div,
            functional.poisson_nll_loss,
            functional.smooth_l1_loss,
            functional.soft_margin_loss,
        ),
        _elements,
    ),
    **dict.fromkeys(
        (
            functional.cosine_embedding_loss,
            functional.margin_ranking_loss,
            functional.multi_margin_loss,
            functional.multilabel_margin_loss,
            functional.multilabel_soft_margin_loss,
            functional.triplet_margin_loss,
            functional.triplet_margin_with_distance_loss,
        ),
        _rows,
    ),
}
if hasattr(functional, "linear_cross_entropy"):
    _RULES[functional.linear_cross_entropy] = _classes
