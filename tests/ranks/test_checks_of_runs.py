"""What real runs record agrees with what was planned: the checks that views and lessons call, on real ranks."""

from collections import Counter
from typing import Any

import pytest
import torch
from recorded import record_of
from small_gpt import loss_fn

import colossal_nb as cnb
from colossal_nb import checks
from colossal_nb.models import GPT
from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy, schedule
from colossal_nb.record import measures
from colossal_nb.record.export import to_chrome_trace

STEPS = 3


def train(text: str) -> bytes:
    """Three steps of a small GPT on one rank; what its recorder wrote."""
    world = World.current()
    world.recorder.drain()
    world.strategy = Strategy.parse(text)
    torch.manual_seed(0)
    model: Any = GPT(vocab_size=32, layers=4, hidden=16, heads=4, max_length=16)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer)
    tokens = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        cnb.forward_backward(model, loss_fn, tokens[:, :-1], tokens[:, 1:])
        optimizer.step()
    return world.recorder.drain()


@pytest.mark.ranks
@pytest.mark.parametrize("text", ["dp=4", "tp=4", "pp=4", "tp=2 pp=2 microbatches=4", "pp=2 dp=2 schedule=gpipe"])
def test_a_run_agrees_with_its_plan(ranks, text, tmp_path):
    strategy = Strategy.parse(text).filled(4)
    record = record_of(*ranks(4).run(train, text))
    orders = schedule(strategy.schedule, strategy.pp, strategy.microbatches or 1)
    assert len(record.layouts) > 0 and len(record.slices[record.slices["group"] != ""]) > 0
    assert checks.pipeline(record, orders) == []
    assert checks.communication(record) == []
    assert checks.sharding(record) == []
    found = measures.steps(record)
    assert len(found) == STEPS and all(step.loss is not None for step in found)
    assert found[0].metered and not found[1].metered
    bubble = measures.bubble(record)
    assert (bubble is None) if strategy.pp == 1 else (0 < bubble < 1)
    kinds = Counter(record.slices["kind"].tolist())
    assert kinds["F"] == kinds["B"] == STEPS * 4 * (strategy.microbatches or 1)
    assert to_chrome_trace(record, tmp_path / "trace.json").stat().st_size > 0
