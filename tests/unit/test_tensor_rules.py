"""What the rules decide on models that nobody told them about; no ranks needed."""

import copy

import pytest
import torch
from tensor_models import Decoder, NormedMLP
from torch import Tensor, nn
from torch.nn import functional as F

from colossal_nb.models import GPT, MLP, ViT
from colossal_nb.parallel.tensor.planning import unproved
from colossal_nb.parallel.tensor.text import report_lines
from colossal_nb.parallel.tensor.values import Change, Pair, TensorPlan
from colossal_nb.plan.mesh import Mesh

HIDDEN, HEADS, SIZE = 16, 4, 4


def decided(model: nn.Module, tp: int, example: tuple[Tensor, ...] | None = None) -> TensorPlan:
    example = model.example_inputs() if example is None else example
    return unproved(model, Mesh({"tp": tp}), (example, {}))


def pair_of(plan: TensorPlan, row: str) -> Pair:
    (pair,) = [pair for pair in plan.pairs if pair.row == row]
    return pair


def reasons(plan: TensorPlan) -> dict[str, str]:
    return dict(plan.whole)


def features(*ranges: range) -> tuple[int, ...]:
    return tuple(i for part in ranges for i in part)


def test_fused_qkv_is_dealt_by_heads() -> None:
    # [q | k | v], each 4 heads of 4 features: rank 0 of 2 has the first two heads of each.
    pair = pair_of(decided(Decoder("nano"), 2), "blocks.1.attention.c_proj")
    ((column, parts),) = pair.columns
    assert column == "blocks.1.attention.c_attn"
    assert parts[0] == features(range(8), range(16, 24), range(32, 40))
    assert parts[1] == features(range(8, 16), range(24, 32), range(40, 48))
    assert pair.row_parts == (features(range(8)), features(range(8, 16)))
    assert pair.groups == HEADS


def test_interleaved_qkv_is_dealt_by_heads() -> None:
    # [q0 k0 v0 q1 k1 v1 ...]: a head is 12 features that lie together.
    ((_, parts),) = pair_of(decided(Decoder("interleaved"), 4), "blocks.0.attention.o").columns
    assert parts == tuple(features(range(12 * head, 12 * head + 12)) for head in range(4))


def test_the_numbers_that_a_module_believes_are_found() -> None:
    pair = pair_of(decided(Decoder("nano"), 4), "blocks.0.attention.c_proj")
    region = "blocks.0.attention"
    assert set(pair.changes) == {Change(region, "n_head", 4, 1), Change(region, "n_embd", 16, 4)}
    assert pair.narrow
    pair = pair_of(decided(Decoder("separate"), 2), "blocks.0.attention.o")
    assert pair.changes == (Change(region, "heads", 4, 2),)
    assert not pair.narrow
    assert pair_of(decided(Decoder("interleaved"), 2), "blocks.0.attention.o").changes == ()


def test_columns_that_read_one_tensor_enter_together() -> None:
    plan = decided(Decoder("separate"), 2)
    (together,) = pair_of(plan, "blocks.0.attention.o").entrances
    assert together == tuple(f"blocks.0.attention.{name}" for name in "qkv")
    assert len(pair_of(plan, "blocks.0.mlp.down").entrances) == 1


def test_vocabulary_and_positions() -> None:
    plan = decided(GPT(vocab_size=67, layers=1, hidden=16, heads=4, max_length=128), 2)
    assert [(one.embeddings, one.heads, one.size) for one in plan.vocabulary] == [
        (("token",), (), 67),
        ((), ("head",), 67),
    ]
    assert [len(part) for part in plan.vocabulary[0].parts] == [34, 33]
    assert "positions" in reasons(plan)["position"]
    tied = decided(GPT(vocab_size=67, layers=1, hidden=16, heads=4, max_length=128, tied=True), 2)
    assert [(one.embeddings, one.heads) for one in tied.vocabulary] == [(("token",), ("head",))]


def test_a_small_vocabulary_stays_whole() -> None:
    plan = decided(GPT(vocab_size=31, layers=1, hidden=16, heads=4, max_length=16), 2)
    assert plan.vocabulary == ()
    assert reasons(plan)["head"] == "31 rows on 2 ranks are fewer than 16 each"


def test_a_deep_mlp_is_paired_two_by_two() -> None:
    plan = decided(MLP(features=6, hidden=21, classes=3, layers=5), 2)
    assert [(pair.columns[0][0], pair.row) for pair in plan.pairs] == [
        ("layers.0", "layers.1"),
        ("layers.2", "layers.3"),
    ]
    assert [len(part) for part in plan.pairs[0].row_parts] == [11, 10]
    assert "layers.4" in reasons(plan)


def test_something_that_mixes_all_features_is_left_whole() -> None:
    plan = decided(Decoder("separate", NormedMLP), 2)
    assert [pair.row for pair in plan.pairs] == ["blocks.0.attention.o", "blocks.1.attention.o"]
    assert "everything depends on everything" in reasons(plan)["blocks.0.mlp.up"]


class Reader(nn.Module):
    """Reads a linear's weight outside of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) + self.up.weight.sum()


def test_a_weight_read_elsewhere_stays_whole() -> None:
    plan = decided(Reader(), 2, (torch.randn(3, 4),))
    assert plan.pairs == ()
    assert reasons(plan)["up"] == "its weight is read outside of its own call"


class Twice(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_a_shared_linear_stays_whole() -> None:
    plan = decided(Twice(), 2, (torch.randn(3, 8),))
    assert plan.pairs == ()
    assert reasons(plan)["up"] == "its weight is shared with down"


def dropped(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 4))


def test_unequal_parts_and_dropout_do_not_go_together() -> None:
    # A mask of 5 features on one rank and 4 on the other would leave the ranks at different random numbers.
    assert decided(dropped(8), 2, (torch.randn(3, 4),)).pairs[0].groups == 8
    uneven = decided(dropped(9), 2, (torch.randn(3, 4),))
    assert uneven.pairs == ()
    assert "dropout between 0 and 3 needs equal ones" in reasons(uneven)["0"]


class TimeFirst(nn.Module):
    """(length, batch, width): the samples of a batch are not dim 0, and positions meet each other."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).permute(1, 2, 0, 3) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))


def test_probing_where_samples_meet() -> None:
    torch.manual_seed(0)
    (pair,) = decided(TimeFirst(), 2, (torch.randn(5, 3, 8),)).pairs
    assert pair.groups == 2
    assert dict(pair.columns)["q"] == (features(range(4)), features(range(4, 8)))


def test_torchs_own_encoder_layer() -> None:
    # nn.MultiheadAttention never calls its projections: only the MLP is dealt.
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    plan = decided(model, 2, (torch.randn(2, 5, 16),))
    assert [(pair.columns[0][0], pair.row) for pair in plan.pairs] == [("linear1", "linear2")]
    assert reasons(plan)["self_attn.out_proj"] == "its weight is used without calling it"


class Counting(nn.Module):
    """A forward that remembers: probing must not show."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.sum()
        return self.net(x)


def test_deciding_changes_nothing() -> None:
    model = Counting()
    model.net.eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert decided(model, 2, (torch.ones(2, 4),)).pairs
    assert model.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.net.training
    assert torch.equal(torch.get_rng_state(), random)
    assert not any("forward" in vars(module) for module in model.modules())


def test_parameters_that_no_rule_knows_are_named() -> None:
    model = ViT(image_size=8, patch_size=4, classes=5, layers=1, hidden=16, heads=4)
    whole = reasons(decided(model, 2))
    assert whole["patches.weight"] == "no rule cuts a parameter of Conv2d"
    assert whole["positions"] == whole["class_token"] == "no rule cuts a parameter of ViT"
    assert set(whole) == {"patches.weight", "positions", "class_token", "head"}


def test_the_report_is_short() -> None:
    # Per block: qkv 3168, out 1056, up 4224, down 4128, norms 128 = 12704. All: 4 * 12704, token and head 3072 each,
    # positions 512, last norm 64 = 57536. Whole: positions, norms, biases of out and down: 512 + 64 + 4 * 192 = 1344.
    lines = report_lines(decided(GPT(vocab_size=96, layers=4, hidden=32, heads=4, max_length=16), 2))
    assert lines == [
        "tp=2: 98% of the parameters sharded",
        "blocks.0-3.attention: qkv -> out, 4 groups",
        "blocks.0-3: up -> down, 128 groups",
        "token: 96 rows by vocabulary",
        "head: 96 rows by vocabulary",
        "whole: position: its indices (positions) do not come from the model's input",
    ]


@pytest.mark.parametrize("bias", [-5.0, 5.0])
def test_a_dead_unit_is_dealt_like_the_others(bias: float) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU6(), nn.Linear(64, 4))
    nn.init.constant_(model[0].bias, 2 * bias)  # below 0 or above 6 for every input: a small push moves nothing
    (pair,) = decided(model, 4, (torch.randn(1, 4),)).pairs
    assert pair.columns[0][1] == pair.row_parts
    assert pair.groups == 64
