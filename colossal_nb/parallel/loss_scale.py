"""The loss scale of fp16: every step asks all ranks whether their gradients are finite, and is skipped where one's are
not. Skipped means that the optimizer runs and finds no gradients: weights and states stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel.handle import Parallel, tell
from colossal_nb.parallel.outside import of_optimizers
from colossal_nb.parallel.precision import LossScale
from colossal_nb.parallel.world import World

GROWTH_STEPS = 2000
SMALLEST, LARGEST = 2.0**-24, 2.0**24
MANY = 10  # so many steps in a row are skipped for another reason than the scale


def seen(parallel: Parallel, fresh: bool) -> None:
    """A backward has left its gradients in `.grad`; `fresh`: they do not add to those of an earlier one.

    Looked at here, since clipping may hide what is not finite.
    """
    scale = parallel.precision.scale
    if scale is not None:
        scale.overflow = (scale.overflow and not fresh) or not _finite(parallel)


def watch(parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    """Let every step() of the optimizer be skipped where the gradients of some rank are not finite. Collective then."""
    curtain = _Curtain(parallel, optimizer)
    optimizer.register_step_pre_hook(curtain.before)
    optimizer.register_step_post_hook(curtain.after)


class _Curtain:
    """Hides gradients from one step of an optimizer."""

    def __init__(self, parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
        self.parallel, self.optimizer = parallel, optimizer
        self.hidden: list[tuple[Tensor, Tensor]] = []

    def before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step begins; with a closure the gradients are those that it makes."""
        self.after()  # a step that an error has ended
        if self.parallel.precision.scale is None:
            return None
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self._judge()
            return None

        def checked() -> Any:
            loss = closure()
            self._judge()
            return loss

        return (args[0], checked, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _judge(self) -> None:
        if _skips(self.parallel):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.hidden += [(p, p.grad) for p in parameters if p.grad is not None]
            for p, _ in self.hidden:
                p.grad = None

    def after(self, *_: Any) -> None:
        """The step is done."""
        for p, grad in self.hidden:
            p.grad = grad
        self.hidden = []


def _skips(parallel: Parallel) -> bool:
    """Whether the gradients that are there now must not be used. All ranks of the model get the same answer."""
    scale = parallel.precision.scale
    assert scale is not None
    if scale.open:
        row = torch.zeros(parallel.mesh.size)
        row[parallel.rank] = float(scale.overflow or not _finite(parallel))
        parallel.group().run("all_reduce", [row], of="overflow")
        scale.open = scale.overflow = False
        scale.skips = bool(row.any())
        if scale.skips:
            _overflowed(parallel, scale, row.nonzero().flatten().tolist())
        else:
            scale.good, scale.in_row = scale.good + 1, 0
            if scale.good >= GROWTH_STEPS:
                scale.value, scale.good = min(2 * scale.value, LARGEST), 0
        World.current().recorder.mark(parallel.step, "log", "loss scale", scale.value)
    return scale.skips


def _overflowed(parallel: Parallel, scale: LossScale, ranks: list[int]) -> None:
    before, scale.value = scale.value, max(scale.value / 2, SMALLEST)
    scale.good, scale.skipped, scale.in_row = 0, scale.skipped + 1, scale.in_row + 1
    World.current().recorder.mark(parallel.step, "log", "skipped", 1)
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    if scale.skipped == 1:
        tell(
            f"fp16: step {parallel.step} was skipped on all ranks, since gradients on {where} are not finite: the loss "
            f"scale goes from {before:g} to {scale.value:g}; later skips are in the record alone"
        )
    elif scale.in_row == MANY:
        tell(
            f"fp16: {MANY} steps in a row were skipped, the last with gradients of {where} that are not finite at a "
            f"loss scale of {before:g}: likely the loss itself is inf or nan (the loss was {parallel.loss:g}), or the "
            "model leaves the range of fp16 (65504): precision=bf16 has that of fp32"
        )


def _finite(parallel: Parallel) -> bool:
    trained = [*parallel.held().values(), *of_optimizers(parallel)]
    grads = [p.grad for p in trained if p.grad is not None and p.grad.numel()]
    if not grads:
        return True
    largest = torch._foreach_norm(grads, float("inf"))
    return bool(torch.isfinite(torch.stack(largest)).all())
