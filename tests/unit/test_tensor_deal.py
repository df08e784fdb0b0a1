"""How features are dealt, on dependency matrices written by hand."""

import pytest
import torch
from torch import Tensor

from colossal_nb.parallel.tensor.probe import DoesNotDivideError, deal
from colossal_nb.parallel.tensor.text import fold
from colossal_nb.parallel.tensor.values import even_parts


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
    assert dealt is not None
    assert dealt.groups == 4
    assert dealt.row_parts == dealt.column_parts == (tuple(range(6)), tuple(range(6, 12)))


def test_single_features_are_dealt_unevenly() -> None:
    reached = heads(7, 1)
    dealt = deal(reached, one_column(reached), 3)
    assert dealt is not None
    assert [len(part) for part in dealt.row_parts] == [3, 2, 2]


@pytest.mark.parametrize(("count", "ranks"), [(4, 3), (6, 4), (3, 2), (2, 3)])
def test_blocks_that_do_not_divide(count: int, ranks: int) -> None:
    with pytest.raises(DoesNotDivideError) as problem:
        deal(heads(count, 2), one_column(heads(count, 2)), ranks)
    assert problem.value.groups == count


def test_all_together_is_nothing_to_deal() -> None:
    reached = torch.ones(6, 6, dtype=torch.bool)
    assert deal(reached, one_column(reached), 2) is None


def test_a_shared_feature_is_copied() -> None:
    # 4 heads of 2 features, and one key feature (column 1) that all of them read.
    reached = torch.cat([heads(4, 2), torch.ones(8, 1).bool()], dim=1)
    dealt = deal(reached, torch.tensor([0] * 8 + [1]), 4)
    assert dealt is not None
    assert dealt.column_parts == tuple((2 * head, 2 * head + 1, 8) for head in range(4))


def test_names_are_folded_by_their_number() -> None:
    assert fold(["blocks.0.up", "blocks.1.up", "blocks.2.up", "blocks.5.up", "head"]) == ["blocks.0-2,5.up", "head"]
