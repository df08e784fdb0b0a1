"""Trained tensors that do not belong to the model: their gradients are those of the whole batch, or one sentence."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_gpt import batch, close, gpt, loss_fn, same_gradients
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.parallel import outside
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks

INPUTS, TARGETS = batch(5)
SHARED = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))


def scale_of(value: float = 1.3) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float64))


def scaled_loss(out: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return loss_fn(out * scale, targets) + 0.1 * scale**2


def with_global(out: Tensor, targets: Tensor) -> Tensor:
    return scaled_loss(out, targets, SHARED)


class Plain:
    """A loss that is no module."""

    def __init__(self) -> None:
        self.parts = [{"scale": scale_of()}]

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        return scaled_loss(out, targets, self.parts[0]["scale"])


class Hidden:
    """Nothing shows what it keeps."""

    def __init__(self) -> None:
        self.at = [scale_of()].__getitem__

    @property
    def scale(self) -> nn.Parameter:
        return self.at(0)

    def __call__(self, out: Tensor, targets: Tensor) -> Tensor:
        return scaled_loss(out, targets, self.scale)


def ways() -> Iterator[tuple[nn.Parameter, Callable[[Tensor, Tensor], Tensor]]]:
    own = scale_of()
    yield own, lambda out, targets: scaled_loss(out, targets, own)
    yield own, partial(scaled_loss, scale=own)
    by_object = Plain()
    yield by_object.parts[0]["scale"], by_object
    yield by_object.parts[0]["scale"], by_object.__call__
    SHARED.grad = None
    yield SHARED, with_global


def sequential() -> tuple[Tensor, list[Any]]:
    model, scale = gpt(), scale_of()
    scaled_loss(model(INPUTS), TARGETS, scale).backward()
    assert scale.grad is not None
    return scale.grad, [p.grad for p in model.parameters()]


def text_of(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(ValueError) as error:
        call(*args)
    return str(error.value)


def found_and_refused(strategy: str) -> tuple[str, str, str]:
    """Of a tensor that is not found, of one that differs, of one in an optimizer that fp16 does not know."""
    expected, gradients = sequential()
    for scale, loss in ways():
        model = cnb.parallelize(gpt(), strategy=strategy)
        for times in (1, 2):
            scale.grad = scale.grad if times == 2 else None
            cnb.forward_backward(model, loss, INPUTS, TARGETS)
            assert scale.grad is not None
            close(scale.grad, times * expected)
        same_gradients(model, gradients, 2)
    hidden = Hidden()
    model = cnb.parallelize(gpt(), strategy=strategy)
    lost = text_of(cnb.forward_backward, model, hidden, INPUTS, TARGETS)
    assert hidden.scale.grad is None
    assert all(p.grad is None for p in model.parameters())
    optimizer = torch.optim.SGD([*model.parameters(), hidden.scale], lr=0.0)
    cnb.parallelize(model, optimizer)
    cnb.forward_backward(model, hidden, INPUTS, TARGETS)
    assert hidden.scale.grad is not None
    close(hidden.scale.grad, expected)
    odd = scale_of(1.0 + World.current().rank)
    differs = text_of(cnb.forward_backward, model, partial(scaled_loss, scale=odd), INPUTS, TARGETS)
    low = cnb.parallelize(gpt().float(), strategy=f"{strategy} precision=fp16")
    narrow = nn.Parameter(torch.tensor(1.3))
    loss = partial(scaled_loss, scale=narrow)
    unknown = text_of(cnb.forward_backward, low, loss, INPUTS, TARGETS)
    cnb.parallelize(low, torch.optim.SGD([*low.parameters(), narrow], lr=0.0))
    cnb.forward_backward(low, loss, INPUTS, TARGETS)
    torch.testing.assert_close(narrow.grad, expected.float(), rtol=1e-2, atol=0)
    return lost, differs, unknown


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2"])
def test_found_wherever_a_loss_keeps_it_or_refused(ranks: Any, strategy: str) -> None:
    for lost, differs, unknown in ranks(2).run(found_and_refused, strategy):
        assert lost.startswith("the loss trains a tensor [], which is no parameter of the model, in no optimizer that")
        assert "put it into an optimizer before parallelize" in lost
        assert differs.startswith("the loss trains scale, whose values on rank 1 differ from the others'")
        assert "scale, which the loss trains, is in no optimizer that parallelize knows" in unknown


def inside_the_model(strategy: str) -> Any:
    """A hook adds a tensor that is trained; its gradient, that of the input, or why not."""
    model, inner = gpt(), nn.Parameter(torch.full((16,), 0.1, dtype=torch.float64))
    model.blocks[0].register_forward_hook(lambda _, args, out: out + inner)
    loss_fn(model(INPUTS), TARGETS).backward()
    expected, inner.grad = inner.grad, None
    model = cnb.parallelize(model, torch.optim.SGD([*model.parameters(), inner]), strategy)[0]
    if strategy != "dp=2":
        return text_of(cnb.forward_backward, model, loss_fn, INPUTS, TARGETS)
    for by_hand in (False, True):
        model.zero_grad()
        inner.grad = None
        if by_hand:
            loss_fn(model(INPUTS), TARGETS).backward()
        else:
            cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
        close(inner.grad, expected)
    return input_gradients()


def input_gradients() -> str:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), torch.randn(5, 4, dtype=torch.float64)
    wanted, by_hand, here = (x.clone().requires_grad_() for _ in range(3))
    model(wanted).square().mean().backward()
    model = cnb.parallelize(model, strategy="dp=2")
    model(by_hand).square().mean().backward()
    close(by_hand.grad, wanted.grad)
    cnb.forward_backward(model, lambda out, _: out.square().mean(), here)
    close(here.grad, wanted.grad)
    return "equal"


@pytest.mark.parametrize(("strategy", "words"), [("dp=2", "equal"), ("tp=2", "run under dp alone"), ("pp=2", "or run")])
def test_inside_the_model_it_is_trained_under_dp_alone(ranks: Any, strategy: str, words: str) -> None:
    assert all(words in said for said in ranks(2).run(inside_the_model, strategy))


def start(strategy: str | None) -> tuple[nn.Module, Tensor, list[torch.optim.Optimizer]]:
    """The loss's parameter has an optimizer of its own."""
    model, scale = gpt(), scale_of()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2), torch.optim.Adam([scale], lr=0.1)]
    if strategy is not None:
        model, given = cnb.parallelize(model, optimizers, strategy)
        assert given is optimizers
    return model, scale, optimizers


def step(model: nn.Module, scale: Tensor, optimizers: list[torch.optim.Optimizer], plain: bool = False) -> None:
    for each in optimizers:
        each.zero_grad()
    loss = partial(scaled_loss, scale=scale)
    if plain:
        loss(model(INPUTS), TARGETS).backward()
    else:
        cnb.forward_backward(model, loss, INPUTS, TARGETS)
    for each in optimizers:
        each.step()


def trained(steps: int) -> Tensor:
    model, scale, optimizers = start(None)
    for _ in range(steps):
        step(model, scale, optimizers, plain=True)
    return scale.detach()


def lives_on(path: Path, strategy: str, other: str) -> tuple[str, str]:
    """Saved, loaded elsewhere, moved, verified; with a fault that verify finds."""
    model, scale, optimizers = start(strategy)
    step(model, scale, optimizers)
    loss, before = partial(scaled_loss, scale=scale), (scale.detach().clone(), scale.grad)
    right = cnb.verify(model, loss, INPUTS, TARGETS, steps=2)
    assert right, right
    assert {row.what for row in right.rows if row.name == "scale (outside the model)"} == {"gradient", "weight"}
    assert torch.equal(scale, before[0]) and scale.grad is before[1]
    with patch.object(outside, "finish", lambda *_: None):
        wrong = cnb.verify(model, loss, INPUTS, TARGETS, steps=2)
    cnb.save(path / "run", model, optimizers)
    second = start(other)
    cnb.load(path / "run", second[0], second[2])
    step(*second)
    close(second[1], trained(2))
    cnb.redistribute(model, optimizers, other)
    step(model, scale, optimizers)
    close(scale, trained(2))
    third = start(None)
    cnb.load(path / "run", third[0], third[2])
    step(*third, plain=True)
    close(third[1], trained(2))
    alone = text_of(cnb.save, path / "other", model, optimizers[1])
    return wrong.cause, alone


@pytest.mark.parametrize(("strategy", "other"), [("dp=2", "tp=2"), ("pp=2", "dp=2")])
def test_it_is_saved_moved_and_verified(ranks: Any, tmp_path: Path, strategy: str, other: str) -> None:
    for cause, alone in ranks(2).run(lives_on, tmp_path, strategy, other):
        assert "scale (outside the model)" in cause
        assert "one of the loss's parameters alone is given with the model's, in a list" in alone


def torn_and_recovered() -> str:
    model, scale, optimizers = start("dp=2")
    step(model, scale, optimizers)
    if World.current().rank == 1:
        with torch.no_grad():
            scale.add_(1)
    world = World.current()
    world.regroup(world.epoch + 1, world.ranks)
    said = text_of(step, model, scale, optimizers)
    cnb.recover(model)
    step(model, scale, optimizers)
    close(scale, trained(2))
    return said


def test_where_it_differs_the_weights_are_torn(ranks: Any) -> None:
    said = "replicas of tensor 0 outside the model differ between ranks 0 and 1"
    assert all(said in each for each in ranks(2).run(torn_and_recovered))
