"""How groups of features (attention heads, features of an MLP) are found and dealt on whole models, and refused."""

import pytest
import torch
from tensor_models import Decoder, ParallelLayer
from test_tensor_rules import decided, features, pair_of, reasons
from torch import Tensor, nn

from colossal_nb.models import GPT, Llama


def test_multi_query_copies_what_all_heads_read() -> None:
    plan = decided(Decoder("multi-query"), 2)
    parts = dict(pair_of(plan, "blocks.0.attention.o").columns)
    assert parts["blocks.0.attention.q"] == (features(range(8)), features(range(8, 16)))
    assert parts["blocks.0.attention.k"] == parts["blocks.0.attention.v"] == (tuple(range(4)),) * 2
    assert set(plan.partial) >= {"blocks.0.attention.k.weight", "blocks.0.attention.v.weight"}


def test_more_ranks_than_key_value_groups() -> None:
    parts = dict(pair_of(decided(Decoder("two groups"), 4), "blocks.0.attention.o").columns)
    first, second = tuple(range(4)), tuple(range(4, 8))
    assert parts["blocks.0.attention.k"] == (first, first, second, second)


def test_copies_of_key_value_heads_go_as_far_as_the_query_heads() -> None:
    plan = decided(Llama(vocab_size=31, layers=1, hidden=48, heads=6, kv_heads=3, max_length=16), 6)
    parts = dict(pair_of(plan, "blocks.0.attention.out").columns)
    assert [len(part) for part in parts["blocks.0.attention.q"]] == [8] * 6
    assert parts["blocks.0.attention.k"] == tuple(features(range(8 * g, 8 * g + 8)) for g in (0, 0, 1, 1, 2, 2))


def test_heads_that_do_not_divide() -> None:
    model = GPT(vocab_size=96, layers=3, hidden=48, heads=4, max_length=16)
    with pytest.raises(ValueError, match="independent groups") as problem:
        decided(model, 3)
    assert str(problem.value) == (
        "attention blocks.0.attention (and 2 more like it) has 4 independent groups (heads); tp=3 does not divide "
        "them: take tp=2 or tp=4"
    )


MULTI_QUERY, GROUPED = {"heads": 4, "kv_heads": 1}, {"heads": 6, "kv_heads": 3}


@pytest.mark.parametrize(
    ("options", "tp", "words"),
    [
        ({"heads": 4}, 8, "has 4 independent groups (heads); tp=8 does not divide them: take tp=2 or tp=4"),
        (MULTI_QUERY, 3, "has 4 independent groups (heads); tp=3 does not divide them: take tp=2 or tp=4"),
        (MULTI_QUERY, 8, "has 4 independent groups (heads); tp=8 does not divide them: take tp=2 or tp=4"),
        ({"heads": 4, "kv_heads": 2}, 3, "has 4 independent groups (heads); tp=3 does not divide them: take tp=2 or "
         "tp=4"),
        (GROUPED, 2, "has 3 independent groups (heads); tp=2 does not divide them: take tp=3"),
        (GROUPED, 8, "has 6 independent groups (heads); tp=8 does not divide them: take tp=3 or tp=6"),
    ],
)
def test_more_ranks_than_heads_and_copied_heads_are_refused_alike(options: dict[str, int], tp: int, words: str) -> None:
    # Copies of keys and values make more groups than there are; the value features of one head are none of them.
    model = Llama(vocab_size=31, layers=1, hidden=48, max_length=16, **options)
    with pytest.raises(ValueError, match="independent groups") as problem:
        decided(model, tp)
    assert str(problem.value) == f"attention blocks.0.attention {words}"


@pytest.mark.parametrize("fused", [False, True])
def test_attention_and_mlp_side_by_side(fused: bool) -> None:
    # Heads and single features lead to one linear: of each kind every rank has half.
    torch.manual_seed(0)
    (pair,) = decided(ParallelLayer(16, 4, fused), 2, (torch.randn(2, 5, 16),)).pairs
    assert pair.row_parts == (features(range(8), range(16, 40)), features(range(8, 16), range(40, 64)))
    assert pair.groups == 4 + 48
    if fused:
        first = features(range(8), range(16, 24), range(32, 40), range(48, 72))
    else:
        first = features(range(24))
    assert pair.columns[-1][1][0] == first


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_dropout_and_groups_of_several_kinds_do_not_go_together(rate: float) -> None:
    # A mask's part is found by counting features of the row, which here are of two linears.
    plan = decided(TwoColumns(rate), 2, (torch.randn(3, 4),))
    assert len(plan.pairs) == (rate == 0)
    if rate:
        reason = "16 groups are of 2 kinds, and dropout between first, second and down needs one kind"
        assert reasons(plan)["first"] == reasons(plan)["second"] == reason
    else:
        assert plan.pairs[0].row_parts == (features(range(4), range(8, 12)), features(range(4, 8), range(12, 16)))


class TwoColumns(nn.Module):
    """Two linears side by side into one, dropout behind the first."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.second, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 4)
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat((self.drop(torch.sigmoid(self.first(x))), torch.tanh(self.second(x))), -1))
