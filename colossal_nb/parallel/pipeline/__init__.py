"""Pipeline parallelism without editing the model: prune and prove.

One forward is recorded; its module calls are dealt to stages (`units`, `dataflow`, `cut`, `split`); each stage runs the
user's own forward, in which the calls of other stages return what was received (`stage`); before training the whole is
proved equal to the unsplit model (`proof`); a step executes a schedule (`executor`, `messages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from colossal_nb.parallel.encoders import modules_call_modules
from colossal_nb.parallel.pipeline import backward_hooks
from colossal_nb.parallel.pipeline.executor import Borders, Executor, Kept, Look, LossOf, Microbatch
from colossal_nb.parallel.pipeline.first_step import FirstStep
from colossal_nb.parallel.pipeline.messages import Mail
from colossal_nb.parallel.pipeline.proof import Proof, prove
from colossal_nb.parallel.pipeline.pruned import lay_out, prune
from colossal_nb.parallel.pipeline.report import Report, report_on
from colossal_nb.parallel.pipeline.shared import summed
from colossal_nb.parallel.pipeline.split import Split, split
from colossal_nb.parallel.pipeline.stage import Specs, Stage
from colossal_nb.parallel.trace import trace
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.schedule import schedule
from colossal_nb.plan.strategy import Strategy

__all__ = ["Pipeline", "Proof", "Report", "Split", "apply"]


def apply(
    model: nn.Module,
    mesh: Mesh,
    strategy: Strategy,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    *,
    cuts: Sequence[str] | str | None = None,
    stage_weights: Sequence[float] | None = None,
    pruned: bool = True,
) -> Pipeline:
    """Split a model over the mesh's pp axis, prove the split on the example, and prune this rank's copy.

    example: (args, kwargs) of a small batch; cuts, stage_weights: see `split.split`. With `pruned=False` the weights
    stay until `Pipeline.prune()`, for passes that need to run the whole model. Every rank does the same work, so that
    a ValueError (no such split, or one that would be wrong) rises on all of them.
    """
    args, kwargs = example
    cuts = [cuts] if isinstance(cuts, str) else cuts
    with torch.enable_grad(), modules_call_modules():
        record = trace(model, args, kwargs)
    plan = split(model, record, mesh.axis_size("pp"), cuts, stage_weights)
    called = frozenset(call.name for call in record.calls)
    del record
    proof = prove(model, plan, args, kwargs)
    lay_out(model, plan, mesh)
    pipeline = Pipeline(model, mesh, strategy.schedule, plan, proof, called)
    if pruned:
        pipeline.prune()
    return pipeline


@dataclass(eq=False)
class Pipeline:
    """A model split over pp, seen from this rank. `split` says which stage runs and holds what.

    called: the names of the modules that the recorded forward called.
    """

    model: nn.Module
    mesh: Mesh
    schedule: str
    split: Split
    proof: Proof
    called: frozenset[str]
    known: dict[Any, Specs] = field(default_factory=dict)
    epoch: int = -1
    stepped: bool = False

    def __post_init__(self) -> None:
        self.report: Report = report_on(self.model, self.split, self.proof)
        self.stage = Stage(self.model, self.split, self.number)
        self.parameters = dict(self.model.named_parameters())

    @property
    def number(self) -> int:
        """This rank's stage."""
        return self.mesh.coordinate(World.current().rank)["pp"]

    @property
    def stages(self) -> list[tuple[str, ...]]:
        """The names of the parameters that each stage holds; one held by several is named on each."""
        return [
            tuple(name for name, holders in self.split.holders.items() if stage in holders)
            for stage in range(self.split.stages)
        ]

    def prune(self) -> None:
        """Let go of the weights of other stages; they read as NaN from now on and have no gradient."""
        prune(self.model, self.split, self.number)

    def refuse_hooks(self) -> None:
        """Raise ValueError, alike on all stages, for hooks that no stage could run."""
        backward_hooks.refuse_around(self.model, self.called, self.stage.modules)

    def run_step(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf[Kept],
        borders: Borders | None = None,
        look: Look | None = None,
    ) -> list[Kept]:
        """Forward and backward of all microbatches under the schedule. Collective over pp.

        microbatches: (args, kwargs) of each, whole on every rank. On the last stage `loss_of(output, number)` returns
        the tensor to call backward on and a result to keep; returns the results in order (empty on other stages).
        `.grad` of held parameters grows by the sum of the microbatches' gradients, unscaled; those of parameters that
        several stages hold are summed over these stages. `borders(number, site)`, if given, is called with site 0 at
        the start of a forward, 2u + 1 before and 2u + 2 after unit u, so that random states can be set.
        `look`, if given, is called with the ends of the graph of each forward on other stages than the last.

        Raises RuntimeError, in the first step only, when a parameter that the proof saw trained gets no gradient.
        """
        if self.stepped or not microbatches:
            return self._run_step(microbatches, loss_of, borders, look, None)
        guard = FirstStep(self.model, self.parameters, self.proof.reached[self.number], self.called)
        with guard.watching():
            return self._run_step(microbatches, guard.seeing(loss_of), borders, look, guard)

    def _run_step(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf[Kept],
        borders: Borders | None,
        look: Look | None,
        guard: FirstStep | None,
    ) -> list[Kept]:
        orders = schedule(self.schedule, self.split.stages, len(microbatches))
        executor: Executor[Kept] = self._executor(microbatches, loss_of, borders)
        executor.look = look
        with torch.enable_grad(), summed(self.parameters, self.split.holders, self.proof.used, self.mesh):
            kept = executor.run(orders[self.number])
            if guard is not None:
                self.stepped = True
                guard.check()  # before the sums over stages, which leave no gradient out
            return kept

    def forward_only(self, microbatches: Sequence[Microbatch], borders: Borders | None = None) -> list[Any]:
        """The outputs of the microbatches on the last stage (empty on the others), without gradients. Collective.

        The whole model's own hooks run around it, not in it.
        """
        executor: Executor[Any] = self._executor(microbatches, None, borders)
        with torch.no_grad():
            outputs = [executor.evaluate(number) for number in range(len(microbatches))]
        executor.mail.settle()
        return outputs if self.stage.is_last else []

    def _executor(
        self, microbatches: Sequence[Microbatch], loss_of: LossOf[Kept] | None, borders: Borders | None
    ) -> Executor[Kept]:
        world = World.current()
        if self.epoch != world.epoch:
            # An abort may have kept shapes from a stage that the stage before counts as told.
            self.epoch = world.epoch
            self.known.clear()
        mail = Mail(self.mesh, world.device)
        return Executor(self.stage, mail, self.known, microbatches, loss_of, borders)
