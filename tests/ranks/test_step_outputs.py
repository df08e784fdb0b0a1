"""model(x) takes and gives whole batches, and a plain backward through it is right where it can be."""

from typing import Any

import pytest
import torch
from small_gpt import batch, close, gpt, loss_fn, same_gradients
from torch import Tensor, nn

import colossal_nb as cnb

pytestmark = pytest.mark.ranks
TWO = [(2, "dp=2"), (2, "tp=2"), (2, "pp=2")]
FOUR = [(4, "dp=2 tp=2"), (4, "dp=2 pp=2"), (4, "tp=2 pp=2")]


def _outputs(strategy: str) -> None:
    inputs, targets = batch(5)
    expected = gpt()(inputs).detach()
    model = cnb.parallelize(gpt(), strategy=strategy)
    loss, output = cnb.forward_backward(model, loss_fn, inputs, targets, return_output=True)
    close(output, expected)
    close(loss.item(), loss_fn(expected, targets).item())
    for samples in (5, 1):
        with torch.no_grad():
            close(model(inputs[:samples]), expected[:samples])
            close(model(tokens=inputs[:samples]), expected[:samples])


@pytest.mark.parametrize(("count", "strategy"), [(1, "microbatches=2"), *TWO, *FOUR])
def test_outputs_are_global(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_outputs, strategy)


def _plain_backward(strategy: str) -> None:
    for samples in (5, 1):
        inputs, targets = batch(samples)

        def penalized(logits: Tensor, targets: Tensor, model: nn.Module) -> Tensor:
            return loss_fn(logits, targets) + 0.1 * model.norm.weight.pow(2).sum()

        reference = gpt()
        value = penalized(reference(inputs), targets, reference)
        value.backward()
        model = cnb.parallelize(gpt(), strategy=strategy)
        loss = penalized(model(inputs), targets, model)
        loss.backward()
        close(loss.item(), value.item())
        same_gradients(model, [p.grad for p in reference.parameters()])


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (2, "tp=2"), (4, "dp=2 tp=2"), (4, "dp=4")])
def test_plain_backward_is_right_without_a_pipeline(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_plain_backward, strategy)


def _pipeline_refuses() -> str:
    model = cnb.parallelize(gpt(), strategy="pp=2")
    inputs, _ = batch(2)
    with pytest.raises(ValueError) as error:
        model(inputs)
    return str(error.value)


def test_plain_backward_under_a_pipeline_shows_the_line(ranks: Any) -> None:
    for text in ranks(2).run(_pipeline_refuses):
        assert "with pp=2" in text
        assert "loss = cnb.forward_backward(model, loss_fn, inputs, targets)" in text
        assert "torch.no_grad()" in text
