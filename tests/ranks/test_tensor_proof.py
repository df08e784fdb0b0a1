"""A plan is proved before it is used: what a planted fault breaks is left whole, with the reason."""

from unittest import mock

import pytest
import torch
from tensor_models import Decoder
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.models import GPT
from colossal_nb.parallel import tensor
from colossal_nb.parallel.collectives import gather_from, split_to
from colossal_nb.parallel.tensor import linear1d
from colossal_nb.parallel.tensor.planning import plan, unproved
from colossal_nb.parallel.tensor.proof import prove
from colossal_nb.parallel.tensor.values import Pair
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy

pytestmark = pytest.mark.ranks
MESH = Mesh({"tp": 2})


def small() -> tuple[nn.Module, tuple[tuple[Tensor], dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = GPT(vocab_size=67, layers=2, hidden=16, heads=4, max_length=16)
    return model, (model.example_inputs(), {})


def without_the_sum_of_gradients() -> tuple[dict[str, float], float, dict[str, str]]:
    model, example = small()
    with mock.patch.object(linear1d, "copy_to", lambda x, *_, **__: x):
        wrong = prove(model, unproved(model, MESH, example), example).wrong
        decided = plan(model, MESH, Strategy.parse("tp=2"), example)
    return wrong, decided.share, dict(decided.whole)


def test_a_missing_sum_is_found_although_the_loss_is_right(ranks) -> None:
    for wrong, share, whole in ranks(2).run(without_the_sum_of_gradients):
        assert "" not in wrong, "the loss does not show it"
        assert "blocks.0.norm_1.weight" in wrong
        # Only what lies on the way back is wrong: the last norm's input gradient comes from the head.
        assert share < 0.1
        assert whole["blocks.0.attention.qkv"].startswith("the proof found the gradient of ")


class Swapped:
    """A plan whose second rank has two features of the row in the wrong order of ranks."""

    def __call__(self, pair: Pair) -> Pair:
        first, second = (list(part) for part in pair.row_parts)
        first[-1], second[0] = second[0], first[-1]
        parts = (tuple(first), tuple(second))
        return Pair(**{**vars(pair), "row_parts": parts})


def swapped_features() -> dict[str, float]:
    model, example = small()
    found = unproved(model, MESH, example)
    pairs = (Swapped()(found.pairs[0]), *found.pairs[1:])
    return prove(model, type(found)(**{**vars(found), "pairs": pairs}), example).wrong


def test_two_features_at_the_wrong_rank_are_found(ranks) -> None:
    for wrong in ranks(2).run(swapped_features):
        assert {"", "blocks.0.attention.out.weight"} <= wrong.keys()


class Random(nn.Module):
    """Draws a number in its forward, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.rand(())


def random_forward() -> str:
    torch.manual_seed(0)
    try:
        plan(Random(), MESH, Strategy.parse("tp=2"), ((torch.randn(2, 4),), {}))
    except ValueError as problem:
        return str(problem)
    return ""


def test_a_forward_that_draws_numbers_is_still_proved(ranks) -> None:
    # Both runs of the proof begin at the same random state.
    assert ranks(2).run(random_forward) == ["", ""]


def shown() -> tuple[list[str], bool]:
    model, example = small()
    tensor.apply(model, plan(model, MESH, Strategy.parse("tp=2"), example))
    kinds = isinstance(model.head, nn.Linear) and isinstance(model.token, nn.Embedding)
    return [repr(m) for m in (model.token, model.head, model.blocks[0].attention.qkv, model.blocks[0].down)], kinds


def test_repr_shows_the_part(ranks) -> None:
    (texts, kinds), (others, _) = ranks(2).run(shown)
    assert kinds
    assert texts[0] == "Embedding1D(67, 16, rows 0:34 of 67 on tp 0)"
    assert others[0] == "Embedding1D(67, 16, rows 34:67 of 67 on tp 1)"
    assert "in_features=16, out_features=67, bias=False, out 0:34 of 67 on tp 0" in texts[1]
    assert "out_features=48, bias=True, out 24 of 48 on tp 0" in texts[2]
    assert "in_features=64, out_features=16, bias=True, in 0:32 of 64 on tp 0" in texts[3]


def out_of_range() -> str:
    model, example = small()
    tensor.apply(model, plan(model, MESH, Strategy.parse("tp=2"), example))
    with pytest.raises(IndexError) as problem:
        model(torch.tensor([[0, 67]]))
    return str(problem.value)


def test_an_id_outside_of_the_vocabulary(ranks) -> None:
    assert ranks(2).run(out_of_range) == ["index out of range in self"] * 2


def layer(kind: str, whole: bool) -> tuple[float, float, tuple[int, ...]]:
    """Worst error of output and input gradient of a layer used by hand, and the shape of its weight."""
    torch.manual_seed(0)
    expected = nn.Linear(7, 5).double()
    torch.manual_seed(0)
    mine = tensor.Linear1D(7, 5, kind=kind, whole=whole).double()
    x = torch.randn(3, 7, dtype=torch.float64)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    where = {"mesh": Mesh({"tp": World.current().world_size}), "axis": "tp"}
    if whole:
        y = mine(b)
    elif kind == "column":
        y = gather_from(mine(b), **where, dim=-1, sizes=mine.sizes)
    else:
        y = mine(split_to(b, **where, dim=-1, sizes=mine.sizes))
    expected(a).sin().sum().backward()
    y.sin().sum().backward()
    return float((y - expected(a)).abs().max()), float((a.grad - b.grad).abs().max()), tuple(mine.weight.shape)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("kind", "shapes"), [("column", [(3, 7), (2, 7)]), ("row", [(5, 4), (5, 3)])])
def test_the_layer_by_hand(ranks, kind: str, whole: bool, shapes: list[tuple[int, int]]) -> None:
    for (output, gradient, shape), expected in zip(ranks(2).run(layer, kind, whole), shapes, strict=True):
        assert output < 1e-14
        assert gradient < 1e-14
        assert shape == expected


def checkpointed() -> float:
    """Gradients with every block computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = Decoder("separate").double()
    tokens, targets = torch.randint(67, (2, 2, 8))
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    expected = model.norm.weight.grad.clone(), model.position.weight.grad.clone()
    model.zero_grad()
    tensor.apply(model, plan(model, MESH, Strategy.parse("tp=2"), (model.example_inputs(), {})))
    for block in model.blocks:
        block.forward = lambda x, own=block.forward: checkpoint(own, x, use_reentrant=False)
    F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    found = model.norm.weight.grad, model.position.weight.grad
    return max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True))


def test_checkpointed_blocks(ranks) -> None:
    assert max(ranks(2).run(checkpointed)) < 1e-13


def different_models() -> str:
    width = 16 if World.current().rank == 0 else 24
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))
    with pytest.raises(ValueError, match="different parts") as problem:
        plan(model, MESH, Strategy.parse("tp=2"), ((torch.ones(2, 4),), {}))
    return str(problem.value)


def test_ranks_that_decide_differently_are_told(ranks) -> None:
    assert [text.split(":")[0] for text in ranks(2).run(different_models)] == [
        "the ranks of tp found different parts to shard"
    ] * 2
