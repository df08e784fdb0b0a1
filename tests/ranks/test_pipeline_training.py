"""Pipelines on real ranks: gradients, updates and outputs equal the whole model's."""

from __future__ import annotations

import copy
from typing import Any

import pipeline_models as zoo
import pytest
import torch
from torch import Tensor, nn

from colossal_nb.parallel import pipeline
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.world import World
from colossal_nb.plan import Mesh, Strategy

SIZES = (3, 2, 2, 3)  # samples per microbatch: they may differ, and so may their order


def whole_step(model: nn.Module, batches: list[zoo.Batch]) -> list[float]:
    kept = []
    for number, (args, kwargs) in enumerate(batches):
        loss, value = zoo.loss_of(model(*copy.deepcopy(args), **kwargs), number)
        loss.backward()
        kept.append(value)
    return kept


def worst(model: nn.Module, whole: nn.Module, held: set[str], what: str) -> float:
    pairs = [(name, p, q) for (name, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True)]
    largest = 0.0
    for name, p, q in pairs:
        if name not in held:
            continue
        a, b = (p.grad, q.grad) if what == "grad" else (p.detach(), q.detach())
        if b is None:
            assert a is None
            continue
        assert a is not None, name
        largest = max(largest, ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item())
    return largest


def train(name: str, text: str, steps: int = 2) -> dict[str, Any]:
    """Train both for some steps, evaluate, and say how they differ on this rank."""
    world = World.current()
    strategy = Strategy.parse(text).filled(world.world_size)
    mesh = strategy.mesh(world.world_size)
    model = zoo.build(name)
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    identities = [id(p) for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]
    parallel = pipeline.apply(model, mesh, strategy, zoo.batch(name, 2, seed=7))
    assert identities == [id(p) for p in model.parameters()]
    held = set(parallel.stages[parallel.number])
    found: dict[str, Any] = {"grad": 0.0, "weights": 0.0, "held": sorted(held)}
    for step in range(steps):
        batches = [zoo.batch(name, samples, seed=10 * step + n) for n, samples in enumerate(SIZES)]
        expected = whole_step(whole, batches)
        kept = parallel.run_step(batches, zoo.loss_of)
        if parallel.stage.is_last:
            assert kept == pytest.approx(expected, rel=1e-12)
        else:
            assert kept == []
        found["grad"] = max(found["grad"], worst(model, whole, held, "grad"))
        for each in (optimizer, whole_optimizer):
            each.step()
            each.zero_grad()
        found["weights"] = max(found["weights"], worst(model, whole, held, "weights"))
    for p, (parameter, shape) in zip(
        model.named_parameters(), zip(model.parameters(), shapes, strict=True), strict=True
    ):
        assert parameter.shape == shape
        if p[0] not in held:
            assert parameter.isnan().all()
            edges = 1 + sum(length - 1 for length in shape)
            assert parameter.untyped_storage().nbytes() == edges * parameter.element_size()
            assert parameter.grad is None
    found["outputs"] = evaluate(parallel, model, whole, name)
    return found


def evaluate(parallel: pipeline.Pipeline, model: nn.Module, whole: nn.Module, name: str) -> float:
    """The outputs of an unseen size, in eval mode; running statistics were kept where the unit runs."""
    for name_of, buffer in whole.named_buffers():
        mine = dict(model.named_buffers())[name_of]
        if layout_of(mine) is None or layout_of(mine).slices(World.current().rank) is not None:
            assert torch.allclose(mine, buffer, rtol=1e-10)
    model.eval()
    whole.eval()
    batches = [zoo.batch(name, samples, seed=90) for samples in (5, 1)]
    outputs = parallel.forward_only(batches)
    if not parallel.stage.is_last:
        assert outputs == []
        return 0.0
    with torch.no_grad():
        expected = [whole(*copy.deepcopy(args), **kwargs) for args, kwargs in batches]
    pairs = zip(leaves(outputs), leaves(expected), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_two_stages_train_like_the_whole_model(ranks: Any, name: str) -> None:
    for found in ranks(2).run(train, name, "pp=2 microbatches=4"):
        assert found["grad"] <= 1e-10
        assert found["weights"] <= 1e-10
        assert found["outputs"] <= 1e-10


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "name", ["gpt", "tied gpt", "u-net", "tuples", "one block four times", "branch on a value", "torch encoder"]
)
def test_four_stages_train_like_the_whole_model(ranks: Any, name: str, schedule: str) -> None:
    results = ranks(4).run(train, name, f"pp=4 microbatches=4 schedule={schedule}")
    for found in results:
        assert found["grad"] <= 1e-10
        assert found["weights"] <= 1e-10
        assert found["outputs"] <= 1e-10
    assert {held for found in results for held in found["held"]} == {n for n, _ in zoo.build(name).named_parameters()}


def test_two_replicas_run_a_chain_each(ranks: Any) -> None:
    for found in ranks(4).run(train, "tied gpt", "dp=2 pp=2 microbatches=4"):
        assert found["grad"] <= 1e-10
        assert found["outputs"] <= 1e-10


def accumulates() -> tuple[float, bool]:
    """Gradients are added to what was there, also those of shared parameters."""
    world = World.current()
    strategy = Strategy.parse("pp=2 microbatches=2").filled(2)
    model = zoo.build("tied gpt")
    whole = copy.deepcopy(model)
    parallel = pipeline.apply(model, strategy.mesh(2), strategy, zoo.batch("tied gpt", 2))
    batches = [zoo.batch("tied gpt", 2, seed=n) for n in range(2)]
    for _ in range(3):
        parallel.run_step(batches, zoo.loss_of)
        whole_step(whole, batches)
    held = set(parallel.stages[world.rank])
    return worst(model, whole, held, "grad"), "token.weight" in held


def test_gradients_are_added_to_older_ones(ranks: Any) -> None:
    for difference, has_tied in ranks(2).run(accumulates):
        assert has_tied
        assert difference <= 1e-10


def refused(stages: int) -> str:
    strategy = Strategy.parse(f"pp={stages}")
    try:
        pipeline.apply(zoo.build("gpt"), Mesh({"pp": stages}), strategy, zoo.batch("gpt", 2), cuts=["nowhere"])
    except ValueError as error:
        return str(error)
    return ""


def test_a_refusal_is_the_same_on_all_ranks(ranks: Any) -> None:
    texts = ranks(2).run(refused, 2)
    assert "nowhere" in texts[0]
    assert texts[0] == texts[1]


def frozen(prefixes: list[str]) -> tuple[float, list[str]]:
    """Gradients of what still trains, and what has none, when parts are frozen after parallelizing."""
    world = World.current()
    strategy = Strategy.parse("pp=2 microbatches=2").filled(2)
    model = zoo.build("gpt")
    whole = copy.deepcopy(model)
    parallel = pipeline.apply(model, strategy.mesh(2), strategy, zoo.batch("gpt", 2))
    for each in (model, whole):
        for name, p in each.named_parameters():
            p.requires_grad_(not any(name.startswith(prefix) for prefix in prefixes))
    batches = [zoo.batch("gpt", 2, seed=n) for n in range(2)]
    parallel.run_step(batches, zoo.loss_of)
    whole_step(whole, batches)
    held = set(parallel.stages[world.rank])
    return worst(model, whole, held, "grad"), [n for n, p in model.named_parameters() if n in held and p.grad is None]


@pytest.mark.parametrize("prefixes", [["token", "position", "blocks.0", "blocks.1"], ["blocks.2", "head"], ["token"]])
def test_frozen_parts_get_no_gradient_and_let_others_through(ranks: Any, prefixes: list[str]) -> None:
    names = [name for name, _ in zoo.build("gpt").named_parameters()]
    results = ranks(2).run(frozen, prefixes)
    assert all(difference <= 1e-10 for difference, _ in results)
    without = {name for _, missing in results for name in missing}
    assert without == {name for name in names if any(name.startswith(prefix) for prefix in prefixes)}


def fails_and_goes_on() -> tuple[str, float]:
    """The loss fails on the last stage; after a regroup the same step is right."""
    world = World.current()
    strategy = Strategy.parse("pp=2 microbatches=3").filled(2)
    model = zoo.build("tied gpt")
    whole = copy.deepcopy(model)
    parallel = pipeline.apply(model, strategy.mesh(2), strategy, zoo.batch("tied gpt", 2))
    batches = [zoo.batch("tied gpt", samples, seed=samples) for samples in (2, 4, 3)]

    def breaks(output: Any, number: int) -> tuple[Tensor, float]:
        if number == 1:
            raise ArithmeticError("in the loss")
        return zoo.loss_of(output, number)

    try:
        parallel.run_step(batches, breaks)
        error = ""
    except Exception as caught:
        error = type(caught).__name__
    world.abort("a test")
    world.regroup(world.epoch + 1, (0, 1))
    assert model.token.weight.grad is None  # half a sum is no gradient of a shared parameter
    model.zero_grad()
    parallel.run_step(batches, zoo.loss_of)
    whole_step(whole, batches)
    return error, worst(model, whole, set(parallel.stages[world.rank]), "grad")


def test_an_error_in_the_loss_frees_the_other_stage_and_the_next_step_is_right(ranks: Any) -> None:
    (first, one), (last, other) = ranks(2).run(fails_and_goes_on)
    assert (first, last) == ("Released", "ArithmeticError")
    assert max(one, other) <= 1e-10
