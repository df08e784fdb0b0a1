"""Saved under one strategy, loaded under any other, trained on as if nothing had happened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, loss_fn, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT, Llama

pytestmark = pytest.mark.ranks
COUNT = {"dp=1": 1, "dp=2": 2, "tp=2": 2, "pp=2": 2, "dp=2 tp=2": 4, "tp=2 pp=2": 4}
BEFORE, AFTER = 3, 3
LR = 1e-3
RTOL = 1e-10  # of float64


def gpt(seed: int, tied: bool = False, dropout: float = 0.1) -> GPT:
    torch.manual_seed(seed)
    return GPT(vocab_size=29, layers=2, hidden=16, heads=4, max_length=8, dropout=dropout, tied=tied).double()


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            losses.append(cnb.forward_backward(self.model, loss_fn, INPUTS, TARGETS).item())
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step()
        return losses


def program(strategy: str | None, seed: int, tied: bool = False, kind: Any = torch.optim.AdamW) -> Run:
    """A model with two groups of parameters and a learning rate that changes in every step."""
    model = gpt(seed, tied)
    small = [p for p in model.parameters() if p.dim() == 1]
    large = [p for p in model.parameters() if p.dim() > 1]
    optimizer = kind([{"params": large}, {"params": small, "weight_decay": 0.0}], lr=LR)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.3)
    if strategy is not None:
        model, optimizer = cnb.parallelize(model, optimizer, strategy)
    return Run(model, optimizer, scheduler)


def save_and_go_on(path: Path, strategy: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    run = program(strategy, 0, tied)
    losses = run.train(BEFORE)
    cnb.save(path, run.model, run.optimizer, scheduler=run.scheduler, losses=losses, best=torch.tensor([1.5, 2.5]))
    later = run.train(AFTER)
    return later, {name: value.clone() for name, value in run.model.state_dict().items()}


def load_and_go_on(path: Path, strategy: str, tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    run = program(strategy, 7, tied)
    run.train(1)  # a place in the sequence of masks, states and gradients that must go
    extra = cnb.load(path, run.model, run.optimizer)
    run.scheduler.load_state_dict(extra["scheduler"])
    assert len(extra["losses"]) == BEFORE
    assert extra["best"].tolist() == [1.5, 2.5]
    later = run.train(AFTER)
    return later, {name: value.clone() for name, value in run.model.state_dict().items()}


def _equal(found: Tensor, expected: Tensor) -> None:
    floor = max(expected.abs().max().item(), LR * (BEFORE + AFTER))
    assert (found - expected).abs().max().item() <= RTOL * floor


@pytest.mark.parametrize(
    ("saved", "tied"), [*((strategy, False) for strategy in COUNT), ("dp=1", True), ("tp=2 pp=2", True)]
)
def test_goes_on_under_any_strategy(ranks: Any, tmp_path: Path, saved: str, tied: bool) -> None:
    expected, weights = ranks(COUNT[saved]).run(save_and_go_on, tmp_path / "run", saved, tied)[0]
    for strategy, count in COUNT.items():
        for losses, found in ranks(count).run(load_and_go_on, tmp_path / "run", strategy, tied):
            if strategy == saved:
                assert losses == expected
            _equal(torch.tensor(losses).double(), torch.tensor(expected).double())
            assert list(found) == list(weights)
            for name, value in weights.items():
                _equal(found[name], value)


def shared_heads(path: Path, strategy: str, load: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Two key/value heads on four ranks: each lies on two of them."""
    torch.manual_seed(3 if load else 0)
    model: nn.Module = Llama(vocab_size=29, layers=2, hidden=16, heads=4, kv_heads=2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    if load:
        assert cnb.load(path, model, optimizer) == {}
    else:
        train(model, optimizer, BEFORE)
        cnb.save(path, model, optimizer)
        if strategy != "dp=4":
            for other in ("dp=4", strategy):
                cnb.redistribute(model, optimizer, other)
    losses = train(model, optimizer, AFTER)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("saved", "loaded"), [("tp=4", "dp=4"), ("dp=4", "tp=4"), ("tp=4", "tp=2 pp=2")])
def test_heads_that_several_ranks_hold(ranks: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    losses, weights = ranks(4).run(shared_heads, tmp_path / "run", saved, False)[0]
    for found, values in ranks(4).run(shared_heads, tmp_path / "run", loaded, True):
        _equal(torch.tensor(found).double(), torch.tensor(losses).double())
        for name, value in weights.items():
            _equal(values[name], value)
