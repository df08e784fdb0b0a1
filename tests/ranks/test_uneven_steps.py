"""A program that steps on some ranks alone: the next use that is one of all ranks says so."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(1, 0, 32).view(8, 4)


def start(strategy: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return cnb.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy)


def step(model: nn.Module, optimizer: Any, mine: bool = True) -> float:
    optimizer.zero_grad()
    loss = cnb.forward_backward(model, functional.mse_loss, X, Y)
    if mine:
        optimizer.step()
    return float(loss)


def left_out(strategy: str, path: str = "") -> tuple[str, list[float]]:
    """Rank 1 leaves out its second step; what the next use says, and the losses after `recover`."""
    model, optimizer = start(strategy)
    losses = [step(model, optimizer), step(model, optimizer, World.current().rank != 1)]
    with pytest.raises(ValueError, match="torn") as caught:
        if path:
            cnb.save(path, model, optimizer)
        else:
            step(model, optimizer)
    if "cnb.recover" in str(caught.value):
        cnb.recover(model)
        losses += [step(model, optimizer), step(model, optimizer)]
    return str(caught.value), losses


def sequential() -> list[float]:
    model, optimizer = start("")
    return [step(model, optimizer) for _ in range(4)]


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("strategy", ["dp=2 pp=2", "dp=4"])
def test_the_replica_that_is_whole_is_offered(ranks: Any, tmp_path: Any, strategy: str, saves: bool) -> None:
    for said, losses in ranks(4).run(left_out, strategy, str(tmp_path / "ck") if saves else ""):
        assert "a step ended on some ranks only: " in said and "rank 1 is at step 1" in said
        assert f"of rank{'s 2 and 3' if 'pp' in strategy else ' 0'}" in said
        assert losses == pytest.approx(sequential(), rel=1e-6)


def test_without_replicas_nothing_is_offered(ranks: Any) -> None:
    for said, _ in ranks(2).run(left_out, "tp=2 dp=1"):
        assert "rank 1 is at step 1" in said and "cnb.load" in said
