"""Steps in the record: a step begins at its first forward_backward and ends when optimizer.step() returns."""

from __future__ import annotations

from typing import Any

import torch

from colossal_nb.parallel import loss_scale, memory, trouble
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.world import World
from colossal_nb.record.recorder import Recorder, Token


def begin(parallel: Parallel) -> None:
    """Mark the begin of a step at its first forward_backward."""
    world = World.current()
    world.model = parallel
    world.stopping.seen()
    parallel.end_step()
    parallel.steps.entered = parallel.calls + 1
    if parallel.calls_in_step == 0:
        world.recorder.mark(parallel.step, "begin")
        if parallel.step == 0:
            world.recorder.mark(parallel.step, "metered")


def stepped(parallel: Parallel, loss: float) -> None:
    """A forward_backward is done."""
    parallel.calls += 1
    parallel.calls_in_step += 1
    parallel.loss = loss
    parallel.stepped.clear()  # their settings have been compared
    World.current().recorder.mark(parallel.step, "log", "loss", loss)


def running_step() -> int:
    """The number of the step under way in the model that ran last; 0 before any."""
    model = World.current().model
    return model.step if isinstance(model, Parallel) else 0


def watch(parallel: Parallel, optimizer: torch.optim.Optimizer) -> None:
    """Let every step() of the optimizer write its slice and end the step, and refuse torn weights.

    An update is over before the user's post-hooks run: what cuts these short leaves the weights of a whole step.
    """
    opened: list[tuple[Recorder, Token]] = []
    number = parallel.optimizers.index(optimizer)

    def close() -> None:
        while opened:
            recorder, token = opened.pop()
            recorder.end(token)

    def check(*_: Any) -> None:
        trouble.look(parallel)

    def before(*_: Any) -> None:
        close()  # of a step that an error or an interrupt has ended
        parallel.end_step()
        recorder = World.current().recorder
        opened.append((recorder, recorder.begin("optimizer")))
        parallel.steps.begin(number, optimizer)

    def over(*_: Any) -> None:
        parallel.steps.finish(number, optimizer)

    def after(*_: Any) -> None:
        parallel.steps.close(number, optimizer)
        close()
        recorder = World.current().recorder
        recorder.mark(parallel.step, "end")
        memory.stepped(parallel, optimizer)
        parallel.end_step()

    optimizer.register_step_pre_hook(check)
    loss_scale.watch(parallel, optimizer)
    optimizer.register_step_pre_hook(before)
    # The update is over before the user's post-hooks run, in which a Stop may come; torch has no way to say "first".
    first = optimizer.register_step_post_hook(over)
    optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(after)
