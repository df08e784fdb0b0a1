"""Sharded models train as whole ones: loss and every gradient, float64, tp = 2 and 4."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.models import GPT, MLP
from colossal_nb.parallel import tensor
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy

pytestmark = pytest.mark.ranks


def gradient_error(model: nn.Module, whole: nn.Module) -> float:
    """The worst difference of a local gradient from its slice of the whole one, on the scale of that tensor."""
    largest = max(float(p.grad.abs().max()) for p in whole.parameters())
    worst = 0.0
    for (name, p), (other, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        expected = q.grad
        layout = layout_of(p)
        if layout is not None:
            for dim, held in enumerate(layout.slices(World.current().rank)):
                expected = expected.index_select(dim, torch.tensor(list(held)))
        assert p.shape == p.grad.shape == expected.shape
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        worst = max(worst, float((p.grad - expected).abs().max()) / scale)
    return worst


def trained(make, loss_fn, tp: int):
    torch.manual_seed(0)
    model, inputs, targets = make()
    model.double()
    whole = copy.deepcopy(model)
    expected = loss_fn(whole(inputs), targets)
    expected.backward()
    mesh = Mesh({"tp": tp})
    example = (model.example_inputs(), {})
    plan = tensor.plan(model, mesh, Strategy.parse(f"tp={tp}"), example)
    parameters = dict(model.named_parameters())
    report = tensor.apply(model, plan)
    assert all(parameters[name] is p for name, p in model.named_parameters())
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return (
        abs(loss.item() - expected.item()),
        gradient_error(model, whole),
        report.plan.share,
        str(report),
        World.current().notes,
    )


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(tied: bool = False):
    model = GPT(vocab_size=131, layers=2, hidden=32, heads=4, max_length=16, tied=tied)
    return model, torch.randint(131, (3, 12)), torch.randint(131, (3, 12))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_trains_as_the_whole_one(ranks, tp: int, tied: bool) -> None:
    for loss, gradient, share, report, notes in ranks(tp).run(trained, lambda: gpt(tied), token_loss, tp):
        assert loss < 1e-12, report
        assert gradient < 1e-10, report
        assert share > 0.8, report
        assert notes == []
