"""The same seed, the same weights: on any number of ranks, eagerly and lazily."""

from typing import Any

import pytest
import torch
from small_gpt import batch, loss_fn
from torch import Tensor

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel import lazy

pytestmark = pytest.mark.ranks


def make() -> GPT:
    return GPT(vocab_size=29, layers=2, hidden=48, heads=4, max_length=32, tied=True)


def trained(is_lazy: bool, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after two steps, and the losses."""
    torch.manual_seed(3)
    if is_lazy:
        with cnb.lazy():
            model: Any = make()
        assert lazy.is_waiting(model)
    else:
        model = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = batch(5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        optimizer.step()
    return before, {name: value.clone() for name, value in model.state_dict().items()}, losses


@pytest.mark.parametrize(
    ("count", "strategy"), [(1, ""), (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "tp=2 pp=2"), (8, "dp=2 tp=2 pp=2")]
)
def test_weights_are_the_same(ranks: Any, count: int, strategy: str) -> None:
    torch.manual_seed(3)
    expected = make().state_dict()
    eager, late = (ranks(count).run(trained, is_lazy, strategy) for is_lazy in (False, True))
    for before, _, _ in eager + late:
        assert all(torch.equal(before[name], value) for name, value in expected.items())
    for one, other in zip(eager, late, strict=True):
        assert one[2] == other[2]
        assert all(torch.equal(other[1][name], value) for name, value in one[1].items())


def too_large() -> str:
    with cnb.lazy():
        model = make()
    lazy.free_bytes = lambda: 100_000
    try:
        cnb.parallelize(model, strategy="dp=2")
    except ValueError as error:
        assert lazy.is_waiting(model)
        return str(error)
    return ""


def test_copies_that_have_no_room_are_not_built(ranks: Any) -> None:
    pool = ranks(2)
    texts = pool.run(too_large)
    pool.close()  # its modules are changed
    assert texts[0] == texts[1]
    assert "2 ranks are about to build 2 copies of this GPT of 0.00 GiB each" in texts[0]
