"""Two hundred random programs under random strategies: each is what it is on one device, or refused for a known reason.

`python tests/random_draws.py 17` prints the draw of a failure "draw 17".
"""

from collections import defaultdict
from typing import Any

import pytest
import random_draws
from random_draws import Result, difference, draw, reason

pytestmark = pytest.mark.ranks
DRAWS = 200
TOGETHER = 24  # draws times ranks in one visit
LIMIT_S = 240.0  # for a machine that does many other things


def _visits() -> list[tuple[int, list[int]]]:
    """(ranks, numbers of draws)."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number in range(DRAWS):
        numbers[draw(number).ranks].append(number)
    groups = sorted(numbers.items())
    return [(n, found[i : i + TOGETHER // n]) for n, found in groups for i in range(0, len(found), TOGETHER // n)]


def parallel(numbers: list[int]) -> list[Result]:
    return [random_draws.run(draw(number), draw(number).strategy) for number in numbers]


def alone(numbers: list[int]) -> list[Result]:
    """Dropout is keyed also on one rank: that is what the others must draw."""
    return [random_draws.run(draw(number), "") for number in numbers]


@pytest.mark.parametrize(("count", "numbers"), _visits(), ids=lambda value: str(value).replace(" ", ""))
def test_equal_to_sequential(ranks: Any, count: int, numbers: list[int]) -> None:
    found = list(zip(*ranks(count).run(parallel, numbers, limit_s=LIMIT_S), strict=True))
    dropping = [number for number in numbers if draw(number).drops]
    expected = dict(zip(dropping, ranks(1).run(alone, dropping)[0], strict=True)) if dropping else {}
    wrong = []
    for number, results in zip(numbers, found, strict=True):
        refusals = {result.refused for result in results}
        if refusals != {""}:
            wrong += [f"draw {number}: {text}" for text in refusals if not reason(text)]
            assert len(refusals) == 1, f"draw {number}: {refusals}"
            continue
        reference = expected[number] if number in expected else random_draws.run(draw(number), None)
        assert len({result.losses for result in results}) == 1, f"draw {number}: ranks differ"
        differences = {difference(result, reference, draw(number).steps) for result in results}
        wrong += [f"draw {number}: {text}" for text in differences if text]
    assert not wrong, "\n".join([*wrong, *(str(draw(int(text.split()[1][:-1]))) for text in wrong)])
