"""The record of one forward: storages, calls, costs; and that recording leaves nothing behind."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn

from colossal_nb.models import GPT
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.trace import Enter, Exit, Op, storage_of, trace


class Pair(NamedTuple):
    left: object
    right: object


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"value": self.linear(x) * scale}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.kept = x
        y = self.inner(x, scale=2.0)["value"]
        y += 1
        y = self.inner(y.view(-1, 4))["value"]
        return self.drop(self.norm(y))


def test_calls_follow_the_tree_and_count_repeats() -> None:
    found = trace(Outer(), (torch.randn(3, 4),))
    assert [(call.name, call.nth) for call in found.calls] == [
        ("", 0),
        ("inner", 0),
        ("inner.linear", 0),
        ("inner", 1),
        ("inner.linear", 1),
        ("norm", 0),
        ("drop", 0),
    ]
    assert found.calls[2].parent is found.calls[1]
    assert [call.name for call in found.root.descendants()] == [call.name for call in found.calls[1:]]
    assert found.named("inner")[0].kwargs == {"scale": 2.0}
    assert found.root.has_parameters
    assert not found.named("drop")[0].has_parameters


def test_flops_of_a_linear_are_its_multiplications_and_additions() -> None:
    found = trace(Outer(), (torch.randn(3, 4),))
    linear = found.named("inner.linear")[0]
    assert 2 * 3 * 4 * 4 <= linear.flops < 2 * 3 * 4 * 4 + 8  # the rest counts one for each small operation
    assert found.root.flops >= sum(call.flops for call in found.named("inner"))


def test_views_and_in_place_operations_keep_the_storage() -> None:
    found = trace(Outer(), (torch.randn(3, 4),))
    exits = {(e.call.name, e.call.nth): e.outputs for e in found.log if isinstance(e, Exit)}
    enters = {(e.call.name, e.call.nth): e.inputs for e in found.log if isinstance(e, Enter)}
    assert enters["inner", 1] == exits["inner", 0]
    assert any(exits["inner", 0][0] in e.mutated for e in found.log if isinstance(e, Op))
    assert found.outputs == exits["", 0]
    assert found.inputs == enters["", 0]


def test_parameters_are_known_by_storage_and_ties_are_one() -> None:
    model = GPT(vocab_size=16, layers=1, hidden=8, heads=2, tied=True)
    found = trace(model, model.example_inputs())
    assert found.parameters[storage_of(model.head.weight)] == "token.weight"
    assert set(found.parameters.values()) == {name for name, _ in model.named_parameters()}
    read = {key for e in found.log if isinstance(e, Op) for key in e.inputs if key in found.parameters}
    assert {found.parameters[key] for key in read} == set(found.parameters.values())


def test_recording_leaves_model_inputs_and_randomness_as_they_were() -> None:
    model, x = Outer(), torch.randn(3, 4)
    own_forward = model.inner.forward
    model.inner.__dict__["forward"] = own_forward
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, x_before = torch.get_rng_state(), x.clone()
    trace(model, (x,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, x_before)
    assert model.steps == 0
    assert not hasattr(model, "kept")
    assert model.inner.__dict__["forward"] is own_forward
    assert "forward" not in model.norm.__dict__
    assert all(p.grad is None for p in model.parameters())


def test_a_failing_forward_leaves_the_model_as_it_was() -> None:
    model = Outer()
    with pytest.raises(RuntimeError, match="3x5"):
        trace(model, (torch.randn(3, 5),))
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert model.steps == 0


def test_outputs_keep_requires_grad_but_no_graph() -> None:
    found = trace(Outer(), (torch.randn(3, 4),))
    inner = found.named("inner")[0]
    (value,) = leaves(inner.output)
    assert value.requires_grad
    assert value.grad_fn is None
    assert not leaves(inner.args)[0].requires_grad


def test_rebuild_keeps_the_kinds_of_containers() -> None:
    one = torch.ones(1)
    value = {"a": [one, 3], "b": Pair(one, None), "c": OrderedDict(x=one), "d": "text"}
    doubled = rebuild(value, lambda t: t * 2)
    assert doubled["a"] == [2, 3]
    assert doubled["b"] == Pair(2, None)
    assert type(doubled["b"]) is Pair
    assert type(doubled["c"]) is OrderedDict
    assert doubled["d"] == "text"
    assert len(leaves(value)) == 3
