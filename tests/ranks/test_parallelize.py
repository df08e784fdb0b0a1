"""parallelize changes the user's objects in place and keeps what they are."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, TEXT, gpt, loss_fn, train
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.engine.requests import describe
from colossal_nb.models import GPT, MLP
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.report import lines
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
MESHES = [(2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "tp=2 pp=2")]


def _identity(strategy: str) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = dict(model.named_parameters())
    found = cnb.parallelize(model, optimizer, strategy)
    assert found[0] is model and found[1] is optimizer
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert optimizer.param_groups[0]["params"] == list(before.values())
    assert isinstance(model, GPT) and isinstance(model.head, nn.Linear)
    for p in after.values():
        layout = layout_of(p)
        assert layout is not None
        assert layout.local_shape(World.current().rank) in (tuple(p.shape), None)


@pytest.mark.parametrize(("count", "strategy"), MESHES)
def test_parameters_stay_the_same_objects(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_identity, strategy)


def _half_way(strategy: str, kind: str) -> list[float]:
    """Two steps on one device, then four in parallel: state and gradients that existed are cut with the model."""
    model = gpt()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses = []
    for step in range(6):
        if step == 2:
            model, optimizer = cnb.parallelize(model, optimizer, strategy)
        optimizer.zero_grad()
        if step < 2:
            loss = loss_fn(model(INPUTS), TARGETS)
            loss.backward()
        else:
            loss = cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "NAdam"])
@pytest.mark.parametrize(("count", "strategy"), MESHES)
def test_optimizer_state_is_cut_in_the_same_place(ranks: Any, count: int, strategy: str, kind: str) -> None:
    (expected,) = ranks(1).run(_half_way, "", kind)
    for losses in ranks(count).run(_half_way, strategy, kind):
        assert losses == pytest.approx(expected, rel=1e-10)


def _gradient_is_cut() -> None:
    model, whole = gpt(), gpt()
    for each in (model, whole):
        loss_fn(each(INPUTS), TARGETS).backward()
    cnb.parallelize(model, strategy="tp=2 pp=2")
    for p, expected in zip(model.parameters(), whole.parameters(), strict=True):
        found = cnb.full_grad(p)
        assert found is not None and expected.grad is not None
        torch.testing.assert_close(found, expected.grad, rtol=1e-12, atol=1e-15)
        assert torch.equal(cnb.full(p), expected)


def test_gradients_that_exist_are_cut(ranks: Any) -> None:
    ranks(4).run(_gradient_is_cut)


def _state(strategy: str, tied: bool) -> None:
    model = gpt(tied)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    cnb.parallelize(model, strategy=strategy)
    state = model.state_dict()
    assert list(state) == list(whole)
    for name, value in whole.items():
        assert torch.equal(state[name], value)
    other = gpt(tied)
    changed = {name: value + 1 for name, value in state.items()}
    assert str(model.load_state_dict(changed)) == "<All keys matched successfully>"
    for name, value in model.state_dict().items():
        assert torch.equal(value, changed[name])
    other.load_state_dict(model.state_dict())
    expected = loss_fn(other(INPUTS), TARGETS).item()
    assert cnb.forward_backward(model, loss_fn, INPUTS, TARGETS).item() == pytest.approx(expected, rel=1e-10)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({name: value[:1] for name, value in state.items()})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("count", "strategy"), MESHES)
def test_state_dict_is_whole(ranks: Any, count: int, strategy: str, tied: bool) -> None:
    ranks(count).run(_state, strategy, tied)


def _copied(strategy: str) -> None:
    model = cnb.parallelize(gpt(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = copy.deepcopy(model)
    first = train(model, optimizer, 2)
    assert cnb.forward_backward(average, loss_fn, INPUTS, TARGETS).item() == first[0] != first[1]
    reference = gpt()
    with torch.no_grad():
        torch.testing.assert_close(average(INPUTS), reference(INPUTS), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in average.state_dict().items())


@pytest.mark.parametrize(("count", "strategy"), MESHES)
def test_a_copy_of_the_model_is_its_own(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_copied, strategy)


def _texts() -> tuple[str, str, str]:
    model = cnb.parallelize(gpt(), strategy="tp=2 pp=2")
    return repr(model.blocks[0].up.bias), repr(model.norm.weight), repr(nn.Linear(1, 1).weight)


def _described(strategy: str) -> str:
    return describe(cnb.parallelize(gpt(tied=True), strategy=strategy))


@pytest.mark.parametrize("strategy", ["tp=2", "pp=2"])
def test_a_model_is_as_large_as_all_its_parts(ranks: Any, strategy: str) -> None:
    count = sum(p.numel() for p in gpt(tied=True).parameters())
    assert ranks(2).run(_described, strategy) == [f"GPT with {count:,} parameters, parallel"] * 2


def test_the_text_of_a_parameter_shows_its_layout(ranks: Any) -> None:
    found = ranks(4).run(_texts)
    assert found[1][0].endswith("\nrank 1 holds [32] of float64 [64], pp: On(0), tp: Shard(0, by index)")
    assert found[1][1].endswith("\nrank 1 holds nothing of float64 [16], pp: On(1)")
    assert all(text.startswith("Parameter containing:\ntensor(") for each in found for text in each)
    assert "holds" not in found[0][2]


class Opaque(nn.Module):
    """Its input cannot be guessed: no example can be made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = MLP(features=6, hidden=8, classes=5, layers=4).double()

    def forward(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(x * weights["scale"])
        return out


def _deferred(strategy: str) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(5, (6,), generator=generator)
    given = (x, {"scale": torch.full((6, 1), 2.0, dtype=torch.float64)})
    reference = Opaque()
    loss = loss_fn(reference(*given), y)
    loss.backward()
    world = World.current()
    world.notes.clear()
    model = Opaque()
    optimizer = torch.optim.Adam(model.parameters())
    cnb.parallelize(model, optimizer, strategy)
    assert cnb.forward_backward(model, loss_fn, given, y).item() == pytest.approx(loss.item(), rel=1e-12)
    for p, whole in zip(model.parameters(), reference.parameters(), strict=True):
        found = cnb.full_grad(p)
        assert found is not None and whole.grad is not None
        torch.testing.assert_close(found, whole.grad, rtol=1e-10, atol=1e-14)
    assert lines(model)[0].startswith(f"Opaque under {strategy}")
    return list(world.notes)


@pytest.mark.parametrize("strategy", ["tp=2", "pp=2"])
def test_a_model_without_an_example_is_split_at_its_first_batch(ranks: Any, strategy: str) -> None:
    for notes in ranks(2).run(_deferred, strategy):
        assert notes[0].startswith("no example input could be made for this Opaque")


def _memory(strategy: str) -> tuple[int, int, int]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, 2)
    totals = World.current().ledger.totals()
    local = 8 * sum(p.numel() for p in model.parameters() if not p.isnan().any())
    assert totals.parameter - local in range(9)
    assert totals.gradient == local
    assert totals.optimizer - 2 * local in range(4 * 40)
    assert totals.activation == 8 * TEXT.numel()  # the batch, saved by the embedding and still the user's
    return totals.parameter, totals.gradient, totals.optimizer


@pytest.mark.parametrize(("count", "strategy"), [(2, "dp=2"), (2, "tp=2")])
def test_states_in_memory_are_what_the_rank_holds(ranks: Any, count: int, strategy: str) -> None:
    ranks(count).run(_memory, strategy)


def test_one_rank_trains_in_a_plain_process() -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    reference = copy.deepcopy(model)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer)
    expected = []
    for _ in range(3):
        other.zero_grad()
        loss = loss_fn(reference(INPUTS), TARGETS)
        loss.backward()
        other.step()
        expected.append(loss.item())
    assert train(model, optimizer, 3) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


SCRIPT = """
import torch, colossal_nb as cnb
from colossal_nb.models import MLP
cnb.init("dp=2")
cnb.init("dp=2")
torch.manual_seed(0)
model = MLP(4, 8, 3).double()
model = cnb.parallelize(model)
x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
loss = cnb.forward_backward(model, torch.nn.functional.cross_entropy, x, torch.arange(5) % 3)
print(f"loss {loss.item():.12f}\\n", end="")  # in one write: the ranks share a pipe
"""


def test_the_same_program_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    torch.manual_seed(0)
    model = MLP(4, 8, 3).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
    loss = functional.cross_entropy(model(x), torch.arange(5) % 3)
    assert [line for line in done.stdout.splitlines() if line.startswith("loss")] == [f"loss {loss.item():.12f}"] * 2
