"""The user's unedited loss meets sharded logits: values and gradients of every road, and what each one gathers."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from recorded import record_of
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.collectives import group_of
from colossal_nb.parallel.tensor.embedding1d import RowRange
from colossal_nb.parallel.tensor.values import even_parts
from colossal_nb.parallel.tensor.vocabulary import ShardedLogits, gather, wrap
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh

pytestmark = pytest.mark.ranks
CLASSES = 13  # neither 2 nor 4 divides it
Road = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    error: float
    gradient_error: float
    calls: list[tuple[str, int]]
    notes: list[str]


def drain() -> list[tuple[str, int]]:
    slices = record_of(World.current().recorder.drain()).slices
    return [(str(row["kind"]), int(row["payload_bytes"])) for row in slices]


def compared(road: Road, targets: Tensor, tp: int) -> Outcome:
    """One road from logits to a loss, forward and backward, sharded against whole."""
    torch.manual_seed(0)
    shape = (*targets.shape, CLASSES)
    whole = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mesh, rank = Mesh({"tp": tp}), World.current().rank
    bounds = tuple((part[0], len(part)) for part in even_parts(CLASSES, tp))
    rows = RowRange(mesh, "tp", rank, bounds, "head")
    first, count = bounds[rank]
    local = whole.detach()[..., first : first + count].clone().requires_grad_()
    expected = road(whole, targets)
    expected.sum().backward()
    group_of(mesh, "tp").run("barrier", [])
    drain()
    loss = road(wrap(local, rows, local.ndim - 1), targets)
    loss = gather(loss)
    loss.sum().backward()
    assert type(loss) is Tensor
    assert loss.shape == expected.shape
    difference = local.grad - whole.grad[..., first : first + count]
    error = float((loss - expected).abs().max())
    return Outcome(error, float(difference.abs().max()), drain(), World.current().notes)


def padded() -> Tensor:
    targets = torch.arange(20).reshape(4, 5) * 3 % CLASSES
    return targets.masked_fill(targets == 6, -100)


PARALLEL: dict[str, Road] = {
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "view": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "view by a tuple": lambda x, y: F.cross_entropy(x.view((20, CLASSES)), y.view(-1)),
    "reshape to the classes": lambda x, y: F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1)),
    "view to what is left": lambda x, y: F.cross_entropy(x.view(20, -1), y.view(-1)),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "sum": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none"),
    "another ignored index": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().clamp(min=0), ignore_index=0),
    "class dim 1": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "class dim 1, permuted, none": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="none"),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "shifted with an ellipsis": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1)
    ),
    "last token": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "masked": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "one sample": lambda x, y: F.cross_entropy(x[1, 2], y[1, 2]),
    "soft cap": lambda x, y: F.cross_entropy((torch.tanh(x / 3.0) * 3.0).flatten(0, 1), y.flatten()),
    "temperature": lambda x, y: F.cross_entropy(x.float().double().div(0.7).flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("tp", [2, 4])
def test_these_roads_run_vocabulary_parallel(ranks, tp: int) -> None:
    for name, outcomes in _all(ranks(tp), PARALLEL, padded(), tp).items():
        for one in outcomes:
            single = "float" in PARALLEL[name].__code__.co_names
            assert one.error < (1e-6 if single else 1e-13), name
            assert one.gradient_error < (1e-6 if single else 1e-14), name
            # max, picked logit, sum of exponentials; nothing backward
            assert [kind for kind, _ in one.calls] == ["all_reduce"] * 3, name
            assert one.notes == [], name


GATHERED: dict[str, tuple[Road, str]] = {
    "class weights": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=torch.linspace(0.5, 2, CLASSES).double()),
        "cross_entropy",
    ),
    "label smoothing": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.1),
        "cross_entropy",
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), F.one_hot(y.flatten().clamp(0), CLASSES).double() * 0.9),
        "cross_entropy",
    ),
    "mean squares": (lambda x, y: F.mse_loss(x, torch.linspace(-1, 1, x.numel()).double().view(x.shape)), "mse_loss"),
    "log_softmax": (
        lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
        "log_softmax",
    ),
    "written in place": (lambda x, y: F.cross_entropy((x * 1.0).mul_(2).flatten(0, 1), y.flatten()), "mul_"),
    "banned classes": (lambda x, y: F.cross_entropy(banned(x * 1.0).flatten(0, 1), y.flatten()), "__setitem__"),
    "some classes": (lambda x, y: x[..., 2:9].exp().mean(), "__getitem__"),
}


def banned(logits: Tensor) -> Tensor:
    logits[..., 5] = -1.0
    return logits


@pytest.mark.parametrize("tp", [2, 4])
def test_other_roads_gather_once_and_say_so(ranks, tp: int) -> None:
    roads = {name: road for name, (road, _) in GATHERED.items()}
    for name, outcomes in _all(ranks(tp), roads, padded(), tp).items():
        for one in outcomes:
            assert one.error < 1e-13, name
            assert one.gradient_error < 1e-14, name
            assert one.calls == [("all_gather", 20 * CLASSES * 8)], name
            assert len(one.notes) == 1, name
            assert f"gathered for {GATHERED[name][1]};" in one.notes[0]


def _all(pool, roads: dict[str, Road], targets: Tensor, tp: int) -> dict[str, list[Outcome]]:
    found = pool.run(_each, roads, targets, tp)
    return {name: [outcomes[name] for outcomes in found] for name in roads}


def _each(roads: dict[str, Road], targets: Tensor, tp: int) -> dict[str, Outcome]:
    outcomes = {}
    for name, road in roads.items():
        outcomes[name] = compared(road, targets, tp)
        World.current().notes = []
    return outcomes


def questions(tp: int) -> None:
    bounds = tuple((part[0], len(part)) for part in even_parts(CLASSES, tp))
    rank = World.current().rank
    rows = RowRange(Mesh({"tp": tp}), "tp", rank, bounds, "head")
    local = torch.zeros(2, bounds[rank][1], requires_grad=True)
    logits = wrap(local, rows, 1)
    assert (logits.shape, logits.size(-1), logits.ndim, logits.numel(), len(logits)) == ((2, 13), 13, 2, 26, 2)
    assert (logits.dtype, logits.device.type, logits.requires_grad) == (torch.float32, "cpu", True)
    assert isinstance(logits, Tensor)
    assert isinstance(logits.float(), ShardedLogits)
    assert f"{rows.first}:{rows.first + rows.count} of 13 on tp {rank}" in repr(logits)
    if rank == 0:  # one rank alone may print and ask: no collective
        assert "2, 13" in f"{logits!r}"
    with pytest.raises(IndexError, match="Target is out of bounds"):
        F.cross_entropy(logits, torch.tensor([1, 13]))
    assert torch.isnan(F.cross_entropy(logits, torch.tensor([-100, -100])))
    with pytest.raises(RuntimeError, match="a view of vocabulary-parallel logits is written in place"):
        logits[:1].mul_(2.0)


def test_form_is_whole_and_asking_for_it_is_local(ranks) -> None:
    ranks(2).run(questions, 2)


class UsersOwn(torch.autograd.Function):
    """A loss that goes past torch's functions."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * grad * logits


def test_a_function_of_the_users_own_gets_whole_logits(ranks) -> None:
    for one in ranks(2).run(compared, lambda x, y: UsersOwn.apply(x), padded(), 2):
        assert one.error < 1e-12
        assert one.gradient_error < 1e-14


def test_low_precision_is_summed_in_float32(ranks) -> None:
    def road(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x.bfloat16().flatten(0, 1), y.flatten())

    for one in ranks(2).run(compared, road, padded(), 2):
        assert one.error <= 2**-6, "one step of bfloat16 between 2 and 4"
        assert one.gradient_error < 1e-3
        # 20 samples, 4 bytes each
        assert one.calls == [("all_reduce", 80)] * 3
