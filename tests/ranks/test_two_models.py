"""A parallel model that another one's loss calls: with this rank's part of the batch. See programs/two_models.py."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.parallel.work import Released
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(sum(sizes))
    made: list[nn.Module] = []
    for width, following in itertools.pairwise(sizes):
        made += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*made)


def asked(strategy: str, of_other: str, other: nn.Module, steps: int = 2) -> Any:
    """Losses with another model in the loss; the sentence where it is refused."""
    model, batch = layers(4, 8, 8, 6), torch.linspace(-1, 1, 24).view(6, 4)
    model = cnb.parallelize(model, strategy=strategy)
    other = cnb.parallelize(other, strategy=of_other)
    world = World.current()
    try:
        return [
            cnb.forward_backward(model, lambda out, _: other(out).square().mean(), batch, batch).item()
            for _ in range(steps)
        ]
    except (ValueError, Released) as error:
        world.abort("a test")  # as a notebook does after an error, so that the other stage is freed
        return str(error)
    finally:
        if "pp=2" in strategy:
            world.regroup(world.epoch + 1, world.ranks)


def test_a_pipeline_cannot_be_asked(ranks: Any) -> None:
    said = ranks(2).run(asked, "pp=2", "pp=2", layers(6, 5, 5))
    assert "this Sequential works as pp=2" in said[1] and "leave it out of parallelize, or call it before" in said[1]


class Asks(nn.Module):
    """Its forward calls a model that is none of its modules."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 6), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + self.other[0](x)


def asks(strategy: str) -> torch.Tensor:
    """`model(x)` and a loop by hand: the output, and the gradients of both models."""
    torch.manual_seed(0)
    other = layers(4, 6)
    model, batch = Asks([other]), torch.linspace(-1, 1, 24).view(6, 4)
    if strategy:
        model.other[0] = other = cnb.parallelize(other, strategy=strategy)
        model = cnb.parallelize(model, strategy=strategy)
    out = model(batch)
    out.square().mean().backward()
    return torch.cat([out.detach().flatten(), model.own.weight.grad.flatten(), other[0].weight.grad.flatten()])


def test_a_forward_that_calls_another_parallel_model(ranks: Any) -> None:
    for found in ranks(2).run(asks, "dp=2"):
        torch.testing.assert_close(found, asks(""))


def test_ranks_that_hold_the_other_model_otherwise(ranks: Any) -> None:
    """A whole one can be asked wherever it is; one that is cut, where all its ranks have the same part."""
    model, other, batch = layers(4, 8, 8, 6), layers(6, 4, 4), torch.linspace(-1, 1, 24).view(6, 4)
    wanted = [other(model(batch)).square().mean().item()] * 2
    for strategy, of_other in (("tp=2 dp=1", "dp=2"), ("dp=2", "dp=2 microbatches=3")):
        for found in ranks(2).run(asked, strategy, of_other, layers(6, 4, 4)):
            assert found == pytest.approx(wanted, rel=1e-6)
    assert all("works as tp=2" in said for said in ranks(2).run(asked, "dp=2", "tp=2 dp=1", layers(6, 4, 4)))


def statistics_of_parts() -> list[str]:
    other = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    asked("dp=2", "dp=2", other)
    notes, World.current().notes = World.current().notes, []
    return notes


def test_a_batch_norm_in_the_other_model_is_told(ranks: Any) -> None:
    assert any("this Sequential, called by loss_fn, keeps running statistics" in note
               for note in ranks(2).run(statistics_of_parts)[0])  # fmt: skip


def verified() -> bool:
    model, other, batch = layers(4, 8, 6), layers(6, 5), torch.linspace(-1, 1, 32).view(8, 4)
    model, other = cnb.parallelize(model, strategy="dp=2"), cnb.parallelize(other, strategy="dp=2")
    return bool(cnb.verify(model, lambda out, _: functional.mse_loss(other(out), out[:, :5]), batch, batch))


def test_verify_asks_it_too(ranks: Any) -> None:
    assert ranks(2).run(verified) == [True, True]


def frozen() -> str:
    model = cnb.parallelize(layers(4, 8, 8, 6).requires_grad_(False), strategy="pp=2")
    with pytest.raises(ValueError) as caught:
        cnb.forward_backward(model, functional.mse_loss, torch.ones(4, 4), torch.ones(4, 6))
    return str(caught.value)


def test_what_trains_nothing_is_refused_under_pp_as_elsewhere(ranks: Any) -> None:
    assert all("this is a loss without a gradient" in said for said in ranks(2).run(frozen))
