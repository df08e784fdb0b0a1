"""parallelize refuses what cannot be right in one clear error, and notes what it chose."""

from typing import Any

import pytest
import torch
from small_gpt import INPUTS, TARGETS, gpt, loss_fn, train
from torch import nn

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
