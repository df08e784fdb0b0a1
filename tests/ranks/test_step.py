"""forward_backward, accumulate and clipping: global values in and out, whatever the batch; and what is recorded."""

from typing import Any

import pytest
import torch
from recorded import record_of
from small_gpt import batch, close, gpt, loss_fn, same_gradients, sequential
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.models import MLP
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


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
    slices = record_of(World.current().recorder.drain()).slices
    same_gradients(model, [sum(each) for each in zip(*every, strict=True)])
    sizes = slices[(slices["kind"] == "all_reduce") & (slices["of"] == "gradients")]["payload_bytes"]
    return int((sizes > 4 * len(list(model.parameters()))).sum())


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (4, "dp=2 pp=2")])
def test_accumulate_reduces_once(ranks: Any, count: int, strategy: str) -> None:
    assert ranks(count).run(_accumulated, strategy) == [1] * count


def _odd_data(strategy: str, calls: int) -> str:
    model = cnb.parallelize(MLP(4, 8, 3, layers=4).double(), strategy=strategy)

    def step(odd: bool) -> None:
        x = torch.ones(4, 4, dtype=torch.float64)
        x[3, 3] += odd
        cnb.forward_backward(model, functional.cross_entropy, x, torch.zeros(4).long())

    for _ in range(calls):
        step(odd=False)
    before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="differs from") as error:
        step(odd=World.current().rank == 2)
    for p, grad in zip(model.parameters(), before, strict=True):
        assert (p.grad is None) if grad is None else torch.equal(p.grad, grad)
    step(odd=False)
    return str(error.value)


@pytest.mark.parametrize("strategy", ["dp=4", "tp=2 pp=2"])
@pytest.mark.parametrize("calls", [0, 5])
def test_ranks_whose_data_differ_are_named(ranks: Any, strategy: str, calls: int) -> None:
    for text in ranks(4).run(_odd_data, strategy, calls):
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
    record = record_of(*ranks(2).run(_steps))
    marks = [(int(m["step"]), m["phase"], m["name"]) for m in record.marks[record.marks["rank"] == 0]]
    assert marks == [
        (0, "begin", ""), (0, "metered", ""), (0, "log", "loss"), (0, "log", "accuracy"), (0, "end", ""),
        (1, "begin", ""), (1, "log", "loss"), (1, "log", "accuracy"), (1, "end", ""),
    ]  # fmt: skip
    own = record.slices[record.slices["rank"] == 1]
    compute = [(s["kind"], int(s["microbatch"])) for s in own[own["lane"] == "compute"]]
    assert compute == [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("optimizer", -1)] * 2


def test_log_takes_numbers() -> None:
    with pytest.raises(ValueError, match=r"log\(accuracy=\[.*\]\): a value is one number"):
        cnb.log(accuracy=[1, 2])


def _explained() -> str:
    model = cnb.parallelize(gpt(), strategy="dp=2")
    inputs, targets = batch(4)
    with pytest.raises(ValueError, match="the inputs have 4 samples") as error:
        cnb.forward_backward(model, loss_fn, inputs, targets[:3])
    return str(error.value)


def test_targets_of_another_length_are_explained(ranks: Any) -> None:
    for text in ranks(2).run(_explained):
        assert "targets of shape [3, 6]" in text


class Following(nn.Module):
    """Running averages of its own, one under the name of a norm's; of a constant; a number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(4)
        for name in ("average", "still", "table", "running_mean", "running_var"):
            self.register_buffer(name, torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.running_mean.lerp_(x.detach().mean(0), 0.5)
        self.still.add_(1)
        self.calls += 1
        return self.linear(self.norm(x))


def _following() -> list[str]:
    model = cnb.parallelize(Following(), strategy="dp=2")
    for _ in range(2):
        cnb.forward_backward(model, functional.cross_entropy, torch.arange(16.0).view(4, 4), torch.arange(4) % 3)
    assert torch.equal(model.running_mean, torch.arange(8.0).view(2, 4).mean(0) * 0.75) == (World.current().rank == 0)
    return [note for note in World.current().notes if "buffer" in note]


def test_buffers_that_replicas_move_apart_are_named_once(ranks: Any) -> None:
    for notes in ranks(2).run(_following):
        assert len(notes) == 1
        assert "writes into the buffers average, running_mean: each replica's part" in notes[0]


class Counting(nn.Module):
    """Counts its forwards; fills a table in each, the same every time; its first layer counts as well."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Layer(4, 4), nn.Linear(4, 3)
        self.first.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.table.fill_(7)
        return self.second(self.first(x))


def _counting(strategy: str) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    model = cnb.parallelize(Counting(), strategy=strategy)
    for _ in range(3):
        cnb.forward_backward(model, functional.cross_entropy, torch.ones(4, 4), torch.arange(4) % 3)
    return model.seen.item(), [note for note in World.current().notes if "buffer" in note]


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2 microbatches=1", "pp=2", "dp=2 microbatches=2"])
def test_buffers_that_count_parts_of_a_batch_are_named(ranks: Any, strategy: str) -> None:
    for seen, notes in ranks(2).run(_counting, strategy):
        counted = [note for note in notes if "in each of the 2 microbatches, not once" in note]
        once = strategy in ("dp=2", "tp=2", "pp=2 microbatches=1")
        assert seen == (3.0 if once else 6.0) and len(counted) == (not once)
        assert all("seen" in note for note in counted) and not any("table" in note for note in notes)
        assert any("first.calls on one pipeline stage" in note for note in notes) == ("=1" in strategy)


def normed_stages(strategy: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """What a rank reads of the running statistics after a step, an evaluation in training mode, and a load."""
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = []
    for use in (
        lambda: cnb.forward_backward(model, functional.cross_entropy, NORMED, torch.arange(8) % 3),
        lambda: model(NORMED),
        lambda: model.load_state_dict(model.state_dict() | before),
    ):
        with torch.set_grad_enabled(not found):
            use()
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return before, found


NORMED = torch.linspace(-1, 1, 32).double().sin().view(8, 4)


def normed() -> nn.Module:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
    return nn.Sequential(nn.Linear(4, 6), norms[0], nn.Linear(6, 6), norms[1], nn.Linear(6, 3)).double()


def test_running_statistics_read_alike_on_all_stages(ranks: Any) -> None:
    expected, model = [], normed()
    for parts in (2, 1):
        for part in NORMED.tensor_split(parts):
            model(part)
        expected.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for before, found in ranks(2).run(normed_stages, "pp=2 microbatches=2"):
        torch.testing.assert_close(found, [*expected, before], rtol=1e-10, atol=1e-10)
