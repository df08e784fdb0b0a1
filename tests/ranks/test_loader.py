"""Batches of a dataset: the same on every rank and under every strategy, each rank reading what it uses."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from small_gpt import gpt, loss_fn
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import colossal_nb as cnb
from colossal_nb.parallel.unread import Unread

pytestmark = pytest.mark.ranks

COUNT, SIZE = 38, 8  # four whole batches and one of six


class Text(Dataset[Any]):
    """Token windows, one id per sample changed at random; counts what is read in this process."""

    def __init__(self) -> None:
        self.text = torch.randint(29, (COUNT, 7), generator=torch.Generator().manual_seed(5))
        self.read: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        line = self.text[index].clone()
        line[random.randrange(7)] = int(torch.randint(29, ())) if np.random.rand() < 0.5 else 0
        return line[:-1], line[1:]


def _sequential(workers: int = 0) -> tuple[list[Any], list[float]]:
    """Batches and losses of one device, two epochs."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches, losses = [], []
    given = cnb.loader(Text(), SIZE, shuffle=True, seed=3, num_workers=workers)
    for _ in range(2):
        for inputs, targets in given:
            batches.append((inputs.tolist(), targets.tolist()))
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return batches, losses


def _train(strategy: str, workers: int) -> tuple[list[float], list[int]]:
    data = Text()
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy=strategy)
    losses = []
    given = cnb.loader(data, SIZE, shuffle=True, seed=3, num_workers=workers)
    for _ in range(2):
        for inputs, targets in given:
            assert isinstance(inputs, Unread)
            optimizer.zero_grad()
            losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
            optimizer.step()
    return losses, [given.reads, len(data.read)]


@pytest.mark.parametrize(
    ("count", "strategy"), [(2, "dp=2"), (4, "dp=4"), (2, "tp=2"), (4, "dp=2 pp=2"), (2, "dp=2 microbatches=3")]
)
def test_training_from_a_loader_equals_one_device(ranks: Any, count: int, strategy: str) -> None:
    _, expected = _sequential()
    for losses, _ in ranks(count).run(_train, strategy, 0):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)


def test_each_rank_reads_its_part_alone(ranks: Any) -> None:
    results = ranks(4).run(_train, "dp=4", 0)
    reads = [counted for _, (counted, _) in results]
    assert reads == [in_dataset for _, (_, in_dataset) in results]
    # Each epoch once by all together. The first batch whole by everyone: its loss is compared with that of its parts.
    # And the sample that shows a batch's shapes where a smaller batch has moved the ranks' parts.
    assert 2 * COUNT + 3 * SIZE <= sum(reads) <= 2 * COUNT + 3 * SIZE + 3 * 3
    assert max(reads) <= SIZE + 9 * 2 + 3


def test_worker_processes_read_the_same_ahead(ranks: Any) -> None:
    _, expected = _sequential(workers=1)
    assert expected == _sequential()[1]
    for losses, (counted, in_this_process) in ranks(2).run(_train, "dp=2", 2):
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
        assert in_this_process <= SIZE + 2 * 4 + 2 * 1, "until its habit is known; of smaller batches a part"
        assert COUNT + 4 <= counted <= COUNT + 4 + 2 * 1


def _look() -> list[Any]:
    """The user looks into batches: whole and right on every rank."""
    model = cnb.parallelize(gpt(), strategy="dp=2")
    found = []
    for _ in range(2):
        for inputs, targets in (given := cnb.loader(Text(), SIZE, shuffle=True, seed=3)):
            assert len(inputs) == inputs.shape[0] == targets.size(0)
            with torch.no_grad():
                hits = (model(inputs).argmax(-1) == targets).float().mean().item()
            found.append((inputs.tolist(), targets.tolist(), hits, given.state_dict()["batches"]))
    return found


def test_a_batch_that_the_program_looks_into_is_whole(ranks: Any) -> None:
    model = gpt()
    batches, _ = _sequential()
    for found in ranks(2).run(_look):
        for number, (inputs, targets, hits, taken) in enumerate(found):
            assert (inputs, targets) == batches[number % 5]
            found_here = model(torch.tensor(inputs)).argmax(-1) == torch.tensor(targets)
            assert hits == found_here.float().mean().item()
            assert taken == number % 5 + 1


def _resumed(stop: int) -> list[Any]:
    whole = cnb.loader(Text(), 4, shuffle=True, seed=1)
    everything = [batch[0].tolist() for _ in range(2) for batch in whole]
    first, seen = cnb.loader(Text(), 4, shuffle=True, seed=1), []
    batches = (batch[0].tolist() for _ in range(2) for batch in first)
    seen = [next(batches) for _ in range(stop)]
    second = cnb.loader(Text(), 4, shuffle=True, seed=1)
    second.load_state_dict(first.state_dict())
    seen += [batch[0].tolist() for batch in second]
    if stop < len(whole):
        seen += [batch[0].tolist() for batch in second]
    assert seen == everything
    return everything


@pytest.mark.parametrize("stop", [1, 9, 10, 13])
def test_a_loader_goes_on_where_another_stopped(ranks: Any, stop: int) -> None:
    assert ranks(2).run(_resumed, stop) == [_resumed(stop)] * 2


def _epochs(saved_inside: bool) -> list[Any]:
    """A position saved at the end of an epoch: the next `for` is the next epoch, there and where it is loaded."""
    first, second = (cnb.loader(Text(), SIZE, shuffle=True, seed=3) for _ in range(2))
    state: dict[str, Any] = {}
    for _ in first:
        if saved_inside:
            state = first.state_dict()
    second.load_state_dict(state or first.state_dict())
    found = [[batch[0].tolist() for batch in each] for each in (first, second)]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("saved_inside", [True, False])
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(saved_inside: bool) -> None:
    assert _epochs(saved_inside) == [inputs for inputs, _ in _sequential()[0][5:]]


def _texts() -> list[Any]:
    named = [{"x": torch.full((2,), float(i)), "y": i, "name": f"n{i}"} for i in range(5)]
    return [(batch["x"].tolist(), batch["y"].tolist(), batch["name"]) for batch in cnb.loader(named, 2, drop_last=True)]


def test_samples_with_texts_come_whole(ranks: Any) -> None:
    expected = [([[0.0] * 2, [1.0] * 2], [0, 1], ["n0", "n1"]), ([[2.0] * 2, [3.0] * 2], [2, 3], ["n2", "n3"])]
    assert ranks(2).run(_texts) == [expected] * 2


def test_a_break_ends_the_epoch_and_random_states_outside_are_untouched() -> None:
    given = cnb.loader(Text(), SIZE, shuffle=True, seed=3)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    drawn = [torch.rand(())]
    for _ in given:
        drawn.append(torch.rand(()))
        break
    assert torch.equal(torch.stack(drawn), expected)
    assert [batch[0].tolist() for batch in given] == [inputs for inputs, _ in _sequential()[0][5:]]


@pytest.mark.parametrize(
    ("dataset", "size", "words"),
    [(iter([1]), 1, "len"), ([1, 2], 0, "at least 1"), ([], 1, "no batch"), (TensorDataset(torch.ones(3)), -1, "1")],
)
def test_wrong_arguments(dataset: Any, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cnb.loader(dataset, size)
    with pytest.raises(ValueError, match="position is one of a loader with"):
        cnb.loader([1, 2], 1).load_state_dict({"epoch": 0, "batches": 0, "seed": 5, "batch_size": 1})
