"""A model moves from strategy to strategy while it trains, and trains as one device would."""

from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import close, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.handle import find
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
STEPS = 2  # under each strategy
LR = 1e-2


def dropping(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=4, hidden=16, heads=4, max_length=8, dropout=0.1, tied=tied).double()


def travel(strategies: list[str], tied: bool, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    """Train under one strategy after the other. Ranks that a strategy leaves out wait."""
    model = dropping(tied)
    optimizer = kind(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    own = list(model.parameters())
    losses: list[float] = []
    model, optimizer = cnb.parallelize(model, optimizer, strategies[0])
    for number, strategy in enumerate(strategies):
        if number:
            moved = cnb.redistribute(model, optimizer, strategy)
            assert moved == (model, optimizer)
        parallel = find(model)
        assert parallel is not None
        if World.current().rank < parallel.mesh.size:
            losses += train(model, optimizer, STEPS)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # .grad stays for the next strategy
        for _ in range(STEPS):
            scheduler.step()
    assert all(p is q for p, q in zip(own, model.parameters(), strict=True))
    assert parallel.step == STEPS * len(strategies) or World.current().rank > 0
    cnb.redistribute(model, optimizer, "dp=1")
    weights = {} if World.current().rank else {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "weights": weights, "states": flat(model, optimizer), "groups": optimizer.param_groups}


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    return {
        f"{names[p]} {key}": value.clone()
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
        if isinstance(value, Tensor)
    }


@cache
def stayed(ranks: Any, places: int, tied: bool, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    result: dict[str, Any] = ranks(1).run(travel, ["dp=1"] * places, tied, kind)[0]
    return result


ROUTES = {
    2: [["dp=2", "tp=2", "pp=2", "dp=2"], ["pp=2", "tp=2", "dp=1", "tp=2"], ["tp=2", "dp=1", "pp=2", "dp=2"]],
    4: [
        ["tp=2 pp=2", "dp=4", "dp=1", "dp=2 tp=2"],
        ["dp=2 pp=2", "tp=4", "tp=2 pp=2", "pp=4"],
        ["dp=2 tp=2", "tp=2 pp=2", "dp=2 tp=1", "pp=4"],
    ],
}


@pytest.mark.parametrize(("count", "route"), [(count, route) for count, routes in ROUTES.items() for route in routes])
@pytest.mark.parametrize("tied", [False, True])
def test_trains_on_as_one_device_would(ranks: Any, count: int, route: list[str], tied: bool) -> None:
    outcomes, expected = ranks(count).run(travel, route, tied), stayed(ranks, len(route), tied)
    first = outcomes[0]
    close(torch.tensor(first["losses"]).double(), torch.tensor(expected["losses"]).double())
    for kind in ("weights", "states"):
        assert list(first[kind]) == list(expected[kind])
        for name, value in expected[kind].items():
            close(first[kind][name], value)
    assert [group["lr"] for group in first["groups"]] == [group["lr"] for group in expected["groups"]]
    for other in outcomes[1:]:
        assert other["states"] == {}
