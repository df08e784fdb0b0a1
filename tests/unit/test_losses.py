"""The parts of a mean loss, put together by their counts, are the loss of the whole."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.parallel.counting import CountingMeans, Seen
from colossal_nb.parallel.losses import Part, own_loss, part

Loss = Callable[[Tensor, Tensor], Tensor]


def together(loss: Loss, output: Tensor, target: Tensor, at: int) -> float:
    """The loss from the samples before and after `at`."""
    parts = [measure(loss, output[piece], target[piece]) for piece in (slice(0, at), slice(at, None))]
    return sum(one.sum for one in parts) / sum(one.count for one in parts)


def measure(loss: Loss, output: Tensor, target: Tensor) -> Part:
    with CountingMeans(by_hand=True) as means:
        value = loss(output, target)
    return part(value, means.taken(), len(output), len(output))


torch.manual_seed(0)
N, C = 7, 5
ROWS = torch.randn(N, C, dtype=torch.float64)
CLASSES = torch.tensor([0, 4, -100, 2, 2, -100, 1])
SIGNS = torch.tensor([1, -1, 1, 1, -1, -1, 1])
REAL = torch.randn(N, C, dtype=torch.float64)
SHARES = torch.softmax(REAL, 1)
WEIGHT = torch.linspace(0.5, 2, C, dtype=torch.float64)
BITS = (REAL > 0).double()

CASES: dict[str, tuple[Loss, Tensor, Tensor]] = {
    "cross_entropy": (F.cross_entropy, ROWS, CLASSES),
    "cross_entropy module": (nn.CrossEntropyLoss(), ROWS, CLASSES),
    "class weights": (lambda x, y: F.cross_entropy(x, y, WEIGHT), ROWS, CLASSES),
    "own ignore_index": (lambda x, y: F.cross_entropy(x, y.abs() % 5, ignore_index=2), ROWS, CLASSES),
    "label smoothing": (lambda x, y: F.cross_entropy(x, y, WEIGHT, label_smoothing=0.3), ROWS, CLASSES),
    "class shares": (lambda x, y: F.cross_entropy(x, y, WEIGHT), ROWS, SHARES),
    "nll": (lambda x, y: F.nll_loss(x.log_softmax(1), y, WEIGHT), ROWS, CLASSES),
    "twice the mean": (lambda x, y: 2 * F.cross_entropy(x, y) + 1, ROWS, CLASSES),
    "mse": (F.mse_loss, ROWS, REAL),
    "mse weight": (lambda x, y: F.mse_loss(x, y, weight=y.abs()), ROWS, REAL),
    "l1": (F.l1_loss, ROWS, REAL),
    "smooth l1": (nn.SmoothL1Loss(), ROWS, REAL),
    "huber": (F.huber_loss, ROWS, REAL),
    "huber weight": (lambda x, y: F.huber_loss(x, y, weight=y.abs()), ROWS, REAL),
    "bce": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=WEIGHT), ROWS, BITS),
    "bce with logits": (lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=WEIGHT), ROWS, BITS),
    "kl": (lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="mean"), ROWS, SHARES),
    "kl batchmean": (lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="batchmean"), ROWS, SHARES),
    "poisson": (F.poisson_nll_loss, ROWS, REAL.abs()),
    "gaussian": (lambda x, y: F.gaussian_nll_loss(x, y, torch.ones_like(x)), ROWS, REAL),
    "soft margin": (F.soft_margin_loss, ROWS, BITS * 2 - 1),
    "hinge embedding": (F.hinge_embedding_loss, ROWS, BITS * 2 - 1),
    "cosine embedding": (lambda x, y: F.cosine_embedding_loss(x, x.flip(1), y), ROWS, SIGNS),
    "margin ranking": (lambda x, y: F.margin_ranking_loss(x[:, 0], x[:, 1], y), ROWS, SIGNS),
    "multi margin": (lambda x, y: F.multi_margin_loss(x, y.abs() % 5), ROWS, CLASSES),
    "multilabel margin": (lambda x, y: F.multilabel_margin_loss(x, y[:, None].abs() % 5 * torch.ones(C).long()),
                          ROWS, CLASSES),
    "multilabel soft margin": (F.multilabel_soft_margin_loss, ROWS, BITS),
    "triplet": (lambda x, y: F.triplet_margin_loss(x, y, x.flip(1)), ROWS, REAL),
    "triplet with distance": (lambda x, y: F.triplet_margin_with_distance_loss(x, y, x.flip(1)), ROWS, REAL),
    "own scalar of samples": (lambda x, y: ((x - y) ** 2).sum(1).mean(), ROWS, REAL),
    "masked mean": (lambda x, y: -x.log_softmax(1)[y != -100].gather(1, y[y != -100][:, None]).mean(), ROWS, CLASSES),
    "sum over a mask": (lambda x, y: (x[:, 0] * (y > 1)).sum() / (y > 1).sum(), ROWS, CLASSES),
    "sum over a mask that may be empty": (lambda x, y: (x[:, 0] * (y < 0)).sum() / (y < 0).sum().clamp(min=1),
                                          ROWS, CLASSES),
    "torch's sum over a count": (lambda x, y: F.cross_entropy(x, y, reduction="sum") / (y > 0).sum(), ROWS, CLASSES),
    "sum over numel": (lambda x, y: torch.sum((x - y) ** 2) / y.numel(), ROWS, REAL),
    "negated mean": (lambda x, y: -torch.mean(x * y), ROWS, REAL),
    "two means over the same": (lambda x, y: F.mse_loss(x, y) + 0.1 * F.l1_loss(x, y), ROWS, REAL),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_make_the_whole(name: str) -> None:
    loss, output, target = CASES[name]
    assert together(loss, output, target, at=2) == pytest.approx(loss(output, target).item(), rel=1e-12)


def test_sum_and_count_are_taken_as_they_are() -> None:
    def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(x, y, reduction="sum"), (y != -100).sum()

    first, second = measure(loss, ROWS[:3], CLASSES[:3]), measure(loss, ROWS[3:], CLASSES[3:])
    assert (first.count, second.count) == (2, 3)
    assert (first.sum + second.sum) / 5 == pytest.approx(F.cross_entropy(ROWS, CLASSES).item(), rel=1e-12)


def test_a_part_in_which_all_is_ignored_adds_nothing() -> None:
    rows = ROWS.clone().requires_grad_()
    one = measure(F.cross_entropy, rows, torch.full((N,), -100))
    assert (one.sum, one.count) == (0, 0)
    one.backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.zeros_like(rows))


def test_the_gradient_is_that_of_the_sum() -> None:
    rows = ROWS.clone().requires_grad_()
    measure(F.cross_entropy, rows, CLASSES).backward()
    expected = ROWS.clone().requires_grad_()
    F.cross_entropy(expected, CLASSES, reduction="sum").backward()
    torch.testing.assert_close(rows.grad, expected.grad, rtol=1e-12, atol=0)


def test_old_reduction_arguments_are_understood() -> None:
    means = CountingMeans()
    for old in ({"size_average": True}, {"size_average": False}, {"reduce": False}):
        with means, pytest.warns(UserWarning, match="size_average"):
            F.mse_loss(ROWS, REAL, **old)
    assert [mean.count for mean in means.taken().means] == [N * C]


def test_sums_are_not_counted() -> None:
    with CountingMeans() as means:
        total = F.cross_entropy(ROWS, CLASSES, reduction="sum")
        F.mse_loss(ROWS, REAL, reduction="none").mean()
    assert means.taken() == Seen(sums=(total,))
    assert means.taken() == Seen()


def test_what_is_exact() -> None:
    def exact(loss: Loss) -> bool:
        return measure(loss, ROWS, CLASSES).exact

    assert exact(F.cross_entropy)
    assert exact(nn.CrossEntropyLoss(reduction="sum"))
    assert exact(lambda x, y: x.logsumexp(1).mean())
    assert not exact(lambda x, y: 2 * F.cross_entropy(x, y))
    assert not exact(lambda x, y: F.cross_entropy(x - x.mean(), y))
    assert not exact(lambda x, y: x.pow(2).sum() / y.numel())
    assert not exact(lambda x, y: x.norm())


def test_what_is_guessed() -> None:
    """A loss that is made of means with plain numbers alone counts what they count, whatever the data are."""

    def guessed(loss: Loss) -> bool:
        return measure(loss, ROWS, CLASSES).guessed

    def kept(y: Tensor) -> Tensor:
        return (y >= 0).double()

    def logged(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(x, y) / 4
        assert loss.item() > 0
        return loss

    known: list[Loss] = [
        F.cross_entropy,
        lambda x, y: 1 - 2 * F.cross_entropy(x, y) / 4,
        lambda x, y: F.cross_entropy(x, y) + 0.3 * F.mse_loss(x, x.flip(1)),
        lambda x, y: -(x.sum(1) * kept(y)).sum() / kept(y).sum(),
        lambda x, y: -x.sum(),
        logged,
    ]
    assert [guessed(loss) for loss in known] == [False] * len(known)
    unknown: list[Loss] = [
        lambda x, y: (x.sum(1) * kept(y)).sum() * (1 / kept(y).sum()),
        lambda x, y: x.sum(1) @ kept(y) / kept(y).sum(),
        lambda x, y: (x.sum(1) * kept(y)).mean() / kept(y).mean(),
        lambda x, y: (x.sum(1) * kept(y)).mean() * (N / kept(y).sum().item()),
        lambda x, y: x.nanmean(),
        lambda x, y: sum(x.sum(1)) / len(x),
    ]
    assert [guessed(loss) for loss in unknown] == [True] * len(unknown)


def test_different_counts_are_noticed() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y) + F.mse_loss(x, x.flip(1))

    one = measure(loss, ROWS, CLASSES)
    assert (one.count, one.mixed) == (5, 5 + N * C)


@pytest.mark.parametrize(
    ("value", "words"),
    [(3.0, "must return a scalar tensor or"), (torch.ones(4), r"returned a tensor \[4\]"), (None, "not NoneType")],
)
def test_other_results_are_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part(value, Seen(), 4, 4)


def test_the_models_own_loss() -> None:
    loss = torch.ones(())
    assert own_loss(SimpleNamespace(loss=loss)) is loss
    assert own_loss({"loss": loss}) is loss
    with pytest.raises(ValueError, match=r"Tensor\) has no .loss"):
        own_loss(loss)
