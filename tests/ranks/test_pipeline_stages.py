"""Who holds, sends and counts what in a pipeline: every stage its own part, and between stages what is needed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pipeline_models as zoo
import torch
from recorded import record_of
from torch import nn

import colossal_nb as cnb
from colossal_nb.parallel import pipeline
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy


def layouts(name: str) -> dict[str, Any]:
    world = World.current()
    strategy = Strategy.parse("pp=4 microbatches=4").filled(4)
    mesh = strategy.mesh(4)
    model = zoo.build(name)
    parallel = pipeline.apply(model, mesh, strategy, zoo.batch(name, 2), pruned=False)
    assert not any(p.isnan().any() for p in model.parameters())
    parallel.prune()
    found = {}
    for parameter_name, p in model.named_parameters():
        layout = layout_of(p)
        assert layout is not None
        found[parameter_name] = str(layout.placement("pp"))
        assert (layout.slices(world.rank) is None) == bool(p.isnan().all())
        assert layout.global_shape == tuple(p.shape)
    return found


def test_layouts_say_which_stages_hold_a_parameter(ranks: Any) -> None:
    results = ranks(4).run(layouts, "tied gpt")
    assert all(found == results[0] for found in results)
    assert results[0]["blocks.2.up.weight"] == "On(coordinate=2, copies=())"
    assert results[0]["token.weight"] == "On(coordinate=0, copies=(3,))"
    shared = ranks(4).run(layouts, "one block four times")[0]
    assert shared["blocks.0.up.weight"] == "Replicate()"


def recorded(name: str, text: str) -> list[tuple[Any, ...]]:
    world = World.current()
    strategy = Strategy.parse(text).filled(world.world_size)
    model = zoo.build(name)
    parallel = pipeline.apply(model, strategy.mesh(world.world_size), strategy, zoo.batch(name, 2))
    batches = [zoo.batch(name, 2, seed=n) for n in range(4)]
    parallel.run_step(batches, zoo.loss_of)
    world.recorder.drain()
    parallel.run_step(batches, zoo.loss_of)
    slices = record_of(world.recorder.drain()).slices
    return [(s["kind"], int(s["stage"]), int(s["microbatch"]), int(s["payload_bytes"]), s["of"]) for s in slices]


ONE_FORWARD_ONE_BACKWARD = (
    "F0F1F2F3B0B1B2B3",
    "F0F1F2B0F3B1B2B3",
    "F0F1B0F2B1F3B2B3",
    "F0B0F1B1F2B2F3B3",
)


def test_a_gpt_step_sends_one_activation_and_one_gradient_per_cut_and_microbatch(ranks: Any) -> None:
    activation = 2 * zoo.LENGTH * zoo.WIDTH * 8  # samples x tokens x width, float64
    results = ranks(4).run(recorded, "gpt", "pp=4 microbatches=4")
    for stage, slices in enumerate(results):
        kinds = Counter(kind for kind, *_ in slices)
        inner = (stage > 0) + (stage < 3)
        assert kinds == Counter({"F": 4, "B": 4, "send": 4 * inner, "recv": 4 * inner})
        assert {payload for kind, *_, payload, _ in slices if kind in ("send", "recv")} == {activation}
        order = "".join(f"{kind}{microbatch}" for kind, _, microbatch, *_ in slices if kind in "FB")
        assert order == ONE_FORWARD_ONE_BACKWARD[stage]
        assert {s for kind, s, *_ in slices if kind in "FB"} == {stage}


def test_tied_weights_add_one_all_reduce_between_their_stages(ranks: Any) -> None:
    results = ranks(4).run(recorded, "tied gpt", "pp=4 microbatches=4")
    reduces = [[s for s in slices if s[0] == "all_reduce"] for slices in results]
    assert [len(found) for found in reduces] == [1, 0, 0, 1]
    assert reduces[0][0][3] == zoo.VOCABULARY * zoo.WIDTH * 8


def borders_met() -> list[tuple[int, int]]:
    strategy = Strategy.parse("pp=2 microbatches=2").filled(2)
    met: list[tuple[int, int]] = []
    parallel = pipeline.apply(zoo.build("mlp"), strategy.mesh(2), strategy, zoo.batch("mlp", 2))
    parallel.run_step(
        [zoo.batch("mlp", 2, seed=n) for n in range(2)], zoo.loss_of, borders=lambda n, site: met.append((n, site))
    )
    return met


def test_borders_around_units_have_the_same_numbers_on_every_stage(ranks: Any) -> None:
    first, last = ranks(2).run(borders_met)
    assert {site for _, site in first} >= {0, 1, 2, 3, 4}
    assert (0, 0) in last
    assert max(site for _, site in last) == 8  # after the fourth unit
    assert 1 not in {site for _, site in last}  # unit 0 runs on the first stage alone


class Longer(nn.Module):
    """Adds what the first layer made to what comes last, when it is told to."""

    longer = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x.tanh())
        return x + first if self.longer else x


def nan_notes() -> list[str]:
    model, world = cnb.parallelize(Longer(), strategy="pp=2"), World.current()
    x = torch.ones(4, 4)
    cnb.forward_backward(model, nn.functional.mse_loss, x, x)
    world.notes.clear()
    model.longer = True
    assert cnb.forward_backward(model, nn.functional.mse_loss, x, x).isnan()
    return list(world.notes)


def test_nan_of_what_no_stage_sent_is_explained(ranks: Any) -> None:
    for notes in ranks(2).run(nan_notes):
        assert any("takes from another stage what the recorded forward did not take" in note for note in notes)


class Experts(nn.Module):
    """Each row goes to the expert that a number in it names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, chosen, mixed = self.first(x), x[:, 0].long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed[chosen == number] = expert(h[chosen == number])
        return self.last(mixed)


def rows_by_the_data() -> tuple[str, str]:
    """What a stage says to which other rows come than in the batch before."""
    world = World.current()
    torch.manual_seed(0)
    model = cnb.parallelize(Experts(), strategy="pp=2", cuts=["experts.2"])
    try:
        for seed in range(8):
            inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
            inputs[:, 0] = torch.randint(4, (8,), generator=torch.Generator().manual_seed(seed))
            cnb.forward_backward(model, nn.functional.cross_entropy, inputs, torch.zeros(8, dtype=torch.int64))
    except Exception as error:
        world.abort("the step failed")
        return type(error).__name__, str(error)
    return "", ""


def test_rows_that_depend_on_the_data_are_named_where_they_cross_a_cut(ranks: Any) -> None:
    failures = dict(ranks(2).run(rows_by_the_data))
    assert set(failures) == {"ValueError", "Released"}
    assert "has another size than it had for inputs of the same shapes (rank 0 sends float32" in failures["ValueError"]
