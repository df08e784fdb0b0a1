"""The block form of once: who goes first is a truth value that knows whether it was asked."""
from __future__ import annotations

import pytest

import colossal_nb as cnb
from colossal_nb.parallel.once import Mine


@pytest.mark.parametrize("first", [True, False])
def test_it_is_a_truth_value(first: bool) -> None:
    assert bool(Mine(first)) is first and (not Mine(first)) is not first
    assert Mine(first) == first and repr(Mine(first)) == str(first)
    assert [each for each in (Mine(first),) if each] == ([True] if first else [])


def test_it_remembers_that_somebody_looked() -> None:
    mine = Mine(True)
    assert not mine.looked
    assert mine and mine.looked


def test_alone_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with cnb.once():
        print("here")
    assert capsys.readouterr().out == "here\n"
