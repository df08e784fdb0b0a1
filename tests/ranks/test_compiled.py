"""torch.compile: one rank runs it, several refuse it by name at once, whenever it came."""

from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, gpt, loss_fn
from torch import nn

import colossal_nb as cnb

pytestmark = pytest.mark.ranks


def _block(model: nn.Module) -> nn.Module:
    model.blocks[0].compile()
    return model


def _assigned(model: nn.Module) -> nn.Module:
    model.blocks[1] = torch.compile(model.blocks[1])
    return model


def _itself(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def _whole(model: nn.Module) -> nn.Module:
    return torch.compile(model)


WAYS = {_block: "blocks.0", _assigned: "blocks.1", _itself: "GPT", _whole: "OptimizedModule"}


def refused(strategy: str) -> list[tuple[str, str, str]]:
    """What parallelize says, what a step and a plain call say when the model was compiled afterwards."""
    found = []
    for way in WAYS:
        said = []
        with pytest.raises(ValueError) as error:
            cnb.parallelize(way(gpt()), strategy=strategy)
        said.append(str(error.value))
        model = way(cnb.parallelize(gpt(), strategy=strategy))
        with pytest.raises(ValueError) as error:
            cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
        said.append(str(error.value))
        with torch.no_grad(), pytest.raises(ValueError) as error:
            model(INPUTS)
        said.append(str(error.value))
        found.append(tuple(said))
    return found


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_several_ranks_refuse_it_by_name(ranks: Any, strategy: str) -> None:
    for found in ranks(2).run(refused, strategy):
        for (before, step, call), name in zip(found, WAYS.values(), strict=True):
            assert before.startswith(f"torch.compile is on {name}")
            assert step.startswith(f"torch.compile is on {name}") or "compiled after parallelize" in step
            assert "torch.compile" in call


def alone(compiles: bool) -> list[float]:
    model = gpt()
    if compiles:
        model.blocks[0].compile(backend="eager")
    model = cnb.parallelize(model, strategy="dp=1")
    return [cnb.forward_backward(model, loss_fn, INPUTS, TARGETS).item()]


def test_one_rank_runs_it() -> None:
    assert alone(True) == pytest.approx(alone(False), rel=1e-10)
