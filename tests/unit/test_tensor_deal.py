"""How features are dealt, on dependency matrices written by hand."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colossal_nb.parallel.tensor.deal import Deal, Dealer, DoesNotDivideError, NotDealtError
from colossal_nb.parallel.tensor.text import fold
from colossal_nb.parallel.tensor.values import even_parts


def deal(reached: Tensor, owners: Tensor, ranks: int) -> Deal:
    return Dealer(reached, owners).deal(ranks)


def heads(count: int, size: int) -> Tensor:
    """Every feature of a head depends on every feature of that head."""
    return torch.block_diag(*[torch.ones(size, size)] * count).bool()


def one_column(reached: Tensor) -> Tensor:
    return torch.zeros(reached.shape[1], dtype=torch.int64)


def test_even_parts() -> None:
    assert even_parts(5, 2) == ((0, 1, 2), (3, 4))
    assert even_parts(4, 4) == ((0,), (1,), (2,), (3,))
    assert even_parts(1, 2) == ((0,), ())


def test_blocks_are_dealt_whole() -> None:
    reached = heads(4, 3)
    dealt = deal(reached, one_column(reached), 2)
    assert dealt.groups == 4
    assert not dealt.copied
    assert dealt.row_parts == dealt.column_parts == (tuple(range(6)), tuple(range(6, 12)))


def test_the_users_default_dtype_is_no_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        test_blocks_are_dealt_whole()
    finally:
        torch.set_default_dtype(torch.float32)


def test_single_features_are_dealt_unevenly() -> None:
    reached = heads(7, 1)
    dealt = deal(reached, one_column(reached), 3)
    assert [len(part) for part in dealt.row_parts] == [3, 2, 2]


@pytest.mark.parametrize(("count", "ranks"), [(4, 3), (6, 4), (3, 2), (2, 3)])
def test_blocks_that_do_not_divide(count: int, ranks: int) -> None:
    with pytest.raises(DoesNotDivideError):
        deal(heads(count, 2), one_column(heads(count, 2)), ranks)


def test_all_together_is_nothing_to_deal() -> None:
    reached = torch.ones(6, 6, dtype=torch.bool)
    with pytest.raises(NotDealtError, match="everything depends on everything"):
        deal(reached, one_column(reached), 2)


def test_groups_of_unequal_size_stay_whole() -> None:
    reached = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    with pytest.raises(NotDealtError, match="2 independent groups are of unequal size"):
        deal(reached, one_column(reached), 2)


def test_every_rank_has_its_share_of_every_kind() -> None:
    # 2 heads of 2 features, and 4 single ones made by another column: no rank has heads only.
    reached = torch.block_diag(heads(2, 2).float(), heads(4, 1).float()).bool()
    dealt = deal(reached, torch.tensor([0] * 4 + [1] * 4), 2)
    assert dealt.row_parts == dealt.column_parts == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert dealt.groups == 6


def test_remainders_of_several_kinds_go_to_different_ranks() -> None:
    dealt = deal(heads(6, 1), torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    assert sorted(sum(i < 3 for i in part) for part in dealt.row_parts) == [1, 2]
    assert [len(part) for part in dealt.row_parts] == [3, 3]


def test_fewer_features_than_ranks_stay_whole() -> None:
    with pytest.raises(NotDealtError, match="3 features cannot be dealt to 4 ranks"):
        deal(heads(3, 1), one_column(heads(3, 1)), 4)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(2, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_rank_has_what_its_features_need(count: int, size: int, ranks: int, shared: bool, rng: Random) -> None:
    """Heads in any order of features, with some more features that all or none of them read."""
    reached = torch.cat([heads(count, size), torch.ones(count * size, 1).bool() & shared], dim=1)
    reached = reached[rng.sample(range(count * size), count * size)]
    owners = torch.tensor([0] * (count * size) + [1])
    try:
        dealt = deal(reached, owners, ranks)
    except (DoesNotDivideError, NotDealtError):
        return
    assert sorted(i for part in dealt.row_parts for i in part) == list(range(count * size))
    for row_part, column_part in zip(dealt.row_parts, dealt.column_parts, strict=True):
        needed = reached[list(row_part)].any(0).nonzero().flatten().tolist()
        assert set(needed) <= set(column_part)


def test_a_shared_feature_is_copied() -> None:
    # 4 heads of 2 features, and one key feature (column 1) that all of them read.
    reached = torch.cat([heads(4, 2), torch.ones(8, 1).bool()], dim=1)
    dealt = deal(reached, torch.tensor([0] * 8 + [1]), 4)
    assert (dealt.groups, dealt.copied) == (4, True)
    assert dealt.column_parts == tuple((2 * head, 2 * head + 1, 8) for head in range(4))


def test_names_are_folded_by_their_number() -> None:
    assert fold(["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.5.up", "head"]) == ["blocks.0-2,5.up", "head"]
