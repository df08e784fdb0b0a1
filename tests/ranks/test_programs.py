"""Programs as people write them give the same numbers under every strategy as on one device."""

import traceback
from functools import cache
from typing import Any

import programs
import pytest
import torch
from programs import (
    autocast,
    batch_norms,
    evaluation,
    freezing,
    hooks,
    losses,
    optimizers,
    schedules,
    transformers_models,
    two_models,
)  # fmt: skip

pytestmark = pytest.mark.ranks

STRATEGIES = [
    (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2"), (4, "tp=2 pp=2 schedule=gpipe"), (8, "dp=2 tp=2 pp=2")
]  # fmt: skip
Cell = tuple[str, Any, str]  # group, program, model
ONLY = {**freezing.ONLY, **hooks.ONLY, **evaluation.ONLY, **losses.ONLY}
EVERY: list[Cell] = [
    (module.__name__.rpartition(".")[2], program, kind)
    for kind in ("gpt", "llama", "bert", "vit")
    for module in (schedules, optimizers, freezing, hooks, evaluation, losses, two_models)
    for program in module.PROGRAMS
    if kind in ONLY.get(program, kind)
]
# Where what is asked may depend on how a model is built.
OTHERS = [
    schedules.clip_norm, freezing.frozen_beginning, freezing.thawed_stage, hooks.forward_hooks_change,
    hooks.parameter_hooks, evaluation.averaged_model, losses.data_loader,
]  # fmt: skip
# On eight ranks, where nothing new meets, one of each kind.
ON_EIGHT = [
    schedules.clip_norm, schedules.accumulate_by_repeating, optimizers.state_goes_back, freezing.unfrozen_later,
    freezing.tied, freezing.lora_of_linears, hooks.parameter_hooks, evaluation.ema_shadow, losses.outputs_returned,
]  # fmt: skip
# What is refused by one sentence: under which axes, and the words of it.
REFUSED = {
    losses.loop_by_hand: ("pp", "with pp=2 the output of model(x) lies on the last stage"),
    optimizers.of_whole_matrices: ("tp", "Muon makes each whole matrix orthogonal, so it cannot run under tp: take"),
    optimizers.of_whole_matrices_made_afterwards: ("tp", "Muon makes each whole matrix orthogonal"),
    optimizers.line_search: ("tp pp", "LBFGS searches along a direction made of all parameters at once, so it cannot"),
    losses.trained_by_hand: ("pp", "with pp=2 the output of model(x) lies on the last stage"),
    hooks.backward_hook_around_blocks: ("pp", "a full backward hook is on blocks, whose parts are dealt to the stages"),
}


def visit(cells: tuple[Cell, ...], strategy: str, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Every program of a group on one rank, one after another; a sentence for what was refused."""
    outcomes = []
    for _, program, kind in cells:
        try:
            outcomes.append(programs.run(program, kind, strategy, dtype))
        except Exception as error:
            where = traceback.format_exc()
            outcomes.append(programs.Outcome(refused=f"{type(error).__name__}: {error}\n{where}"))
    return outcomes


def is_long(count: int, strategy: str, cell: Cell) -> bool:
    """Whether a cell is left to `pytest -m long`, which runs every program on every model under every strategy.

    On four ranks each product of two axes takes another third of the programs.
    """
    _, program, kind = cell
    if kind != "gpt":
        return count == 8 or program not in OTHERS
    if count == 4 and program not in ON_EIGHT:
        return EVERY.index(cell) % 3 != [each for _, each in STRATEGIES].index(strategy) % 3
    return count == 8 and program not in ON_EIGHT


def beside(count: int, strategy: str, cell: Cell) -> tuple[Cell, ...]:
    """The cells that are run in one visit with this one."""
    own = cell[0], cell[2], is_long(count, strategy, cell)
    return tuple(each for each in EVERY if (each[0], each[2], is_long(count, strategy, each)) == own)


@cache
def visited(
    ranks: Any, cells: tuple[Cell, ...], count: int, strategy: str, dtype: torch.dtype = torch.float64
) -> list[list[Any]]:
    """Per program what each rank found; one visit for all programs of a group, whose ranks stay warm."""
    results = ranks(count).run(visit, cells, strategy, dtype, limit_s=600)
    return list(zip(*results, strict=True))


@cache
def sequential(program: Any, kind: str, dtype: torch.dtype = torch.float64) -> Any:
    return programs.run(program, kind, programs.Plain(), dtype)


def parameters(count: int, strategy: str, cell: Cell) -> Any:
    name = f"{strategy}: {cell[1].__name__} {cell[2]}"
    marks = [pytest.mark.long] if is_long(count, strategy, cell) else []
    return pytest.param(count, strategy, cell, id=name, marks=marks)


# A model in another one's loss is refused where the loss is, on the last stage alone: see test_two_models.
NOT_UNDER_PP = two_models.PROGRAMS
TABLE = [
    parameters(count, strategy, cell)
    for count, strategy in STRATEGIES
    for cell in EVERY
    if "pp" not in strategy or cell[1] not in NOT_UNDER_PP
]


@pytest.mark.parametrize(("count", "strategy", "cell"), TABLE)
def test_equal_to_sequential(ranks: Any, count: int, strategy: str, cell: Cell) -> None:
    _, program, kind = cell
    cells = beside(count, strategy, cell)
    outcomes = visited(ranks, cells, count, strategy)[cells.index(cell)]
    axes, words = REFUSED.get(program, ("none", ""))
    if any(axis in strategy for axis in axes.split()):
        assert all(words in found.refused for found in outcomes)
        return
    expected = sequential(program, kind)
    for found in outcomes:
        assert not found.refused, found.refused
        assert programs.differences(found, expected, torch.float64) == []
    for other in outcomes[1:]:
        assert [repr(shown) for shown in other.shown] == [repr(shown) for shown in outcomes[0].shown]


@pytest.mark.parametrize("program", transformers_models.PROGRAMS, ids=lambda program: program.__name__)
def test_models_of_transformers(ranks: Any, program: Any) -> None:
    """Under dp, in the accuracy of fp32, which their losses have."""
    pytest.importorskip("transformers")
    cells = [("transformers_models", each, "gpt") for each in transformers_models.PROGRAMS]
    number, expected = transformers_models.PROGRAMS.index(program), sequential(program, "gpt")
    for found in visited(ranks, tuple(cells), 2, "dp=2")[number]:
        assert not found.refused, found.refused
        assert programs.differences(found, expected, torch.float32) == []


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(("count", "strategy"), STRATEGIES, ids=[strategy for _, strategy in STRATEGIES])
def test_under_autocast(ranks: Any, count: int, strategy: str, kind: str) -> None:
    """bf16 by torch.autocast is near to bf16 on one device: losses within 2e-2, gradients by their angle."""
    cells = tuple(("autocast", program, kind) for program in autocast.PROGRAMS)
    for (_, program, _), outcomes in zip(cells, visited(ranks, cells, count, strategy, torch.float32), strict=True):
        expected = sequential(program, kind, torch.float32)
        for found in outcomes:
            assert not found.refused, found.refused
            assert autocast.outside(found, expected) == [], program.__name__


WITH_STATISTICS = [  # parts of a batch on one rank, and of `model(x)`
    (2, "dp=2", 2, 2), (2, "dp=2 microbatches=2 recompute=full", 4, 2), (2, "tp=2", 1, 1), (4, "dp=2 tp=2", 2, 2),
    (4, "dp=2 pp=2", 4, 2),
]  # fmt: skip


@pytest.mark.parametrize(("count", "strategy", "parts", "replicas"), WITH_STATISTICS)
def test_running_statistics_are_those_of_one_rank(
    ranks: Any, count: int, strategy: str, parts: int, replicas: int
) -> None:
    """That runs the same parts one after another; equal bits on all ranks, also what is evaluated with them."""
    under_pp = (batch_norms.skipping, batch_norms.plain_loop)
    chosen = [each for each in batch_norms.PROGRAMS if "pp" not in strategy or each not in under_pp]
    cells = tuple(("batch_norms", program, "vit") for program in chosen)
    for (_, program, kind), outcomes in zip(cells, visited(ranks, cells, count, strategy), strict=True):
        expected = programs.run(program, kind, programs.InParts(parts, replicas))
        for found in outcomes:
            assert not found.refused, found.refused
            assert programs.differences(found, expected, torch.float64) == [], program.__name__
        for other in outcomes[1:]:
            assert [repr(shown) for shown in other.shown] == [repr(shown) for shown in outcomes[0].shown]
