"""The proof: every model's split equals the whole, planted faults are seen, nothing is left behind."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pipeline_models as zoo
import pytest
import torch
import trunk_models as trunk
from torch import nn

from colossal_nb.models import GPT
from colossal_nb.parallel.encoders import modules_call_modules
from colossal_nb.parallel.pipeline.first_step import FirstStep
from colossal_nb.parallel.pipeline.proof import prove
from colossal_nb.parallel.pipeline.pruned import prune
from colossal_nb.parallel.pipeline.split import split
from colossal_nb.parallel.pipeline.stage import Stage
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.trace import trace


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_split_models_equal_the_whole_model(name: str, stages: int) -> None:
    model, (args, kwargs) = zoo.build(name), zoo.batch(name, 3)
    found = prove(model, split(model, trace(model, args, kwargs), stages), args, kwargs)
    assert found.output_difference <= 1e-12
    assert found.gradient_difference <= 1e-10
    assert found.used == with_gradient(model, args, kwargs)
    assert found.used == frozenset().union(*found.reached)


def with_gradient(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    twin = copy.deepcopy(model)
    sum(leaf.sum() for leaf in leaves(twin(*copy.deepcopy(args), **kwargs))).backward()
    return {name for name, p in twin.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["gpt", "u-net", "tuples", "branch on a value", "keywords, dict, functional head"])
def test_every_dropped_crossing_tensor_is_seen(name: str) -> None:
    model, (args, kwargs) = zoo.build(name), zoo.batch(name, 2)
    good = split(model, trace(model, args, kwargs), 2)
    control = {value for value in good.needs[1] if name == "branch on a value" and value.unit == 1}
    for value in good.needs[1] - control:
        bad = dataclasses.replace(good, needs=(good.needs[0], good.needs[1] - {value}))
        with pytest.raises((ValueError, RuntimeError), match=r"NaN|would be wrong|differs"):
            prove(model, bad, args, kwargs)


def test_a_dropped_holder_is_seen() -> None:
    model, (args, kwargs) = zoo.build("tied gpt"), zoo.batch("tied gpt", 2)
    good = split(model, trace(model, args, kwargs), 2)
    for stages in ((0,), (1,)):
        bad = dataclasses.replace(good, holders={**good.holders, "token.weight": stages})
        with pytest.raises(ValueError, match="NaN"):
            prove(model, bad, args, kwargs)


class Sneaky(trunk.Trunk):
    """Hands a tensor to a later block through a Python list of floats: the record cannot see that."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:2]:
            x = block(x)
        hidden = torch.from_numpy(x.detach().numpy().copy())
        for block in self.blocks[2:]:
            x = block(x + hidden)
        return self.head(self.norm(x))


def test_data_that_leaves_torch_is_refused_not_trained_on() -> None:
    torch.manual_seed(0)
    model, (args, kwargs) = Sneaky().double(), zoo.tokens(2)
    planned = split(model, trace(model, args, kwargs), 2, cuts=["blocks.3"])
    with pytest.raises(ValueError, match="NaN"):
        prove(model, planned, args, kwargs)


class WrongGradient(nn.Module):
    """Right output, wrong gradient: a weight of another stage is read without being recorded as read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_a_wrong_gradient_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = WrongGradient().double(), torch.randn(2, 3, dtype=torch.float64)
    planned = split(model, trace(model, (x,)), 2)
    from colossal_nb.parallel.pipeline import stage

    monkeypatch.setattr(stage.Arrival, "gradient", lambda self: 1.001 * self.grad)
    with pytest.raises(ValueError, match=r"gradient of a\.\w+ differs"):
        prove(model, planned, (x,), {})


def test_the_proof_leaves_the_model_and_randomness_alone() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=16, layers=2, hidden=8, heads=2, dropout=0.1, tied=True)
    norm = nn.BatchNorm1d(8)
    model.blocks[0].register_module("extra", norm)
    fired: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    identities = {name: id(p) for name, p in model.named_parameters()}
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    state, args = torch.get_rng_state(), model.example_inputs()
    prove(model, split(model, trace(model, args), 2), args, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert identities == {name: id(p) for name, p in model.named_parameters()}
    assert model.head.weight is model.token.weight
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    assert not fired
    assert all(p.grad is None for p in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_dropout_does_not_reject_a_right_split() -> None:
    torch.manual_seed(0)
    model = GPT(vocab_size=16, layers=4, hidden=8, heads=2, dropout=0.3)
    args = model.example_inputs()
    assert prove(model, split(model, trace(model, args), 4), args, {}).gradient_difference <= 1e-5


def test_outputs_that_are_not_finite_by_themselves_are_compared_where_they_are_finite() -> None:
    class Masked(trunk.Trunk):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens).masked_fill(torch.arange(zoo.VOCABULARY) == 3, float("-inf"))

    torch.manual_seed(0)
    model, (args, kwargs) = Masked().double(), zoo.tokens(2)
    assert prove(model, split(model, trace(model, args, kwargs), 2), args, kwargs).output_difference <= 1e-12


def test_another_way_in_eval_mode_is_refused_not_answered_with_nan() -> None:
    class Moody(trunk.Trunk):
        """In eval mode the first block's output is used once more at the end."""

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            first = x = self.blocks[0](self.embedding(tokens))
            for block in self.blocks[1:]:
                x = block(x)
            return self.head(self.norm(x if self.training else x + first))

    torch.manual_seed(0)
    model, (args, kwargs) = Moody().double(), zoo.tokens(2)
    planned = split(model, trace(model, args, kwargs), 2)
    with pytest.raises(ValueError, match=r"in eval mode .*NaN"):
        prove(model, planned, args, kwargs)
    assert all(module.training for module in model.modules())


def test_who_keeps_a_parameter_elsewhere_still_has_the_same_one_after_the_proof() -> None:
    """A recurrent layer computes with a list of its own: the weights in it must be those that the optimizer moves."""
    model, (args, kwargs) = zoo.build("lstm"), zoo.batch("lstm", 2)
    expected = model(*args)
    prove(model, split(model, trace(model, args, kwargs), 2), args, kwargs)
    for layer in (model.first, model.second):
        kept = {id(weight) for weight in layer._flat_weights}
        assert kept == {id(p) for p in layer.parameters()}
    assert torch.equal(model(*args), expected)
    with torch.no_grad():
        model.first.weight_hh_l0.add_(1)
    assert not torch.equal(model(*args), expected)


def test_the_proof_brings_gradients_and_hooks_back() -> None:
    model, (args, kwargs) = zoo.build("parameters kept elsewhere"), zoo.batch("parameters kept elsewhere", 2)
    fired: list[str] = []
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 3.0)
        p.register_hook(lambda gradient, name=name: fired.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    planned = split(model, trace(model, args, kwargs), 2)
    prove(model, planned, args, kwargs)
    bad = dataclasses.replace(planned, needs=(planned.needs[0], frozenset()))
    with pytest.raises(ValueError, match="would be wrong"):
        prove(model, bad, args, kwargs)
    assert not fired
    assert all((p.grad == 3).all() and not p.isnan().any() for p in model.parameters())
    model(*args).sum().backward()
    assert sorted(fired) == sorted(2 * [name for name, _ in model.named_parameters()])


def test_a_forward_that_skips_units_is_refused_with_their_names() -> None:
    class Short(trunk.Trunk):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) * self.scale
            for block in self.blocks[: 4 if self.training else 2]:
                x = block(x)
            return self.head(self.norm(x))

    model, (args, kwargs) = Short().double(), zoo.tokens(2)
    planned = split(model, trace(model, args, kwargs), 2)
    with pytest.raises(
        ValueError, match=r"in eval mode the whole model did not call blocks\.2, blocks\.3: .*another way"
    ):
        prove(model, planned, args, kwargs)


class Ways(trunk.Trunk):
    """Calls its blocks in the order of `way`."""

    way = (0, 1, 2, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for number in self.way:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("way", "stage", "did"),
    [
        ((1, 2, 3), 0, "came to blocks.2 too early"),
        ((3, 2, 1, 0), 0, "came to blocks.3 too early"),
        ((0, 0, 1, 2, 3), 1, "was asked for blocks.0 2 times"),
        ((0, 1, 2, 3, 0), 1, "was asked for blocks.0 2 times"),
        ((1, 0, 2, 3), 1, "came to blocks.0 too early"),
        ((0, 1, 2), 1, "did not call blocks.3"),
    ],
)
def test_a_forward_that_goes_another_way_later_is_refused(way: tuple[int, ...], stage: int, did: str) -> None:
    model, (args, kwargs) = Ways().double(), zoo.tokens(2)
    planned = split(model, trace(model, args, kwargs), 2)
    assert planned.owned(0)[-1] == 2  # the embedding and two blocks
    first = Stage(model, planned, 0).run(args, kwargs, {}, {})
    received = {value: first.values[value] for value in planned.needs[1]}
    model.way = way
    with pytest.raises(RuntimeError, match=rf"^stage {stage} {did}: this forward took another way"):
        Stage(model, planned, stage).run(args, kwargs, received if stage else {}, first.specs if stage else {})


def test_fused_kernels_are_off_only_inside() -> None:
    for outside in (True, False):
        torch.backends.mha.set_fastpath_enabled(outside)
        try:
            with modules_call_modules():
                assert not torch.backends.mha.get_fastpath_enabled()
            assert torch.backends.mha.get_fastpath_enabled() is outside
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def stepped(model: nn.Module, expected: set[str], called: set[str], *args: Any, head: int | None = None) -> FirstStep:
    guard = FirstStep(model, dict(model.named_parameters()), frozenset(expected), frozenset(called))
    model.zero_grad()
    with guard.watching():
        output = model(*args)
        loss_of = guard.seeing(lambda found, number: found.sum() if head is None else found[head].sum())
        loss_of(output, 0).backward()
    return guard


def test_a_parameter_that_the_first_step_leaves_out_is_an_error_with_its_name() -> None:
    model, (args, _) = zoo.build("lstm"), zoo.batch("lstm", 2)
    names, called = with_gradient(model, args, {}), {name for name, _ in model.named_modules()}
    stepped(model, names, called, *args).check()
    model.second._flat_weights[1] = nn.Parameter(model.second.weight_hh_l0.detach().clone())
    model.second._flat_weight_refs = [None] * 4
    model.second._weights_have_changed = lambda: False
    with pytest.raises(RuntimeError, match=r"^second\.weight_hh_l0 got no gradient .*keep the Parameter itself"):
        stepped(model, names, called, *args).check()
    model.second.weight_hh_l0.requires_grad_(False)
    stepped(model, names, called, *args).check()


def test_a_head_that_the_loss_leaves_out_and_an_expert_that_nobody_chose_are_no_errors() -> None:
    model, (args, _) = zoo.build("two heads"), zoo.batch("two heads", 2)
    names, called = with_gradient(model, args, {}), {name for name, _ in model.named_modules()}
    assert {"other.weight", "head.weight"} <= names
    stepped(model, names, called, *args, head=0).check()
    assert model.other.weight.grad is None
    torch.manual_seed(0)
    routed = trunk.Routed().double()
    both, one = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 1], [2, 0]])
    names, called = with_gradient(routed, (both,), {}), {name for name, _ in routed.named_modules()}
    stepped(routed, names, called, one).check()
    assert routed.blocks[0].experts[1].weight.grad is None


def test_a_pruned_recurrent_layer_computes_with_what_the_stage_does_not_have() -> None:
    model, (args, kwargs) = zoo.build("gru"), zoo.batch("gru", 2)
    planned = split(model, trace(model, args, kwargs), 2)
    prune(model, planned, 0)
    absent = {name for name, holders in planned.holders.items() if 0 not in holders}
    assert absent
    assert all(p.isnan().all() == (name in absent) for name, p in model.named_parameters())
    assert model(*args).isnan().all()
