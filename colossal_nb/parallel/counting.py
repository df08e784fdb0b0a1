"""The denominators of means, seen while a loss is computed: torch's own losses, and means written by hand."""

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

from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.unread import VALUELESS
from colossal_nb.parallel.world import World
from colossal_nb.plan import Replicate


@dataclass(frozen=True)
class Mean:
    """A scalar that is a mean of `count` numbers. `sure`: by definition, not by the look of a division."""

    value: Tensor
    count: float
    sure: bool = True


@dataclass(frozen=True)
class Seen:
    """What was computed on the way to a loss: means, sums that became no mean, and `made` of means: what they, their
    negatives, multiples and sums are, with numbers that no tensor's values have gone into; and what was `called`."""

    means: tuple[Mean, ...] = ()
    sums: tuple[Tensor, ...] = ()
    made: tuple[Tensor, ...] = ()
    called: frozenset[Callable[..., Any]] = frozenset()


class CountingMeans(TorchFunctionMode):
    """Notes every mean loss of torch that is computed inside; a mean over nothing is 0, not nan.

    `by_hand`: also `x.mean()` over all elements, and a sum over all elements that is divided by something.
    """

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self._by_hand = by_hand
        self._means: list[Mean] = []
        self._sums: list[Tensor] = []
        self._made: list[Tensor] = []
        self._called: set[Callable[..., Any]] = set()
        self._read = False  # values have become plain numbers, and may be in any number from now on
        self._floored: list[tuple[Tensor, Tensor]] = []  # sums kept above zero for a division, and what they were

    def taken(self) -> Seen:
        """What was seen since the last call."""
        seen = Seen(tuple(self._means), tuple(self._sums), tuple(self._made), frozenset(self._called))
        self._means, self._sums, self._made, self._floored, self._read = [], [], [], [], False
        self._called = set()
        return seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._by_hand and func not in VALUELESS:
            self._called.add(func)
            if not World.current().elsewhere:
                _refuse_parts(args)
        if func in _RULES:
            return self._loss(func, args, kwargs)
        if self._by_hand and func in _MEANS:
            return self._mean(func, args, kwargs)
        if self._by_hand and func in _QUOTIENTS and len(args) == 2:
            return self._quotient(func, args, kwargs)
        result = func(*args, **kwargs)
        self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Whether a result is a sum again, or made of means."""
        if func in _SUMS and self._by_hand and not result.dim():
            self._sums.append(result)
        if func in _FLOORS and args and _among(args[0], self._sums):
            self._floored.append((result, args[0]))
        if func in _NEGATIONS and _among(args[0], self._sums):
            self._sums = [total for total in self._sums if total is not args[0]] + [result]
        if func in _READS and self._by_hand:
            self._read = True
        elif func in _LINEAR and self._linear(func, args, kwargs):
            self._made.append(result)

    def _linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is made of means: of one alone, of one and numbers, or a sum of several."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        others = [x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor)]
        alone = len(tensors) == 1 or func in _ADDITIONS
        return bool(tensors) and alone and all(_among(x, self._made) for x in tensors) and (
            func in _FORMS or not others or (not self._read and all(isinstance(x, int | float) for x in others))
        )

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        reduction = _reduction(given.arguments)
        if reduction not in ("mean", "batchmean"):
            result = func(*args, **kwargs)
            if reduction == "sum":
                self._sums.append(result)
            return result
        batch = reduction == "batchmean"
        count = float(given.arguments["input"].shape[0]) if batch else _RULES[func](func, given.arguments)
        if not count:
            given.arguments.update(_reduced(given.arguments, "sum"))
        return self._noted(func(*given.args, **given.kwargs), count)

    def _mean(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if result.dim() or not x.dim():
            return result
        return self._noted(result if x.numel() else x.sum(), float(x.numel()))

    def _quotient(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        above, below = args
        scalar = not isinstance(below, Tensor) or (not below.dim() and not below.requires_grad)
        if not scalar or not _among(above, self._sums):
            result = func(*args, **kwargs)
            self._follow(func, args, kwargs, result)
            return result
        below_was = next((total for floor, total in self._floored if floor is below), below)
        self._sums = [total for total in self._sums if total is not above and total is not below_was]
        count = float(below_was)
        return self._noted(func(*args, **kwargs) if float(below) else above * 1, count, sure=False)

    def _noted(self, value: Any, count: float, sure: bool = True) -> Any:
        self._means.append(Mean(value, count, sure))
        self._made.append(value)
        return value


def _refuse_parts(values: tuple[Any, ...]) -> None:
    """Raises ValueError for a weight of which this rank holds no more than a part: a loss of it would be wrong."""
    for x in values:
        layout = layout_of(x) if isinstance(x, torch.nn.Parameter) else None
        if layout is not None and not all(isinstance(placement, Replicate) for placement in layout.placements):
            raise ValueError(
                f"loss_fn reads a weight of shape {list(layout.global_shape)}, of which each rank holds a part: what "
                "it computes from that would be wrong. A penalty on weights is the weight_decay of the optimizer, or "
                "needs dp alone, under which every rank has them whole"
            )


def _among(x: Any, tensors: list[Tensor]) -> bool:
    return any(x is each for each in tensors)


_MEANS = {torch.mean, Tensor.mean}
_SUMS = {torch.sum, Tensor.sum}
_FLOORS = {torch.clamp, torch.clamp_min, Tensor.clamp, Tensor.clamp_min}
_QUOTIENTS = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
_NEGATIONS = {torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__}
_ADDITIONS = {
    torch.add, torch.sub, torch.subtract, Tensor.add, Tensor.sub, Tensor.subtract, Tensor.__add__, Tensor.__radd__,
    Tensor.__sub__, Tensor.__rsub__, Tensor.__iadd__, Tensor.__isub__,
}  # fmt: skip
_MULTIPLES = {
    torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__,
    torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__,
    Tensor.__itruediv__,
}  # fmt: skip
_FORMS = {
    torch.clone, torch.squeeze, torch.reshape, Tensor.clone, Tensor.squeeze, Tensor.reshape, Tensor.view, Tensor.float,
    Tensor.double, Tensor.to, Tensor.contiguous, Tensor.__pos__,
}  # fmt: skip
_LINEAR = _NEGATIONS | _ADDITIONS | _MULTIPLES | _FORMS
_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__index__}


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
LOSSES = frozenset(_RULES)
"""torch's loss functions that can be means."""
