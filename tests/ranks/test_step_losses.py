"""Whatever form a loss has, it is that of the whole batch; one that cannot be put together is refused."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from small_gpt import PAD, batch, close, gpt, loss_fn, same_gradients, sequential
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.parallel import outputs
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


class WithLoss(nn.Module):
    """Takes keywords, returns an object with a loss, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt()

    def forward(self, tokens: Tensor, labels: Tensor, scale: float = 1.0) -> Any:
        logits = self.inner(tokens)
        return {"loss": scale * loss_fn(logits, labels), "logits": logits}

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        (tokens,) = self.inner.example_inputs()
        return tokens, tokens


def _kinds_of_loss(strategy: str) -> None:
    inputs, targets = batch(5)
    loss, gradients = sequential(gpt, inputs, targets)

    def pair(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"), (targets != PAD).sum()

    module = nn.CrossEntropyLoss()
    for each in (pair, lambda logits, targets: module(logits.view(-1, 29), targets.reshape(-1))):
        model = cnb.parallelize(gpt(), strategy=strategy)
        close(cnb.forward_backward(model, each, inputs, targets).item(), loss)
        same_gradients(model, gradients)

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=PAD)

    kept = float((targets != PAD).sum())
    model = cnb.parallelize(gpt(), strategy=strategy)
    for _ in range(2):
        close(cnb.forward_backward(model, summed, inputs, targets).item(), kept * loss)
    same_gradients(model, gradients, 2 * kept)

    whole = cnb.parallelize(WithLoss(), strategy=strategy)
    given = {"tokens": inputs, "labels": targets, "scale": 2.0}
    close(cnb.forward_backward(whole, None, given).item(), 2 * loss)
    same_gradients(whole, gradients, 2)


@pytest.mark.parametrize(
    ("count", "strategy"), [(1, "microbatches=3"), (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2")]
)
def test_kinds_of_loss(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_kinds_of_loss, strategy)


def _bad_losses(strategy: str) -> list[str]:
    inputs, targets = batch(5)
    texts = []

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 7

    def squared(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(logits, targets) ** 2

    def mixed(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(logits, targets) + functional.mse_loss(logits, torch.zeros_like(logits))

    for bad in (summed, squared, mixed):
        model = cnb.parallelize(gpt(), strategy=strategy)
        first = next(p for p in model.parameters() if not p.isnan().any())  # one that this stage holds
        first.grad = torch.ones_like(first)
        for again in range(2):
            with pytest.raises(ValueError, match="loss_fn") as caught:
                cnb.forward_backward(model, bad, inputs, targets)
            if not again:
                texts.append(str(caught.value))
        assert torch.equal(first.grad, torch.ones_like(first))
        assert all(p.grad is None for p in model.parameters() if p is not first)
        close(cnb.forward_backward(model, loss_fn, inputs, targets).item(), sequential(gpt, inputs, targets)[0])
    return texts


@pytest.mark.parametrize(("count", "strategy"), [(1, "microbatches=2"), (2, "dp=2"), (2, "pp=2")])
def test_losses_that_cannot_be_put_together(ranks: Any, count: int, strategy: str) -> None:
    for summed, squared, mixed in ranks(count).run(_bad_losses, strategy):
        assert "on samples of the whole batch at once, but" in summed and "return (sum, count)" in summed
        assert "more than a mean or a sum" in squared
        cut = {"microbatches=2": "dp=1 and microbatches=2", "dp=2": "dp=2 and microbatches=1"}
        assert "compares samples with one another (a contrastive one) needs the whole batch in one part" in squared
        assert "dp=1 and microbatches=1, as under tp alone; here" in squared
        assert squared.endswith(f"here {cut.get(strategy, cut['microbatches=2'])} cut it into 2 parts")
        assert "means over different counts" in mixed and "return (sum, count)" in mixed


WEIGHTS = torch.linspace(0.0, 0.01, 29, dtype=torch.float64)  # less than 1 over a whole batch


def _with_accuracy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return loss_fn(logits, targets), (logits.argmax(-1) < 20).double().mean()


def _weighted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), WEIGHTS, reduction="sum")
    return each, WEIGHTS[targets[targets != PAD]].sum()


def _pairs(strategy: str) -> list[str]:
    inputs, targets = batch(4)
    model = cnb.parallelize(gpt(), strategy=strategy)
    total, count = _weighted(gpt()(inputs), targets)
    close(cnb.forward_backward(model, _weighted, inputs, targets).item(), (total / count).item())
    if strategy == "tp=2":
        return [note for note in World.current().notes if "a count below 1" in note]
    with pytest.raises(ValueError, match="so it is no count") as error:
        cnb.forward_backward(model, _with_accuracy, inputs, targets)
    return [str(error.value)]


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2", "tp=2"])
def test_a_metric_beside_the_loss_is_no_count(ranks: Any, strategy: str) -> None:
    for (text,) in ranks(2).run(_pairs, strategy):
        assert "a pair from loss_fn is (sum of losses, count)" in text and "return_output=True" in text


def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PAD)
    kept = targets.flatten() > 20  # few: a part may have none
    return (each * kept).sum() / kept.sum()


def index_mean(logits: Tensor, targets: Tensor) -> Tensor:
    kept = targets != PAD
    return -logits.log_softmax(-1)[kept].gather(1, targets[kept][:, None]).mean()


def clamped_mean(logits: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=PAD)
    kept = targets.flatten() > 20
    return (each * kept).sum() / kept.sum().clamp(min=1)


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return loss_fn(logits, targets) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def _by_hand(strategy: str) -> None:
    """Equal to one device or refused, in the first call and after another batch and another loss."""
    whole, padded = batch(6), batch(5)
    whole[1].clamp_(min=0)  # no padding
    for each in (masked_mean, index_mean, clamped_mean, z_loss):
        for earlier in ([], [(loss_fn, padded)], [(each, whole)]):
            model = cnb.parallelize(gpt(), strategy=strategy)
            for loss, given in earlier:
                cnb.forward_backward(model, loss, *given)
                model.zero_grad()
            expected = gpt()
            value = each(expected(padded[0]), padded[1])
            value.backward()
            if each is z_loss:
                with pytest.raises(ValueError, match=r"return \(sum, count\)"):
                    cnb.forward_backward(model, each, *padded)
                continue
            close(cnb.forward_backward(model, each, *padded).item(), value.item())
            same_gradients(model, [p.grad for p in expected.parameters()])


@pytest.mark.parametrize(
    ("count", "strategy"), [(4, "dp=4"), (2, "pp=2 microbatches=4"), (1, "microbatches=5"), (4, "dp=2 tp=2")]
)
def test_means_written_by_hand(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_by_hand, strategy)


def _penalty(strategy: str) -> None:
    inputs, targets = batch(4)

    def penalized(model: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(logits, targets) + 1e-2 * sum((p**2).sum() for p in model.parameters())  # type: ignore[return-value]

    expected = gpt()
    value = penalized(expected, expected(inputs), targets)
    value.backward()
    model = cnb.parallelize(gpt(), strategy=strategy)

    def own(logits: Tensor, targets: Tensor) -> Tensor:
        return penalized(model, logits, targets)

    if strategy != "tp=2":
        close(cnb.forward_backward(model, own, inputs, targets).item(), value.item())
        same_gradients(model, [p.grad for p in expected.parameters()])
    else:
        with pytest.raises(ValueError, match="loss_fn reads a weight of shape"):
            cnb.forward_backward(model, own, inputs, targets)

        def moves(logits: Tensor, targets: Tensor) -> Tensor:
            weight = model.blocks[0].up.weight  # of which this rank has a part: asked where it is, not what
            return loss_fn(logits.to(weight.dtype), targets.to(weight.device))

        close(cnb.forward_backward(model, moves, inputs, targets).item(), sequential(gpt, inputs, targets)[0])


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (2, "tp=2"), (1, "microbatches=1")])
def test_a_penalty_on_weights_is_right_or_refused(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_penalty, strategy)


def _some_samples() -> None:
    with patch.object(outputs, "PROOF_BYTES", 4 * 8 * 6 * 29):  # two samples of each replica
        _proven_by_some()


def _proven_by_some() -> None:
    inputs, targets = batch(6)
    seen = []

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(logits))
        return loss_fn(logits, targets)

    model = cnb.parallelize(gpt(), strategy="dp=2")
    close(cnb.forward_backward(model, summed, inputs, targets).item(), sequential(gpt, inputs, targets)[0])
    assert seen == [3, 4, 2, 2]  # its part; two samples of each replica, together and apart
    with pytest.raises(ValueError, match="at once"):
        other = cnb.parallelize(gpt(), strategy="dp=2")
        cnb.forward_backward(other, lambda logits, targets: loss_fn(logits, targets) * len(logits), inputs, targets)


def test_the_comparison_keeps_a_bounded_number_of_samples(ranks: Any) -> None:
    ranks(2).run(_some_samples)


def _scalar_output() -> None:
    inputs, targets = batch(5)
    expected = WithLoss()
    loss = expected(inputs, targets)["loss"]
    loss.backward()
    model = cnb.parallelize(WithLoss(), strategy="dp=2")
    found = model(inputs, targets)
    close(found["loss"].item(), loss.item())
    found["loss"].backward()
    same_gradients(model, [p.grad for p in expected.parameters()])


def test_a_loss_in_the_output_is_that_of_the_whole_batch(ranks: Any) -> None:
    ranks(2).run(_scalar_output)


def _masked(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    mask = (targets != PAD).to(logits.dtype)
    return logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0] * mask, mask


def _negative(logits: Tensor, targets: Tensor) -> Tensor:
    each, mask = _masked(logits, targets)
    return -each.sum() / mask.sum()


def _product(logits: Tensor, targets: Tensor) -> Tensor:
    each, mask = _masked(logits, targets)
    return -(each.flatten() @ mask.flatten()) / mask.sum()


def _even_then_uneven(strategy: str) -> None:
    """Masks hide what a loss divides by, as long as all samples have equally many targets."""
    inputs, targets = batch(6)
    full, padded = torch.where(targets == PAD, 1, targets), targets.clone()
    padded[:2, 1:] = PAD
    padded[2:] = full[2:]
    expected, gradients = sequential(gpt, inputs, padded)
    model = cnb.parallelize(gpt(), strategy=strategy)
    for _ in range(2):
        cnb.forward_backward(model, _negative, inputs, full)
        model.zero_grad()
    close(cnb.forward_backward(model, _negative, inputs, padded).item(), expected)
    same_gradients(model, gradients)
    for _ in range(2):
        cnb.forward_backward(model, _product, inputs, full)
    with pytest.raises(ValueError, match=r"it is more than a mean or a sum over samples"):
        cnb.forward_backward(model, _product, inputs, padded)


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2"])
def test_a_loss_whose_counts_show_later_is_counted_or_refused(ranks: Any, strategy: str) -> None:
    ranks(2).run(_even_then_uneven, strategy)


def _later_otherwise(strategy: str) -> None:
    """One function that does something else from some step on, as with the hardest samples after a warm-up."""
    inputs, targets = batch(6)
    model = cnb.parallelize(gpt(), strategy=strategy)
    epoch = 0

    def changing(logits: Tensor, targets: Tensor) -> Tensor:
        each = functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        if epoch == 0:
            return each.mean()
        return each.square().mean() if epoch == 1 else each.flatten().topk(4).values.mean()

    with patch.object(outputs, "compare", wraps=outputs.compare) as compared:
        for epoch, times in ((0, 1), (0, 1), (1, 2), (1, 2), (0, 2)):  # noqa: B007 (the loss reads it)
            model.zero_grad()
            loss, gradients = sequential(gpt, inputs, targets, changing)
            close(cnb.forward_backward(model, changing, inputs, targets).item(), loss)
            same_gradients(model, gradients)
            assert compared.call_count == times
        epoch = 2
        for _ in range(2):
            with pytest.raises(ValueError, match=r"return \(sum, count\) from loss_fn"):
                cnb.forward_backward(model, changing, inputs, targets)


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2"])
def test_a_loss_that_becomes_another_is_compared_again(ranks: Any, strategy: str) -> None:
    ranks(2).run(_later_otherwise, strategy)


def _with_output(strategy: str) -> None:
    """The loss inside the returned output is that of the whole batch too."""
    inputs, targets = batch(5)
    model = cnb.parallelize(WithLoss(), strategy=strategy)
    given = {"tokens": inputs, "labels": targets}
    loss, output = cnb.forward_backward(model, None, given, return_output=True)
    assert torch.equal(output["loss"], loss)
    assert output["logits"].shape == (5, inputs.shape[1], 29)


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2"])
def test_the_models_own_loss_in_its_output_is_the_whole_ones(ranks: Any, strategy: str) -> None:
    ranks(2).run(_with_output, strategy)


class Noisy(nn.Linear):
    """Draws numbers of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(5)


def _draws(strategy: str) -> bool:
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4)
    model = cnb.parallelize(nn.Sequential(Noisy(3, 5), nn.ReLU()), strategy=strategy)
    cnb.forward_backward(model, functional.cross_entropy, x, y)
    return any("draws random numbers of its own" in note for note in World.current().notes)


def test_random_numbers_of_the_models_own_are_told_where_they_differ(ranks: Any) -> None:
    assert ranks(2).run(_draws, "dp=2") == [True, True]
    assert ranks(1).run(_draws, "dp=1") == [False]
