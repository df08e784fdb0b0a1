"""The corpus is real, fixed, split by file and the same on every rank."""

import math
import sys

import pytest
import torch

from colossal_nb import corpus


def test_files_are_sources_and_the_splits_are_disjoint() -> None:
    train, validation = corpus.files("train"), corpus.files("validation")
    assert not set(train) & set(validation)
    assert len(train) > 5 * len(validation) > 0
    assert any(path.name == "argparse.py" for path in train + validation)
    assert not any("site-packages" in path.parts for path in train + validation)


def test_targets_are_the_next_byte() -> None:
    inputs, targets = next(corpus.batches(1, batch_size=3, length=20))
    assert inputs.shape == targets.shape == (3, 20)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in bytes(corpus.data("train").numpy())


def test_batches_repeat_with_the_seed_and_differ_without() -> None:
    first, again = (list(corpus.batches(3, 2, 8, seed=5)) for _ in range(2))
    assert all(torch.equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True))
    other = next(corpus.batches(1, 2, 8, seed=6))
    assert not torch.equal(first[0][0], other[0])
    assert not torch.equal(first[0][0], first[1][0])


def test_batches_leave_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    list(corpus.batches(2, 2, 8))
    assert torch.equal(before, torch.random.get_rng_state())


def test_unigram_entropy_is_that_of_source_text() -> None:
    entropy = corpus.unigram_entropy("validation")
    counts = torch.bincount(corpus.data("validation").int())
    shares = [count / int(counts.sum()) for count in counts.tolist() if count]
    assert entropy == pytest.approx(-sum(share * math.log(share) for share in shares), abs=1e-12)
    assert 2.0 < entropy < math.log(256)


@pytest.mark.parametrize(("arguments", "words"), [((0, 2, 8), "count=0"), ((1, 2, 10**9), "length=1000000000")])
def test_bad_arguments_are_refused_at_the_call(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        corpus.batches(*arguments)


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="train, validation"):
        corpus.data("test")


def test_digits_are_images_with_labels() -> None:
    images, labels = corpus.digits("train")
    assert images.shape == (1437, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert sorted(labels.unique().tolist()) == list(range(10))
    unseen, truth = corpus.digits("validation")
    assert (len(unseen), len(truth)) == (360, 360)
    with pytest.raises(ValueError, match="train, validation"):
        corpus.digits("test")


def test_digits_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        corpus.digits()
