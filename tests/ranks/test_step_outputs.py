"""model(x) takes and gives whole batches, and a plain backward through it is right where it can be; a batch that is not
in dim 0 is refused, and errors of a part say what was cut."""

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


class TimeFirst(nn.Module):
    """A causal or a recurrent layer of torch with time in dim 0; `turned`: the inputs of the model have it in dim 1."""

    def __init__(self, recurrent: bool, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.turned = recurrent, turned
        self.embed, self.head = nn.Embedding(29, 8), nn.Linear(8, 29)
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.LSTM(8, 8) if recurrent else nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.T if self.turned else tokens)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        logits = self.head(self.layer(x)[0] if self.recurrent else self.layer(x, src_mask=mask))
        return logits.transpose(0, 1) if self.turned else logits


def _time_first(strategy: str, recurrent: bool) -> list[str]:
    inputs, targets = batch(12)
    texts = []
    for tokens, labels in ((inputs, targets), (inputs.T, targets.T), (inputs[:6], targets[:6])):
        model = cnb.parallelize(TimeFirst(recurrent, turned=False), strategy=strategy)
        kept = next(p for p in model.parameters() if not p.isnan().any())
        kept.grad = torch.ones_like(kept)
        with pytest.raises(ValueError, match="LSTM" if recurrent else "TransformerEncoderLayer") as error:
            cnb.forward_backward(model, loss_fn, tokens, labels)
        texts.append(str(error.value))
        assert torch.equal(kept.grad, torch.ones_like(kept))
    return texts


@pytest.mark.parametrize(
    ("count", "strategy", "recurrent"),
    [(1, "microbatches=3", True), (2, "dp=2", False), (2, "pp=2", True), (2, "pp=2", False)],
)
def test_a_batch_that_would_be_cut_along_time_is_refused(
    ranks: Any, count: int, strategy: str, recurrent: bool
) -> None:
    every = ranks(count).run(_time_first, strategy, recurrent)
    assert len(set(map(tuple, every))) == 1
    for text, shape in zip(every[0], ("[12, 6]", "[6, 12]", "[6, 6]"), strict=True):
        assert f"dim 0 of inputs {shape} is the batch" in text and "; but layer (" in text
        assert "batch_first=True" in text and "x.transpose(0, 1)" in text


def _turned(strategy: str, recurrent: bool) -> None:
    """With parts as long as the sequences, which looks like a batch cut along time."""
    inputs, targets = batch(12)
    reference = TimeFirst(recurrent, turned=True)
    reference.norm.eval()
    expected = loss_fn(reference(inputs), targets)
    expected.backward()
    model = cnb.parallelize(TimeFirst(recurrent, turned=True), strategy=strategy)
    model.norm.eval()
    for times in (1, 2):
        close(cnb.forward_backward(model, loss_fn, inputs, targets).item(), expected.item())
        same_gradients(model, [p.grad for p in reference.parameters()], times)
    whole = cnb.parallelize(TimeFirst(recurrent, turned=False), strategy="tp=2")
    whole.norm.eval()
    close(cnb.forward_backward(whole, loss_fn, inputs.T, targets.T).item(), expected.item())


@pytest.mark.parametrize("strategy", ["dp=2", "pp=2"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_model_that_turns_its_batches_is_left_alone(ranks: Any, strategy: str, recurrent: bool) -> None:
    ranks(2).run(_turned, strategy, recurrent)


def _plain_time_first() -> str:
    inputs, _ = batch(12)
    model = cnb.parallelize(TimeFirst(True, turned=True), strategy="dp=2")
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(inputs).sum().backward()  # looked at twice, and its graph is whole
    assert any(not torch.equal(value, before[name]) for name, value in model.named_buffers())
    model = cnb.parallelize(TimeFirst(False, turned=False), strategy="dp=2").eval()
    with pytest.raises(ValueError) as error, torch.no_grad():
        model(inputs.T)
    return str(error.value)


def test_outputs_of_time_first_inputs_are_refused(ranks: Any) -> None:
    for text in ranks(2).run(_plain_time_first):
        assert "dim 0 of inputs [6, 12] is the batch" in text


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.layer(x, state)[0])


def _noted() -> list[str]:
    x, model = torch.ones(4, 3, 4), cnb.parallelize(Stateful(), strategy="dp=2")
    with pytest.raises(RuntimeError, match="Expected hidden size") as error:
        cnb.forward_backward(model, nn.functional.mse_loss, {"x": x, "state": torch.zeros(1, 4, 8)}, x)
    return list(getattr(error.value, "__notes__", []))


def test_an_error_in_a_part_says_what_was_cut(ranks: Any) -> None:
    for (note,) in ranks(2).run(_noted):
        assert note.startswith(
            "The batch of 4 samples was cut along dim 0: inputs['x'] [4, 3, 4] -> [2, 3, 4], targets [4, 3, 4] -> "
            "[2, 3, 4]; given whole: inputs['state'] [1, 4, 8].\nWhat belongs to the whole batch"
        )
