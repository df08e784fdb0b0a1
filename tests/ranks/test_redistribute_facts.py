"""Around a move: what goes along, what is taken back, what is refused and leaves everything as it was."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, close, gpt, loss_fn, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel import redistribute
from colossal_nb.parallel.handle import find, holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy

pytestmark = pytest.mark.ranks


def parallel_gpt(strategy: str, steps: int = 1, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    model = gpt()
    optimizer = kind(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, steps)
    return model, optimizer


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def between_backward_and_step(strategies: list[str]) -> dict[str, Tensor]:
    model, optimizer = parallel_gpt(strategies[0])
    optimizer.zero_grad()
    cnb.forward_backward(model, loss_fn, INPUTS[:2], TARGETS[:2])
    for strategy in strategies[1:]:
        cnb.redistribute(model, optimizer, strategy)
    cnb.forward_backward(model, loss_fn, INPUTS[2:], TARGETS[2:])
    optimizer.step()
    return whole(model)


@pytest.mark.parametrize("route", [["tp=2", "pp=2"], ["pp=2", "dp=2"], ["dp=2", "tp=2"]])
def test_gradients_go_along(ranks: Any, route: list[str]) -> None:
    expected = ranks(1).run(between_backward_and_step, ["dp=1"])[0]
    for found in ranks(2).run(between_backward_and_step, route):
        for name, value in expected.items():
            close(found[name], value)


def traces(model: nn.Module) -> dict[str, Any]:
    """What passes leave on modules and parameters."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "_hooks" in key and value is not None}
        plain = {key for key in vars(module) if "hooks" not in key}
        numbers = {key: value for key, value in vars(module).items() if isinstance(value, int)}
        found[name] = type(module).__name__, hooks, plain, numbers
    for name, p in model.named_parameters():
        found[f"parameter {name}"] = len(p._backward_hooks or {}), list(p.shape), str(layout_of(p))
    return found


def there_and_back(strategy: str, others: list[str]) -> tuple[Any, Any]:
    fresh, _ = parallel_gpt(strategy, steps=0)
    model, optimizer = parallel_gpt(strategy)
    for other in [*others, strategy]:
        cnb.redistribute(model, optimizer, other)
    cnb.redistribute(model, optimizer, "dp=2")
    other, _ = parallel_gpt("dp=2", steps=0)
    pairs = traces(model), traces(other)
    cnb.redistribute(model, optimizer, strategy)
    return (traces(fresh), traces(model)), pairs


@pytest.mark.parametrize(("strategy", "others"), [("tp=2", ["pp=2", "dp=2"]), ("pp=2", ["tp=2"]), ("dp=2", ["tp=2"])])
def test_nothing_of_a_former_strategy_is_left(ranks: Any, strategy: str, others: list[str]) -> None:
    for (fresh, found), (plain, other) in ranks(2).run(there_and_back, strategy, others):
        assert found == fresh
        assert plain == other


def bytes_held(model: nn.Module, optimizer: Any) -> tuple[int, int]:
    """Of the storages behind parameters, and behind states."""
    states = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    sums = []
    own = [p for p in model.parameters() if holds(p, World.current().rank)]
    for tensors in (own, states):
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        sums.append(sum(storages.values()))
    return sums[0], sums[1]


def sizes(route: list[str]) -> tuple[Any, Any, Any]:
    gc.collect()
    base = World.current().ledger.totals()
    model, optimizer = parallel_gpt(route[0])
    for strategy in route[1:]:
        cnb.redistribute(model, optimizer, strategy)
    counted = World.current().ledger.totals()
    fresh, its_optimizer = parallel_gpt(route[-1])
    grown = counted.parameter - base.parameter, counted.optimizer - base.optimizer
    return bytes_held(model, optimizer), grown, bytes_held(fresh, its_optimizer)


@pytest.mark.parametrize("route", [["dp=2", "tp=2"], ["dp=2", "pp=2"], ["tp=2", "pp=2", "tp=2"]])
def test_what_went_elsewhere_is_freed(ranks: Any, route: list[str]) -> None:
    for moved, counted, fresh in ranks(2).run(sizes, route):
        assert moved == counted == fresh


def one_block() -> nn.Module:
    """Cannot be cut into two stages."""
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=1, hidden=16, heads=4, max_length=8).double()


def refused(start: str, strategies: list[str]) -> tuple[list[str], list[float]]:
    model = one_block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, start)
    losses = train(model, optimizer, 2)
    before, said = traces(model), []
    values = [p.detach().clone() for p in model.parameters()]
    for strategy in strategies:
        try:
            cnb.redistribute(model, optimizer, strategy)
        except ValueError as error:
            said.append(str(error))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert traces(model) == before
    assert find(model).strategy == Strategy.parse(start).filled(World.current().world_size)
    return said, losses + train(model, optimizer, 2)


@pytest.mark.parametrize("start", ["dp=4", "tp=4", "dp=2 tp=2"])
def test_a_refusal_leaves_everything_as_it_was(ranks: Any, start: str) -> None:
    wrong = ["pp=2 dp=1", "pp=2", "tp=2 pp=4", "zero=1", "tp=3 colour=red"]
    expected = ranks(1).run(refused, "dp=1", [])[0][1]
    outcomes = ranks(4).run(refused, start, wrong)
    for said, losses in outcomes:
        assert said == outcomes[0][0]
        assert ["pp=2 is more than the 1 block of" in text for text in said[:2]] == [True, True]
        assert "needs 8 engines, there are 4" in said[2]
        assert "zero=1 is not built yet" in said[3]
        assert "colour" in said[4]
        close(torch.tensor(losses), torch.tensor(expected))


def misused() -> list[str]:
    said = []

    def told(function: Any, *args: Any, **keywords: Any) -> None:
        try:
            function(*args, **keywords)
        except ValueError as error:
            said.append(str(error))

    world = World.current()
    told(cnb.redistribute, gpt(), None, "tp=2")
    model, optimizer = parallel_gpt("tp=2")
    told(cnb.redistribute, model, torch.optim.SGD(gpt().parameters(), lr=1.0), "dp=2")
    told(cnb.redistribute, model, optimizer, "dp=2" if world.rank else "pp=2")
    with cnb.accumulate(model):
        told(cnb.redistribute, model, optimizer, "dp=2")
    world.lives = {1: 2}
    told(cnb.redistribute, model, optimizer, "dp=2")
    told(cnb.save, Path("nowhere"), model)
    world.lives = {}
    world.strategy = Strategy.parse("dp=2")
    told(train, model, optimizer, 1)
    told(cnb.parallelize, model, optimizer)
    cnb.redistribute(model, optimizer)  # the cell's
    train(model, optimizer, 1)
    world.strategy, world.subset = None, frozenset({0})
    told(cnb.redistribute, model, optimizer, "dp=1")
    world.subset = None
    assert cnb.redistribute(model, strategy="dp=1") is model
    if world.rank:
        told(train, model, optimizer, 1)
        told(cnb.save, Path("nowhere"), model)
    return said


def test_misuse_is_told(ranks: Any) -> None:
    zero, one = ranks(2).run(misused)
    assert zero == one[:9]
    first, foreign, differ, inside, lost, unsaved, cell, again, subset = zero
    assert "is not parallel yet" in first
    assert "holds none of the model's parameters" in foreign
    assert "want different strategies" in differ
    assert "do it after" in inside
    assert "this model lost rank 1's part" in lost
    assert "this model lost rank 1's part" in unsaved
    assert 'cnb.redistribute(model, optimizer, "dp=2")' in cell
    assert 'cnb.redistribute(model, optimizer, "dp=2")' in again
    assert "begin it with %%colossal alone" in subset
    assert ["rank 1 holds nothing of this model" in text for text in one[9:]] == [True, True]
    assert all(text.endswith("begin the cell with %%colossal dp=1") for text in one[9:])


def normed(strategies: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """A batch norm's statistics lie with its stage."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)]
    model: nn.Module = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=generator).double(), torch.randint(5, (8,), generator=generator)
    model, optimizer = cnb.parallelize(model, optimizer, strategies[0])
    losses = []
    for number, strategy in enumerate(strategies):
        if number:
            cnb.redistribute(model, optimizer, strategy)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(cnb.forward_backward(model, loss_fn, x, y).item())
            optimizer.step()
    return whole(model), losses


def test_buffers_of_all_stages_go_along(ranks: Any) -> None:
    for one, others in (
        ("dp=1", ["pp=2 microbatches=1", "tp=2", "pp=2 microbatches=1"]),
        ("microbatches=2", ["dp=2", "pp=2 microbatches=2", "dp=2"]),
    ):
        _goes_along(ranks, [one] * 3, others)


def _goes_along(ranks: Any, one: list[str], others: list[str]) -> None:
    expected, losses = ranks(1).run(normed, one)[0]
    for found, own in ranks(2).run(normed, others):
        close(torch.tensor(own), torch.tensor(losses))
        for name, value in expected.items():
            close(found[name], value)


class Odd(nn.Module):
    """No example input can be made for it: it is cut at its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[0] == 2 and tokens.shape[1] == 8:
            raise RuntimeError("not for me")
        result: Tensor = self.gpt(tokens)
        return result


def deferred(strategies: list[str]) -> list[float]:
    model: nn.Module = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategies[0])
    losses = train(model, optimizer, 2)
    for strategy in strategies[1:]:
        cnb.redistribute(model, optimizer, strategy)
        losses += train(model, optimizer, 2)
    return losses


def test_a_model_that_waits_for_its_first_batch(ranks: Any) -> None:
    expected = ranks(1).run(deferred, ["dp=1"])[0]
    for route in (["tp=2", "pp=2"], ["dp=2", "tp=2"]):
        found = ranks(2).run(deferred, route)[0]
        close(torch.tensor(found[:2]), torch.tensor(expected))
        assert len(found) == 4
        assert found == ranks(2).run(deferred, route)[1]


def the_users_own(strategies: list[str]) -> list[Any]:
    """Hooks, modes, attributes, random numbers, a plain backward, a copy, a second optimizer."""
    model = gpt()
    head = list(model.head.parameters())
    body = [p for name, p in model.named_parameters() if "head" not in name]
    first, second = torch.optim.AdamW(body, lr=1e-2), torch.optim.SGD(head, lr=0.1, momentum=0.9)
    model, first = cnb.parallelize(model, first, strategies[0])
    cnb.parallelize(model, second)
    seen: list[int] = []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    model.blocks[0].note = "mine"
    torch.manual_seed(11)
    for strategy in strategies[1:]:
        with torch.enable_grad():
            loss_fn(model(INPUTS), TARGETS).backward()
        first.step()
        second.step()
        model.zero_grad()
        model, both = cnb.redistribute(model, [first, second], strategy)
        assert both == [first, second]
        model = copy.deepcopy(model) if strategy == strategies[-1] else model
    assert model.blocks[0].note == "mine"
    seen.clear()
    model.eval()
    with torch.no_grad():
        output = model(INPUTS)
    assert seen
    assert not model.norm.training
    return [output, torch.randn(2), len(second.state)]


def test_the_users_own_things_stay(ranks: Any) -> None:
    expected = ranks(1).run(the_users_own, ["dp=1", "dp=1 microbatches=2", "dp=1"])[0]
    for found in ranks(2).run(the_users_own, ["dp=2", "tp=2", "dp=2"]):
        close(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert found[2] == 1


def cut_short() -> str:
    """Stop meets the ranks when the weights are whole and not yet in their new parts."""
    model = gpt()
    model, optimizer = cnb.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "tp=2")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(redistribute, "_settle", stop)
        cnb.redistribute(model, optimizer, "dp=2")
    with pytest.raises(ValueError, match=r"cnb.redistribute was cut short") as caught:
        cnb.forward_backward(model, loss_fn, INPUTS, TARGETS)
    with pytest.raises(ValueError, match=r"cnb.redistribute was cut short"):
        cnb.redistribute(model, optimizer, "dp=2")
    return str(caught.value)


def test_a_move_that_was_cut_short_is_said(ranks: Any) -> None:
    for text in ranks(2).run(cut_short):
        assert text.endswith("run the cell that makes the model again")
