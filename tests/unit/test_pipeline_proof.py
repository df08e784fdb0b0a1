"""The proof: every model's split equals the whole, planted faults are seen, nothing is left behind."""

from __future__ import annotations

import dataclasses

import pipeline_models as zoo
import pytest
import torch
from torch import nn

from colossal_nb.models import GPT
from colossal_nb.parallel.pipeline.proof import prove
from colossal_nb.parallel.pipeline.split import split
from colossal_nb.parallel.trace import trace


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_split_models_equal_the_whole_model(name: str, stages: int) -> None:
    model, (args, kwargs) = zoo.build(name), zoo.batch(name, 3)
    found = prove(model, split(model, trace(model, args, kwargs), stages), args, kwargs)
    assert found.output_difference <= 1e-12
    assert found.gradient_difference <= 1e-10
    assert found.used


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


class Sneaky(zoo.Trunk):
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
    class Masked(zoo.Trunk):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens).masked_fill(torch.arange(zoo.VOCABULARY) == 3, float("-inf"))

    torch.manual_seed(0)
    model, (args, kwargs) = Masked().double(), zoo.tokens(2)
    assert prove(model, split(model, trace(model, args, kwargs), 2), args, kwargs).output_difference <= 1e-12


def test_another_way_in_eval_mode_is_refused_not_answered_with_nan() -> None:
    class Moody(zoo.Trunk):
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
