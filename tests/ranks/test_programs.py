"""Programs as people write them give the same numbers under every strategy as on one device."""

import traceback
from functools import cache
from typing import Any

import programs
import pytest
import torch
from programs import evaluation, freezing, hooks, losses, optimizers, schedules

pytestmark = pytest.mark.ranks

STRATEGIES = [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2"), (4, "tp=2 pp=2"), (8, "dp=2 tp=2 pp=2")]
GROUPS = {
    "schedules": schedules, "optimizers": optimizers, "freezing": freezing, "hooks": hooks, "evaluation": evaluation,
    "losses": losses,
}  # fmt: skip
CELLS = [(name, program, "gpt") for name, module in GROUPS.items() for program in module.PROGRAMS]
# What is refused by one sentence: the words of it, and the axes under which.
REFUSED = {losses.loop_by_hand: ("pp", "with pp=2 the output of model(x) lies on the last stage")}


def visit(cells: list[tuple[str, Any, str]], strategy: str) -> list[Any]:
    """Every program of a group on one rank, one after another; a sentence for what was refused."""
    outcomes = []
    for _, program, kind in cells:
        try:
            outcomes.append(programs.run(program, kind, strategy))
        except Exception as error:
            where = traceback.format_exc()
            outcomes.append(programs.Outcome(refused=f"{type(error).__name__}: {error}\n{where}"))
    return outcomes


@cache
def visited(ranks: Any, group: str, count: int, strategy: str) -> list[list[Any]]:
    """Per program what each rank found; one visit for all programs of a group, whose ranks stay warm."""
    cells = [cell for cell in CELLS if cell[0] == group]
    results = ranks(count).run(visit, cells, strategy, limit_s=600)
    return list(zip(*results, strict=True))


@cache
def sequential(program: Any, kind: str) -> Any:
    return programs.run(program, kind, None)


@pytest.mark.parametrize(("count", "strategy"), STRATEGIES)
@pytest.mark.parametrize(("group", "program", "kind"), CELLS, ids=[f"{p.__name__}-{kind}" for _, p, kind in CELLS])
def test_equal_to_sequential(ranks: Any, count: int, strategy: str, group: str, program: Any, kind: str) -> None:
    index = [cell for cell in CELLS if cell[0] == group].index((group, program, kind))
    outcomes = visited(ranks, group, count, strategy)[index]
    expected = sequential(program, kind)
    axis, words = REFUSED.get(program, ("no axis", ""))
    if axis in strategy:
        assert all(words in found.refused for found in outcomes)
        return
    for found in outcomes:
        assert not found.refused, found.refused
        assert programs.differences(found, expected, torch.float64) == []
    for other in outcomes[1:]:
        assert [repr(shown) for shown in other.shown] == [repr(shown) for shown in outcomes[0].shown]
