"""What a loss is the mean *of*, so that parts add up to the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.counting import Seen
from colossal_nb.parallel.work import Released
from colossal_nb.validation import shown

FIX = (
    "return (sum, count) from loss_fn instead of a mean: the sum of the losses of this part and the number that the "
    "mean divides by, for example\n"
    "    return F.cross_entropy(logits, targets, reduction='sum'), (targets != -100).sum()"
)

_PAIR = (
    "a pair from loss_fn is (sum of losses, count), the number that the mean divides by. If the second is a metric (an "
    "accuracy), return the loss alone and compute it from the output: "
    "loss, output = cnb.forward_backward(model, loss_fn, inputs, targets, return_output=True)"
)
NO_COUNT = (
    "loss_fn returned (sum, count) with a count of {:.4g} for samples of the whole batch, but {:.4g} as the sum over "
    "their parts, so it is no count: " + _PAIR
)
SMALL_COUNT = "loss_fn returned a count below 1 for the whole batch, and the loss is divided by it: " + _PAIR
SMALLEST_USUAL = 0.99  # weights that add up to 1 are a count, too


@dataclass(frozen=True)
class Part:
    """The loss of `samples` samples: `value` * `weight` is its sum, which divided by `count` is its mean.

    `mixed` is the sum of all counts that means inside loss_fn divided by. `exact`: the loss is one mean or one sum and
    nothing else, so parts add up whatever the counts are. `guessed`: it is not known to be made of means, and counts
    its samples: other data may show that it is something else. `called`: what loss_fn is made of.
    """

    value: Tensor
    weight: float
    count: float
    mixed: float
    samples: int
    exact: bool = False
    guessed: bool = False
    called: frozenset[Any] = frozenset()

    @property
    def sum(self) -> float:
        return self.value.item() * self.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def backward(self, divisor: float = 1.0) -> None:
        """Add the gradients of the sum divided by `divisor`; a value without any adds none."""
        if not self.value.requires_grad:
            return
        torch.autograd.backward(self.value, torch.full_like(self.value, self.weight / divisor))

    def detached(self) -> Part:
        """The same without its graph."""
        return replace(self, value=self.value.detach())


def part(value: Any, seen: Seen, samples: int, batch: int) -> Part:
    """The sum and the count behind the loss of `samples` samples of `batch`, given what was seen at its computation.

    A loss that is one of torch's sums stays the sum over the batch: its parts add up, and their counts to one.
    Raises ValueError for what is neither a scalar nor a pair.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        total, count = _scalar(value[0]), _count(value[1])
        return Part(total, 1.0, count, count, samples, called=seen.called)
    scalar = _scalar(value)
    if not seen.means and any(value is total for total in seen.sums):
        share = samples / batch
        return Part(scalar, 1.0, share, share, samples, exact=True, called=seen.called)
    counts = [mean.count for mean in seen.means] or [float(samples)]
    exact = len(seen.means) == 1 and value is seen.means[0].value and seen.means[0].sure
    guessed = not any(value is each for each in seen.made)
    return Part(scalar, counts[0], counts[0], sum(counts), samples, exact, guessed, seen.called)


def check(loss_fn: Any, targets: Any) -> None:
    """Raises ValueError for what is no loss, and for targets that nobody could cut."""
    if isinstance(loss_fn, type):
        raise ValueError(f"loss_fn is the class {loss_fn.__name__}; an object of it is wanted: {loss_fn.__name__}()")
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(
            f"loss_fn={shown(loss_fn)} is no function: loss_fn(output, targets) returns the loss; None takes the "
            "model's own"
        )
    values = targets.values() if isinstance(targets, dict) else targets if isinstance(targets, tuple | list) else ()
    arrays = [type(each) for each in (targets, *values) if hasattr(each, "__array_interface__")]
    if arrays:
        raise ValueError(f"the targets hold a NumPy {arrays[0].__name__}; tensors are cut: torch.as_tensor(targets)")


def value_of(loss_fn: Any, output: Any, targets: Any) -> Any:
    """What `loss_fn` returns. Raises ValueError where it takes other arguments, or misses targets that nobody gave."""
    try:
        return loss_fn(output, targets)
    except Released:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            raise ValueError(f"loss_fn is called as loss_fn(output, targets), and {error}") from error
        if targets is None:
            raise ValueError(
                f"loss_fn failed ({type(error).__name__}: {error}), and it was called with targets=None, because none "
                "were given: cnb.forward_backward(model, loss_fn, inputs, targets)"
            ) from error
        raise


def own_loss(output: Any) -> Any:
    """The loss that the model computed itself: `.loss` or `["loss"]` of its output."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise ValueError(
            "loss_fn=None takes the model's own loss, but its output "
            f"({type(output).__name__}) has no .loss: pass labels in the inputs, or give a loss_fn"
        )
    return loss


def _count(value: Any) -> float:
    try:
        count = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not 0 <= count < math.inf:
        raise ValueError(f"loss_fn returned (sum, {shown(value)}): the count is one number, at least 0")
    return count


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"loss_fn must return a scalar tensor or (sum, count), not {type(value).__name__}")
    if value.numel() != 1:
        shape = list(value.shape)
        raise ValueError(f"loss_fn must return a scalar or (sum, count); it returned a tensor {shape}: {FIX}")
    return value.reshape(())
