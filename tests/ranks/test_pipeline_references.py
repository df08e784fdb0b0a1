"""Modules that keep their parameters in lists of their own are trained on every stage; what is not trained is named."""

from __future__ import annotations

import copy
from typing import Any

import pipeline_models as zoo
import pytest
import torch
from small_gpt import loss_fn

from colossal_nb import forward_backward, full, parallelize
from colossal_nb.parallel import pipeline
from colossal_nb.plan import Strategy


def user_training(kind: str, text: str) -> tuple[dict[str, float], set[str]]:
    """How far the weights that this rank holds are from plain training after three steps, and which of them moved."""
    model = zoo.build(kind).float()
    whole = copy.deepcopy(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, whole_optimizer = (
        torch.optim.SGD(model.parameters(), lr=1.0),
        torch.optim.SGD(whole.parameters(), lr=1.0),
    )
    model, optimizer = parallelize(model, optimizer, strategy=text)
    for step in range(3):
        inputs, targets = zoo.tokens(8)[0][0], zoo.tokens(8)[0][0]
        optimizer.zero_grad()
        forward_backward(model, loss_fn, inputs, targets)
        optimizer.step()
        whole_optimizer.zero_grad()
        loss_fn(whole(inputs), targets).backward()
        whole_optimizer.step()
        assert step or all(p.grad is not None for p in whole.parameters())
    found = {name: full(p) for name, p in model.named_parameters()}
    expected = dict(whole.named_parameters())
    difference = {name: (p - expected[name]).abs().max().item() for name, p in found.items()}
    return difference, {name for name, p in found.items() if not torch.equal(p, start[name])}


@pytest.mark.parametrize("text", ["pp=2 microbatches=2", "tp=2 pp=2 microbatches=2"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "parameters kept elsewhere", "torch encoder"])
def test_modules_that_keep_their_parameters_elsewhere_are_trained(ranks: Any, kind: str, text: str) -> None:
    names = {name for name, _ in zoo.build(kind).named_parameters()}
    for difference, moved in ranks(4 if "tp" in text else 2).run(user_training, kind, text):
        assert max(difference.values()) <= 2e-5
        assert moved == names


def replaced_weight() -> str:
    """A weight that stands in a list of its own is replaced after the split: the list knows the old one."""
    strategy = Strategy.parse("pp=2 microbatches=2").filled(2)
    model = zoo.build("parameters kept elsewhere")
    parallel = pipeline.apply(model, strategy.mesh(2), strategy, zoo.batch("gpt", 2))
    block = model.blocks[0]
    block.weights[0] = block.up.weight.detach().clone()
    try:
        parallel.run_step(
            [zoo.batch("gpt", 2, seed=n) for n in range(2)], lambda output, _: (output.square().sum(), None)
        )
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_weight_that_the_first_step_does_not_train_is_an_error_that_names_it(ranks: Any) -> None:
    first, last = ranks(2).run(replaced_weight)
    assert first.startswith("blocks.0.up.weight got no gradient in the first step")
    assert last == ""
