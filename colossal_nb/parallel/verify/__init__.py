"""`verify`: a parallel model's next steps against the sequential program's, on copies of both.

The sequential program runs in plain torch on the first rank: the whole weights, what `parallelize` changed taken back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from colossal_nb.parallel import hyperparameters, objects, replicas, report, trouble
from colossal_nb.parallel.handle import Parallel, require, tell, text
from colossal_nb.parallel.losses import check
from colossal_nb.parallel.outcome import alike
from colossal_nb.parallel.outputs import LossFn
from colossal_nb.parallel.outside import lent
from colossal_nb.parallel.saving import rng
from colossal_nb.parallel.step import forward_backward
from colossal_nb.parallel.tensor.proof import aside
from colossal_nb.parallel.verify import compare, hooks, room, stepping
from colossal_nb.parallel.verify.bands import band_of
from colossal_nb.parallel.verify.locate import locate
from colossal_nb.parallel.verify.result import Row, Verification
from colossal_nb.parallel.verify.sequential import Sequential, Trained, keeps_statistics, running
from colossal_nb.parallel.verify.start import start
from colossal_nb.parallel.verify.twins import WAITS, Twin, parallel_twin, sequential_twin
from colossal_nb.parallel.world import World
from colossal_nb.validation import called_as, whole_number

__all__ = ["NotSequential", "Row", "Verification", "verify"]


class NotSequential(RuntimeError):
    """The parallel program of a cell is not the sequential one; the text is the whole report."""


@called_as("report = cnb.verify(model, loss_fn, inputs, targets)")
def verify(model: nn.Module, loss_fn: LossFn | None, inputs: Any, targets: Any = None, steps: int = 3) -> Verification:
    """Compare some steps on one global batch with the sequential program: losses, gradients, updated weights.

    `model` after `parallelize`; `loss_fn`, `inputs`, `targets` as for `forward_backward`. Both programs are copies that
    begin where the model stands, with its optimizers (those given to `parallelize` and others that have stepped, their
    states too; plain SGD where there is none: the verdict says which), gradients fresh in each step; learning rates
    stay. Hooks on parameters run on both, as copies with copies of what they keep. Your own loop around it (what it
    does to gradients and weights) is not run. Model, optimizers, gradients, random states and the record are
    afterwards what they were. Compared are the losses of all steps, every gradient and running statistic of the first,
    every weight after the last, within the band of the precision: fp32 1e-5, fp64 1e-10, half precision 2e-2
    (gradients: cosine 0.999); the sequential program computes in the same precision. Collective.

    Returns a `Verification`: true where they are equal; otherwise `.cause` says where the difference begins.
    """
    steps = whole_number("steps", steps, least=1)
    parallel = require(model)
    check(loss_fn, targets)
    if not any(p.requires_grad for p in parallel.parameters.values()):
        raise ValueError(
            f"all {len(parallel.parameters)} parameters are frozen (requires_grad=False), so there is no step that "
            "could be compared: verify trains; thaw what will be trained"
        )
    trouble.settle(parallel)
    begun = time.perf_counter()
    parts = parallel.replicas * parallel.microbatches if keeps_statistics(model) else 1
    program = Sequential(loss_fn, inputs, targets, parts, parallel.calls)
    with untouched(parallel), stepping.chosen(parallel) as optimizer, lent(program.outside(parallel).values()):
        hyperparameters.require_alike(hyperparameters.known(parallel), parallel.group())
        return replace(_verify(parallel, program, steps, begun), optimizer=optimizer)


def verify_once(model: nn.Module, loss_fn: LossFn | None, inputs: Any, targets: Any) -> None:
    """What `--verify` on a cell asks for: the verdict is said when the cell ends. Raises NotSequential on all ranks
    where it is bad."""
    world = World.current()
    world.verify = False
    found = verify(model, loss_fn, inputs, targets)
    if not found:
        raise NotSequential(str(found))
    world.verified = require(model), found


def end_of_cell(whole: bool) -> None:
    """Say the verdict of the cell's `--verify`, if there is one; `whole`: the cell has run to its end.

    Then the replicas are compared first, which is collective; raises NotSequential on all ranks where the cell has torn
    them.
    """
    world = World.current()
    (parallel, found), world.verified = world.verified, None
    compares = whole and found.ran and parallel.mesh.size > 1
    apart = replicas.differing(parallel) if compares else []
    if apart:
        raise NotSequential(
            f"{found.strategy} is NOT the sequential program at the end of this cell, though {found.steps} steps of "
            f"forward_backward are: {replicas.sentence(apart)}"
        )
    tell(found.sentence)
    if compares:
        tell(
            "the rest of the cell, your own loop, is not compared with the sequential program; at its end weights and "
            "optimizer states that several ranks hold are equal"
        )
    for note in found.notes:
        tell(note)


def _verify(parallel: Parallel, program: Sequential, steps: int, begun: float) -> Verification:
    strategy = text(parallel.strategy) or "one rank"
    why = room.lacking(parallel)
    if why:
        return Verification(True, strategy, steps, program.reference, cause=why, ran=False)
    rows, said, compared = _compared(parallel, program, steps)
    where = _where(parallel, program, compared) if _computes_wrong(rows) else ""
    ordered = tuple(sorted(rows, key=lambda row: (row.ok, -row.excess)))
    ok = all(row.ok for row in rows)
    notes = (*said, *report.caveats(parallel))
    seconds = time.perf_counter() - begun
    return Verification(ok, strategy, steps, program.reference, ordered, _cause(rows, where), notes, True, seconds)


def _compared(parallel: Parallel, program: Sequential, steps: int) -> tuple[list[Row], list[str], set[Any]]:
    """Every row, notes, and what forward_backward has compared by itself. Collective."""
    twin, whole = parallel_twin(parallel), sequential_twin(parallel)
    rows, said = start(parallel, whole)
    random, others = rng.states(), program.outside(parallel)
    failures: hooks.Failures = {}
    if whole is not None:
        whole.outside = others
        hooks.attach(parallel, whole, failures)
    with lent(others.values(), "cpu"):
        expected = alike(
            lambda: Trained() if whole is None else program.train(whole, steps), parallel.group(), "verify"
        )
    rng.restore(random)
    told = expected.rate, [name for name in others if expected.gradients.get(name) is not None], failures
    rate, reached, failures = objects.broadcast(told, parallel.group(), WAITS, "verify")
    hooks.attach(parallel, twin, failures)
    twin.outside = {name: others[name] for name in reached}
    with lent(others.values()):
        found = _train(twin, program, steps, rate)
    said += hooks.note(objects.all_gather(failures, parallel.group(), "verify"))
    sides = compare.Sides(twin.parallel, twin.parameters, band_of(parallel), expected, found)
    rows += [compare.losses(sides), *compare.gradients(sides), *compare.statistics(sides), *compare.weights(sides)]
    return rows, said, twin.parallel.compared


def _computes_wrong(rows: list[Row]) -> bool:
    return not any(row.what == "start" for row in rows) and any(
        not row.ok for row in rows if row.what not in ("weight", "statistic")
    )


def _where(parallel: Parallel, program: Sequential, compared: set[Any]) -> str:
    """The module at which one more step begins to differ. Collective."""
    twin, whole = parallel_twin(parallel), sequential_twin(parallel)
    twin.parallel.compared = compared
    random = rng.states()

    def run() -> None:
        rng.restore(random)
        forward_backward(twin.model, program.loss_fn, program.inputs, program.targets)

    return locate(twin, whole, program, band_of(parallel), run)


def _cause(rows: list[Row], where: str) -> str:
    """What the difference looks like at its first place: in the start, in a forward, in the order of a backward."""
    for what in ("start", "gradient", "statistic", "weight", "loss"):
        wrong = [row for row in rows if row.what == what and not row.ok]
        if wrong:
            row = wrong[-1]
            of = {"start": f"{row.name} at the start", "loss": f"loss of {row.name}"}.get(what, f"{what} of {row.name}")
            said = f"the {of} differs by {row.difference:.1e} of its size{f': {row.evidence}' * bool(row.evidence)}"
            return f"{where}; {said}" if where and what != "start" else said
    return ""


def _train(twin: Twin, program: Sequential, steps: int, rate: float) -> Trained:
    """The parallel program. Collective."""
    done = Trained()
    optimizers = twin.optimizers or [torch.optim.SGD(twin.parameters.values(), lr=rate)]
    for step in range(steps):
        twin.zero_grad()
        loss = forward_backward(twin.model, program.loss_fn, program.inputs, program.targets)
        done.losses.append(loss.item())
        if step == 0:
            done.gradients = {n: None if p.grad is None else p.grad.clone() for n, p in twin.parameters.items()}
            done.statistics = running(twin.model)
        for optimizer in optimizers:
            optimizer.step()
    done.weights = {name: p.detach() for name, p in twin.parameters.items()}
    return done


@contextmanager
def untouched(parallel: Parallel) -> Iterator[None]:
    """What runs inside is no part of the user's run: random states, notes, the record stay as they are."""
    world = World.current()
    random, model, before = rng.states(), world.model, set(world.parallels)
    try:
        with aside(), world.ledger.aside():
            yield
    finally:
        world.model = model
        for twin in set(world.parallels) - before:
            world.parallels.discard(twin)
        rng.restore(random)
