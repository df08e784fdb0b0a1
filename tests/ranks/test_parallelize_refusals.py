"""parallelize refuses what cannot be right in one clear error, and notes what it chose."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, close, gpt, loss_fn, train
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import colossal_nb as cnb
from colossal_nb.models import MLP
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.report import lines
from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy

pytestmark = pytest.mark.ranks


def refusal(call: Any, *args: Any, **keywords: Any) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **keywords)
    return str(error.value)


def _again() -> list[str]:
    world = World.current()
    world.notes.clear()
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    cnb.parallelize(model, optimizer, "tp=2")
    train(model, optimizer, 1)
    shapes = [p.shape for p in model.parameters()]
    cnb.parallelize(model, optimizer, "tp=2")
    cnb.parallelize(model, optimizer)
    assert [p.shape for p in model.parameters()] == shapes
    world.strategy = Strategy.parse("tp=2")
    train(model, optimizer, 1)
    other = refusal(cnb.parallelize, model, optimizer, "dp=2")
    world.strategy = Strategy.parse("dp=2")
    forward = refusal(cnb.forward_backward, model, loss_fn, INPUTS, TARGETS)
    plain = refusal(model, INPUTS)
    world.ranks, world.strategy = (0, 1, 2, 3), Strategy.parse("tp=2")  # more have come
    grown = refusal(model, INPUTS)
    world.ranks = (0, 1)
    return [*world.notes, other, forward, plain, grown]


def test_again_is_nothing_and_another_strategy_is_refused(ranks: Any) -> None:
    for first, second, other, forward, plain, grown in ranks(2).run(_again):
        assert first == second == "this model is parallel already (tp=2): parallelize changed nothing"
        assert 'parallel as tp=2; to move it: model, optimizer = cnb.redistribute(model, optimizer, "dp=2")' in other
        assert "this cell runs under dp=2" in forward and "parallel as tp=2" in forward
        assert plain == forward
        assert "begin the cell with %%colossal alone or with tp=2, or move the model: " in plain
        assert "this cell runs under dp=2 tp=2, but the model is parallel as dp=1 tp=2: " in grown
        assert "begin the cell with %%colossal dp=1 tp=2, or move the model (where all 4 ranks made it)" in grown


def _default() -> list[str]:
    world = World.current()
    world.notes.clear()
    model = cnb.parallelize(gpt())
    assert dict(layout_of(next(model.parameters())).mesh.sizes)["dp"] == 2
    return world.notes


def test_without_a_strategy_dp_takes_all_ranks(ranks: Any) -> None:
    assert ranks(2).run(_default) == [["no strategy is named: dp=2 over all ranks"]] * 2


def _bad_arguments() -> None:
    model = gpt()
    assert "takes a torch.nn.Module, not int" in refusal(cnb.parallelize, 3)
    assert "has no parameters" in refusal(cnb.parallelize, nn.ReLU())
    assert "not str" in refusal(cnb.parallelize, model, "adam")
    old = torch.optim.SGD(gpt().parameters())
    assert "holds none of the model's parameters" in refusal(cnb.parallelize, model, old)
    assert "holds none of the model's parameters" in refusal(cnb.parallelize, model, [old])
    other = cnb.parallelize(nn.Linear(2, 2), strategy="dp=2")
    both = torch.optim.SGD([*model.parameters(), *other.parameters()])
    assert "holds 2 parameters of another parallel model" in refusal(cnb.parallelize, model, both)
    assert "comes first" in refusal(cnb.forward_backward, model, loss_fn, INPUTS, TARGETS)
    assert "needs 4 engines, there are 2" in refusal(cnb.parallelize, model, None, "tp=4")
    assert "tp_size" in refusal(cnb.parallelize, model, None, "tp_size=2")
    assert "pp=2 or more" in refusal(cnb.parallelize, model, None, "dp=2", cuts=["blocks.1"])
    assert "plan= is not built yet" in refusal(cnb.parallelize, model, None, "dp=2", {"*": "x"})
    for kind in ("LBFGS", "Muon", "Adafactor"):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        text = refusal(cnb.parallelize, model, getattr(torch.optim, kind)(matrices), "tp=2")
        assert text.startswith(kind) and "AdamW" in text and "or dp alone" in text
    sparse = torch.optim.SparseAdam(list(model.parameters()))
    assert "sparse gradients, which are not summed" in refusal(cnb.parallelize, model, sparse, "dp=2")
    own = Own(model.parameters())
    assert "is not known to update every element" in refusal(cnb.parallelize, model, own, "tp=2")
    pair = [own, Same(model.parameters(), lr=0.1)]
    assert cnb.parallelize(model, pair, "dp=2") == (model, pair)
    assert "is not known to update every element" in refusal(cnb.redistribute, model, None, "tp=2")


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Something of its own."""


class Same(torch.optim.SGD):
    """Only the defaults are its own."""


def test_bad_arguments_get_one_clear_error(ranks: Any) -> None:
    ranks(2).run(_bad_arguments)


@pytest.mark.parametrize(("strategy", "words"), [("pp=4", "pp=4"), ("tp=3", "tp=3")])
def test_models_that_cannot_be_cut_so(ranks: Any, strategy: str, words: str) -> None:
    count = 4 if strategy == "pp=4" else 3
    if strategy == "pp=4":
        texts = ranks(count).run(_no_units)
    else:
        texts = ranks(count).run(_three_heads)
    assert all(words in text for text in texts)


def _no_units() -> str:
    torch.manual_seed(0)
    return refusal(cnb.parallelize, MLP(4, 8, 3, layers=2), None, "pp=4")


def _three_heads() -> str:
    return refusal(cnb.parallelize, gpt(), None, "tp=3")


def _odd_weights() -> str:
    torch.manual_seed(World.current().rank == 1)
    return refusal(cnb.parallelize, MLP(4, 8, 3), None, "dp=4")


def test_ranks_whose_weights_differ_are_named(ranks: Any) -> None:
    for text in ranks(4).run(_odd_weights):
        assert text.startswith("the weights of rank 1 differ from the others'")
        assert "torch.manual_seed" in text


def _odd_settings(when: str) -> str:
    """The sentence where rank 1's lr is another one: before parallelize, by a scheduler in a later step, in an
    optimizer that nobody gave to parallelize, before verify."""
    odd = 0.5 if World.current().rank else 0.01
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(odd) if when == "tensor" else odd, betas=(0.8, 0.9))
    if when in ("before", "tensor"):
        return refusal(cnb.parallelize, model, optimizer, "dp=2")
    optimizer.param_groups[0]["lr"] = 0.01
    cnb.parallelize(model, None if when == "ungiven" else optimizer, "dp=2")
    if when == "verify":
        optimizer.param_groups[0]["betas"] = (odd, 0.9)
        return refusal(cnb.verify, model, loss_fn, INPUTS, TARGETS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 4 else odd)
    for step in range(4):
        train(model, optimizer, 1)
        assert schedule.get_last_lr() == [0.01], step
        schedule.step()
    before = [p.detach().clone() for p in model.parameters()]
    found = refusal(train, model, optimizer, 1)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[0]["lr"] = 0.02
    train(model, optimizer, 1)
    return found


@pytest.mark.parametrize("when", ["before", "tensor", "later", "ungiven", "verify"])
def test_optimizer_settings_that_differ_are_named(ranks: Any, when: str) -> None:
    shown = {"verify": "betas of param group 0 is (0.01, 0.9) on rank 0 and (0.5, 0.9) on rank 1"}
    shown |= dict.fromkeys(("later", "ungiven"), "lr of param group 0 is 0.0001 on rank 0 and 0.005 on rank 1")
    found = ranks(2).run(_odd_settings, when)
    assert found[0] == found[1]
    assert shown.get(when, "lr of param group 0 is 0.0") in found[0]
    assert "on rank 0 and 0.5 on rank 1" in found[0] or when not in ("before", "tensor")
    assert "a name that was set in a cell that ran on fewer ranks" in found[0]


def _caveats() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.AlphaDropout(0.1), nn.Dropout(0.1))
    model.append(nn.GRU(4, 1, num_layers=2, dropout=0.1))
    cnb.parallelize(model, strategy="dp=2")
    return lines(model)


def test_the_report_says_where_numbers_differ(ranks: Any) -> None:
    for first, *rest in ranks(2).run(_caveats):
        assert first == "Sequential under dp=2 (dp=2): this rank holds 61 of 61 parameters"
        assert not any("GRU" in line for line in rest)
        assert any("batch norm sees one part" in line for line in rest)


def test_init_outside_of_torchrun() -> None:
    if World.current().store is None:
        assert "in a notebook a cell begins with %%colossal" in refusal(cnb.init, "dp=2")


X, Y = torch.linspace(-1, 1, 96, dtype=torch.float64).view(6, 16).sin(), torch.arange(6) % 4


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def _other_head(model: nn.Sequential) -> None:
    torch.manual_seed(1)
    model[2] = nn.Linear(32, 4).double()


def _other_weight(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _one_more(model: nn.Sequential) -> None:
    torch.manual_seed(2)
    model.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh())).double()


def _one_less(model: nn.Sequential) -> None:
    model[2] = nn.Identity()


SWAPS = [
    (_other_head, "2.weight (and 1 more) was replaced after parallelize, which knows another parameter of that name"),
    (_other_weight, "0.weight was replaced after parallelize"),
    (_one_more, "3.0.weight (and 1 more) was added after parallelize, which does not know it"),
    (_one_less, "2.weight (and 1 more) was removed after parallelize, which still knows it"),
]


def _uses(strategy: str, place: Path) -> list[set[str]]:
    found = []
    for swap, _ in SWAPS:
        model = cnb.parallelize(_layers(), strategy=strategy)
        cnb.forward_backward(model, loss_fn, X, Y)
        swap(model)
        said = {refusal(each, model, loss_fn, X, Y) for each in (cnb.forward_backward, cnb.verify)}
        with torch.no_grad():
            said |= {refusal(model, X), refusal(cnb.save, place, model), refusal(copy.deepcopy, model)}
        if strategy != "dp=2":
            said.add(refusal(cnb.parallelize, model, torch.optim.SGD(model.parameters())))
        found.append(said)
    return found


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_a_parameter_that_parallelize_does_not_know_is_refused_at_every_use(
    ranks: Any, strategy: str, tmp_path: Path
) -> None:
    again = "call it again with a new optimizer" if strategy == "dp=2" else f"the model is cut ({strategy}), so"
    for found in ranks(2).run(_uses, strategy, tmp_path / "saved"):
        for (text,), (_, begin) in zip(found, SWAPS, strict=True):
            assert text.startswith(begin) and "p.copy_(new)" in text and again in text
    assert not (tmp_path / "saved").exists()


def _losses(model: nn.Module, optimizer: torch.optim.Optimizer, parallel: bool) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, loss_fn, X, Y) if parallel else loss_fn(model(X), Y)
        if not parallel:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _taken_up() -> None:
    for swap, _ in SWAPS:
        whole, model = _layers(), cnb.parallelize(_layers(), strategy="dp=2")
        cnb.forward_backward(model, loss_fn, X, Y)
        model.zero_grad()
        for each in (whole, model):
            swap(each)
        first, second = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (whole, model))
        cnb.parallelize(model, second)
        assert cnb.verify(model, loss_fn, X, Y)
        close(_losses(model, second, True), _losses(whole, first, False))
        for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
            close(found, expected)
        close(copy.deepcopy(model)(X), whole(X))


def test_under_dp_parallelize_again_takes_up_what_was_replaced(ranks: Any) -> None:
    ranks(2).run(_taken_up)


def _allowed(strategy: str) -> list[str]:
    model = cnb.parallelize(_layers(), strategy=strategy)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    cnb.forward_backward(model, loss_fn, X, Y)
    whole = {name: value * 2 for name, value in model.state_dict().items()}
    if strategy == "dp=2":
        lent = {name: nn.Parameter(value) for name, value in whole.items()}
        close(functional_call(model, lent, (X,)), functional_call(_layers(), lent, (X,)))
        prune.l1_unstructured(model[0], "weight", 0.5)
        cnb.forward_backward(model, loss_fn, X, Y)
        prune.remove(model[0], "weight")
        parametrizations.spectral_norm(model[2])
        cnb.forward_backward(model, loss_fn, X, Y)
        parametrizations.weight_norm(model[0])
        assert "original0 (and 1 more) was added" in refusal(cnb.forward_backward, model, loss_fn, X, Y)
        return []
    model[2].weight.data = model[2].weight.data.clone()
    model[0].weight.requires_grad_(False)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assigned = refusal(model.load_state_dict, whole, assign=True)
    model.load_state_dict(whole)
    cnb.forward_backward(model, loss_fn, X, Y)
    return [assigned]


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_what_leaves_the_parameters_in_place_is_allowed(ranks: Any, strategy: str) -> None:
    for said in ranks(2).run(_allowed, strategy):
        assert all("leave assign out" in text for text in said)


class Sum(nn.Module):
    """No example can be made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _layers()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.net(a + b)


def _early_copy(strategy: str) -> str:
    model = cnb.parallelize(Sum(), strategy=strategy)
    said = refusal(copy.deepcopy, model)
    assert cnb.verify(model, loss_fn, (X, X), Y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cnb.forward_backward(model, loss_fn, (X, X), Y)
    average = copy.deepcopy(model)
    optimizer.step()
    with torch.no_grad():
        for mine, other in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 1.0)
        close(average(X, X), model(X, X))
    return said


@pytest.mark.parametrize("strategy", ["tp=2", "pp=2"])
def test_a_model_that_waits_for_its_first_batch_is_copied_after_it(ranks: Any, strategy: str) -> None:
    for said in ranks(2).run(_early_copy, strategy):
        assert "this Sum is split at its first batch" in said and "make the copy after the first step" in said


def _pickled(strategy: str) -> set[str]:
    model = cnb.parallelize(_layers(), strategy=strategy)
    cnb.forward_backward(model, loss_fn, X, Y)
    found = set()
    for way in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(nn.ModuleList([copy.deepcopy(model)]))):
        with pytest.raises(TypeError) as error:
            way()
        found.add(str(error.value))
    return found


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_a_parallel_model_is_not_pickled(ranks: Any, strategy: str) -> None:
    for (text,) in ranks(2).run(_pickled, strategy):
        assert "cnb.save(path, model, optimizer), or torch.save(model.state_dict(), path)" in text
