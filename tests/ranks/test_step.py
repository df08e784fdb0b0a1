"""forward_backward, model(x), accumulate and clipping: global values in and out, whatever the batch and the loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.models import GPT, MLP
from colossal_nb.parallel import outputs
from colossal_nb.parallel.world import World
from colossal_nb.record import RecordBuilder

pytestmark = pytest.mark.ranks
PAD = -100
FOUR = [(4, "dp=2 tp=2"), (4, "dp=2 pp=2"), (4, "tp=2 pp=2")]


def gpt(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=2, hidden=16, heads=4, max_length=8, tied=tied).double()


def batch(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and padded targets; the first sample has the most."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(29, (samples, 7), generator=generator)
    targets = text[:, 1:].clone()
    lengths = torch.randint(1, 6, (samples, 1), generator=generator)
    lengths[0] = 6
    targets[torch.arange(6) >= lengths] = PAD
    return text[:, :-1], targets


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sequential(make: Callable[[], nn.Module], inputs: Any, targets: Any) -> tuple[float, list[Any]]:
    model = make()
    value = loss_fn(model(inputs), targets)
    value.backward()
    return value.item(), [p.grad for p in model.parameters()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def same_gradients(model: nn.Module, expected: list[Tensor | None], times: float = 1) -> None:
    for p, whole in zip(model.parameters(), expected, strict=True):
        found = cnb.full_grad(p)
        if whole is None:
            assert found is None
        else:
            assert found is not None
            close(found, whole * times)


# Batches: one sample for several replicas, fewer than there are parts, five in four.
def _batches(strategy: str, sizes: tuple[int, ...]) -> None:
    for samples in sizes:
        inputs, targets = batch(samples)
        loss, gradients = sequential(gpt, inputs, targets)
        model = cnb.parallelize(gpt(), strategy=strategy)
        for times in (1, 2):  # the second call adds
            found = cnb.forward_backward(model, loss_fn, inputs, targets)
            assert found.dim() == 0 and not found.requires_grad and found.dtype == torch.float64
            close(found.item(), loss)
            same_gradients(model, gradients, times)


@pytest.mark.parametrize(
    ("count", "strategy"),
    [(1, "microbatches=4"), (2, "dp=2"), (2, "pp=2 microbatches=4"), (2, "dp=2 microbatches=4"), (4, "dp=2 pp=2")],
)
def test_any_batch_size(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_batches, strategy, (1, 3, 5))


def _plain_gradients_stay() -> None:
    inputs, targets = batch(4)
    _, gradients = sequential(gpt, inputs, targets)
    model = cnb.parallelize(gpt(), strategy="dp=2")
    kept = {}
    for p in model.parameters():
        p.grad = kept[p] = torch.ones_like(p)
    cnb.forward_backward(model, loss_fn, inputs, targets)
    for p, whole in zip(model.parameters(), gradients, strict=True):
        assert p.grad is kept[p]
        close(p.grad, whole + 1)


def test_gradients_are_added_in_place(ranks: Any) -> None:
    ranks(2).run(_plain_gradients_stay)


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
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    def own_mean(logits: Tensor, targets: Tensor) -> Tensor:
        kept = targets != PAD
        return -logits.log_softmax(-1)[kept].gather(1, targets[kept][:, None]).mean()

    def mixed(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_fn(logits, targets) + functional.mse_loss(logits, torch.zeros_like(logits))

    for bad in (summed, own_mean, mixed):
        model = cnb.parallelize(gpt(), strategy=strategy)
        first = next(p for p in model.parameters() if not p.isnan().any())  # one that this stage holds
        first.grad = torch.ones_like(first)
        try:
            cnb.forward_backward(model, bad, inputs, targets)
        except ValueError as error:
            texts.append(str(error))
        assert torch.equal(first.grad, torch.ones_like(first))
        assert all(p.grad is None for p in model.parameters() if p is not first)
        close(cnb.forward_backward(model, loss_fn, inputs, targets).item(), sequential(gpt, inputs, targets)[0])
    return texts


@pytest.mark.parametrize(("count", "strategy"), [(1, "microbatches=2"), (2, "dp=2"), (2, "pp=2")])
def test_losses_that_cannot_be_put_together(ranks: Any, count: int, strategy: str) -> None:
    for summed, own_mean, mixed in ranks(count).run(_bad_losses, strategy):
        assert "on samples of the whole batch at once, but" in summed and "return (sum, count)" in summed
        assert "averages over something" in own_mean
        assert "means over different counts" in mixed and "return (sum, count)" in mixed


def _some_samples() -> None:
    outputs.PROOF_BYTES = 4 * 8 * 6 * 29  # two samples of each replica
    inputs, targets = batch(6)
    seen = []

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(logits))
        return loss_fn(logits, targets)

    model = cnb.parallelize(gpt(), strategy="dp=2")
    close(cnb.forward_backward(model, summed, inputs, targets).item(), sequential(gpt, inputs, targets)[0])
    assert seen == [3, 4, 2, 2]
    with pytest.raises(ValueError, match="at once"):
        other = cnb.parallelize(gpt(), strategy="dp=2")
        cnb.forward_backward(other, lambda logits, targets: loss_fn(logits, targets) * len(logits), inputs, targets)


def test_the_comparison_keeps_a_bounded_number_of_samples(ranks: Any) -> None:
    ranks(2).run(_some_samples)


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


@pytest.mark.parametrize(
    ("count", "strategy"),
    [(1, "microbatches=2"), (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), *FOUR],
)
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


class Branches(nn.Module):
    """Each sample takes one of three layers; no sample takes the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(2, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = which == number
            if rows.any():
                out[rows] = layer(x[rows])
        return out


def _unused() -> None:
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    which = torch.tensor([0, 0, 1, 1])
    reference = Branches()
    reference(x, which).pow(2).mean().backward()
    expected = [p.grad for p in reference.parameters()]
    model = cnb.parallelize(Branches(), strategy="dp=2")
    cnb.forward_backward(model, lambda out, _: out.pow(2).mean(), (x, which))
    same_gradients(model, expected)
    assert all(p.grad is None for p in model.layers[2].parameters())
    with cnb.accumulate(model):
        cnb.forward_backward(model, lambda out, _: out.pow(2).mean(), (x, which))
    same_gradients(model, expected, 2)
    assert all(p.grad is None for p in model.layers[2].parameters())


def test_parameters_that_only_some_parts_reach(ranks: Any) -> None:
    ranks(2).run(_unused)


def _accumulated(strategy: str) -> int:
    pairs = [batch(5, seed) for seed in (1, 2, 3)]
    every = [sequential(gpt, *pair)[1] for pair in pairs]
    model = cnb.parallelize(gpt(), strategy=strategy)
    cnb.forward_backward(model, loss_fn, *pairs[0])
    World.current().recorder.drain()
    with cnb.accumulate(model):
        for pair in pairs[1:]:
            cnb.forward_backward(model, loss_fn, *pair)
    builder = RecordBuilder()
    builder.feed(World.current().recorder.drain())
    slices = builder.record().slices
    same_gradients(model, [sum(each) for each in zip(*every, strict=True)])
    sizes = slices[(slices["kind"] == "all_reduce") & (slices["of"] == "gradients")]["payload_bytes"]
    return int((sizes > 4 * len(list(model.parameters()))).sum())


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (4, "dp=2 pp=2")])
def test_accumulate_reduces_once(ranks: Any, count: int, strategy: str) -> None:
    assert ranks(count).run(_accumulated, strategy) == [1] * count


def _odd_data() -> str:
    model = cnb.parallelize(MLP(4, 8, 3).double(), strategy="dp=4")
    x = torch.ones(4, 4, dtype=torch.float64)
    if World.current().rank == 2:
        x[3, 3] = 2
    with pytest.raises(ValueError) as error:
        cnb.forward_backward(model, functional.cross_entropy, x, torch.zeros(4).long())
    x = torch.ones(4, 4, dtype=torch.float64)
    cnb.forward_backward(model, functional.cross_entropy, x, torch.zeros(4).long())
    return str(error.value)


def test_ranks_whose_data_differ_are_named(ranks: Any) -> None:
    for text in ranks(4).run(_odd_data):
        assert text.startswith("the batch of rank 2 differs from the others'")


def norm(model: nn.Module, kind: float) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], kind)


def _norms(strategy: str) -> None:
    inputs, targets = batch(4)
    for tied in (False, True):
        reference = gpt(tied)
        loss_fn(reference(inputs), targets).backward()
        model = cnb.parallelize(gpt(tied), strategy=strategy)
        cnb.forward_backward(model, loss_fn, inputs, targets)
        for kind in (1.0, float("inf"), 2.0):
            close(norm(model, kind), norm(reference, kind))
        clip = nn.utils.clip_grad_norm_
        close(clip(model.parameters(), 0.01), clip(reference.parameters(), 0.01))
        same_gradients(model, [p.grad for p in reference.parameters()])
    # Parameters that all lie on one stage; a model that is not parallel.
    close(norm(model.token, 2.0), norm(reference.token, 2.0))
    alone = nn.Linear(2, 2)
    alone(torch.ones(1, 2)).sum().backward()
    assert nn.utils.clip_grad_norm_(alone.parameters(), 9.0).item() == pytest.approx(6**0.5)


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "tp=2 pp=2")])
def test_gradient_norms_are_global(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_norms, strategy)


def _steps() -> bytes:
    world = World.current()
    model, optimizer = cnb.parallelize(gpt(), None, "dp=2 microbatches=2"), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cnb.parallelize(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        cnb.forward_backward(model, loss_fn, *batch(4))
        cnb.log(accuracy=torch.tensor(0.5))
        optimizer.step()
    return world.recorder.drain()


def test_steps_are_recorded(ranks: Any) -> None:
    builder = RecordBuilder()
    for frame in ranks(2).run(_steps):
        builder.feed(frame)
    record = builder.record()
    marks = [(int(m["step"]), m["phase"], m["name"]) for m in record.marks[record.marks["rank"] == 0]]
    assert marks == [
        (0, "begin", ""), (0, "metered", ""), (0, "log", "loss"), (0, "log", "accuracy"), (0, "end", ""),
        (1, "begin", ""), (1, "log", "loss"), (1, "log", "accuracy"), (1, "end", ""),
    ]  # fmt: skip
    own = record.slices[record.slices["rank"] == 1]
    compute = [(s["kind"], int(s["microbatch"])) for s in own[own["lane"] == "compute"]]
    assert compute == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("optimizer", -1)] * 2


def test_log_takes_numbers() -> None:
    with pytest.raises(ValueError, match=r"log\(accuracy=list\): a value must be one number"):
        cnb.log(accuracy=[1, 2])


def _explained() -> str:
    model = cnb.parallelize(gpt(), strategy="dp=2")
    inputs, targets = batch(4)
    with pytest.raises(ValueError, match="batch_size") as error:
        cnb.forward_backward(model, loss_fn, inputs, targets[:3])
    return str(error.value.__notes__[0])


def test_targets_of_another_length_are_explained(ranks: Any) -> None:
    for text in ranks(2).run(_explained):
        assert "targets of shape [3, 6]" in text
