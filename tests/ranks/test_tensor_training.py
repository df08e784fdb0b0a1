"""Sharded models train as whole ones: loss and every gradient in float64, for tp = 2 and 4."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from small_gpt import loss_fn
from tensor_models import Decoder, GatedMLP, NormedMLP
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.models import GPT, MLP
from colossal_nb.parallel import tensor
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy

pytestmark = pytest.mark.ranks
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Outcome:
    loss: float
    expected: float
    gradient_error: float
    share: float
    partial: tuple[str, ...]
    lines: list[str]
    notes: list[str]


def slice_here(whole: Tensor, p: Tensor) -> Tensor:
    layout = layout_of(p)
    held = layout.slices(World.current().rank) if layout is not None else ()
    for dim, indices in enumerate(held):
        whole = whole.index_select(dim, torch.tensor(list(indices)))
    return whole


def gradient_error(model: nn.Module, whole: nn.Module) -> float:
    """The worst difference of a local gradient from its slice of the whole one, on the scale of that tensor."""
    largest = max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
    worst = 0.0
    for (name, p), (other, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None)
        if q.grad is None:
            continue
        expected = slice_here(q.grad, p)
        assert p.shape == p.grad.shape == expected.shape
        scale = max(float(expected.abs().max()), 1e-3 * largest)
        worst = max(worst, float((p.grad - expected).abs().max()) / scale)
    return worst


def prepared(make: Callable[[], nn.Module], tp: int) -> tuple[nn.Module, nn.Module, tensor.Report]:
    """The whole model and its sharded copy, in float64."""
    torch.manual_seed(0)
    model = make().double()
    whole = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    example = tuple(x.double() if x.is_floating_point() else x for x in model.example_inputs())
    plan = tensor.plan(model, Mesh({"tp": tp}), Strategy.parse(f"tp={tp}"), (example, {}))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), whole.parameters(), strict=True))
    report = tensor.apply(model, plan)
    assert all(parameters[name] is p for name, p in model.named_parameters())
    return model, whole, report


def trained(
    make: Callable[[], nn.Module],
    batch: Callable[[], tuple[Tensor, Tensor]],
    loss_fn: Loss,
    tp: int,
    backwards: int = 1,
) -> Outcome:
    model, whole, report = prepared(make, tp)
    for _ in range(backwards):
        inputs, targets = batch()
        expected = loss_fn(whole(inputs), targets)
        expected.backward()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
    return Outcome(
        loss.item(),
        expected.item(),
        gradient_error(model, whole),
        report.plan.share,
        report.partial,
        report.lines(),
        World.current().notes,
    )


def tokens(vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(vocabulary, (3, 12)), torch.randint(vocabulary, (3, 12)))


def check(outcomes: list[Outcome], share: float) -> None:
    for one in outcomes:
        assert one.loss == outcomes[0].loss, "every rank has the same loss"
        assert abs(one.loss - one.expected) < 1e-12
        assert one.gradient_error < 1e-10, one.lines
        assert one.share > share, one.lines
        assert one.notes == []


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt(ranks, tp: int, tied: bool) -> None:
    def make() -> nn.Module:
        return GPT(vocab_size=131, layers=2, hidden=32, heads=4, max_length=16, tied=tied)

    check(ranks(tp).run(trained, make, tokens(131), loss_fn, tp), share=0.8)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", list(Decoder.attentions))
def test_every_kind_of_attention(ranks, kind: str, tp: int) -> None:
    outcomes = ranks(tp).run(trained, lambda: Decoder(kind), tokens(67), loss_fn, tp, backwards=2)
    check(outcomes, share=0.85)
    # Query and key norms sit inside the heads: each rank has the gradient of its own heads alone.
    summed = {name.split(".", 2)[2] for name in outcomes[0].partial}
    copied = {"attention.k.weight", "attention.v.weight"}
    norms = {"attention.norm_q.weight", "attention.norm_k.weight"}
    expected = {"multi-query": copied | norms, "two groups": norms | (copied if tp == 4 else set())}
    assert summed == expected.get(kind, set())


def test_projections_that_start_at_zero_hide_nothing(ranks) -> None:
    outcomes = ranks(2).run(trained, lambda: Decoder("multi-query", zero=True), tokens(67), loss_fn, 2, backwards=2)
    check(outcomes, share=0.85)
    assert "blocks.0.attention.norm_q.weight" in outcomes[0].partial


def test_a_tied_weight_is_cut_once_and_read_by_both(ranks) -> None:
    check(ranks(2).run(trained, lambda: Decoder("nano", tied=True), tokens(67), loss_fn, 2), share=0.85)


def test_a_norm_over_all_features_leaves_its_pair_whole(ranks) -> None:
    outcomes = ranks(2).run(trained, lambda: Decoder("separate", NormedMLP), tokens(67), loss_fn, 2)
    check(outcomes, share=0.6)
    told = "whole: blocks.0-1.mlp.up, blocks.0-1.mlp.down: between up and down everything depends on everything"
    assert any(line.startswith(told) for line in outcomes[0].lines)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_plain_mlp_of_odd_sizes(ranks, tp: int) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(7, 13).double(), torch.randint(67, (7,))

    def make() -> nn.Module:
        return MLP(features=13, hidden=37, classes=67, layers=5)

    check(ranks(tp).run(trained, make, batch, lambda x, y: nn.CrossEntropyLoss()(x, y), tp), share=0.95)


def test_linear_relu_linear(ranks) -> None:
    class Small(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

        def example_inputs(self) -> tuple[Tensor]:
            return (torch.randn(2, 5, generator=torch.Generator().manual_seed(1)),)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(6, 5).double(), torch.randn(6, 3).double()

    outcomes = ranks(2).run(trained, Small, batch, F.mse_loss, 2)
    check(outcomes, share=0.9)
    assert outcomes[0].lines[1] == "model: 0 -> 2, 9 groups"


def test_frozen_weights_and_gated_mlp(ranks) -> None:
    def make() -> nn.Module:
        model = Decoder("two groups", GatedMLP)
        model.token.requires_grad_(False)
        model.blocks[0].attention.requires_grad_(False)
        return model

    check(ranks(2).run(trained, make, tokens(67), loss_fn, 2), share=0.85)


class WithLoss(Decoder):
    """As in nanoGPT: the loss is computed in the forward where targets are given."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = super().forward(tokens)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def loss_inside(tp: int) -> tuple[float, float, list[str]]:
    model, whole, _ = prepared(lambda: WithLoss("nano"), tp)
    inputs, targets = tokens(67)()
    expected, loss = whole(inputs, targets)[1], model(inputs, targets)[1]
    expected.backward()
    loss.backward()
    return abs(loss.item() - expected.item()), gradient_error(model, whole), World.current().notes


def test_a_loss_inside_the_forward(ranks) -> None:
    for loss, gradient, notes in ranks(2).run(loss_inside, 2):
        assert loss < 1e-12
        assert gradient < 1e-10
        assert notes == []


def optimised(tp: int, steps: int) -> float:
    """The worst difference of a weight after AdamW steps, by rule L."""
    model, whole, _ = prepared(lambda: Decoder("nano", tied=True), tp)
    rate, worst = 1e-3, 0.0
    optimizers = [torch.optim.AdamW(m.parameters(), lr=rate) for m in (model, whole)]
    for _ in range(steps):
        inputs, targets = tokens(67)()
        for m, optimizer in zip((model, whole), optimizers, strict=True):
            optimizer.zero_grad()
            loss_fn(m(inputs), targets).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        scale = max(float(q.abs().max()), rate * steps)
        worst = max(worst, float((p - slice_here(q, p)).abs().max()) / scale)
    return worst


def test_updated_weights(ranks) -> None:
    assert max(ranks(2).run(optimised, 2, 5)) < 1e-10


def refused(tp: int) -> tuple[str, bool, bool]:
    torch.manual_seed(0)
    model = GPT(vocab_size=96, layers=2, hidden=48, heads=4, max_length=16)
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    random = torch.get_rng_state()
    with pytest.raises(ValueError, match="independent groups") as problem:
        tensor.plan(model, Mesh({"tp": tp}), Strategy.parse(f"tp={tp}"), (model.example_inputs(), {}))
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return (
        str(problem.value),
        same and kinds == [type(m) for m in model.modules()],
        torch.equal(random, torch.get_rng_state()),
    )


def test_heads_that_do_not_divide_are_refused_before_any_change(ranks) -> None:
    text = (
        "attention blocks.0.attention (and 1 more like it) has 4 independent groups (heads); tp=3 does not divide "
        "them: take tp=2 or tp=4"
    )
    assert ranks(3).run(refused, 3) == [(text, True, True)] * 3
