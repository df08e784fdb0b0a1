"""Cutting a batch: every sample in exactly one part, parts that differ by at most one, anything else whole."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.parallel.batch import (
    arguments,
    batch_size,
    bounds,
    checksum,
    cut,
    explaining,
    odd_ranks,
    own_parts,
    pieces,
    ranks_text,
)
from colossal_nb.parallel.work import Released


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_each_sample_is_in_exactly_one_part(samples: int, replicas: int, microbatches: int) -> None:
    every = [own_parts(samples, replicas, microbatches, replica) for replica in range(replicas)]
    seen = [sample for parts in every for start, stop in parts for sample in range(start, stop)]
    assert sorted(seen) == list(range(samples))
    sizes = [stop - start for start, stop in bounds(samples, replicas * microbatches)]
    assert max(sizes) - min(sizes) <= 1
    counts = [sum(stop - start for start, stop in parts) for parts in every]
    assert max(counts) - min(counts) <= microbatches
    assert len(every[0]) == max(map(len, every))


def test_five_samples_in_four_microbatches() -> None:
    assert own_parts(5, 1, 4, 0) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_a_batch_smaller_than_the_parts_is_spread() -> None:
    assert [own_parts(3, 2, 2, replica) for replica in range(2)] == [[(0, 1), (2, 3)], [(1, 2)]]


def test_tensors_of_the_batch_are_cut_and_the_rest_is_whole() -> None:
    table = torch.arange(9)
    inputs = {"tokens": torch.arange(8).view(4, 2), "table": table, "name": "x", "mask": (torch.arange(4), None)}
    first, second = pieces(inputs, torch.arange(4), replicas=1, microbatches=2, replica=0)
    assert torch.equal(first.inputs["tokens"], torch.tensor([[0, 1], [2, 3]]))
    assert torch.equal(second.inputs["mask"][0], torch.tensor([2, 3]))
    assert second.inputs["table"] is table
    assert second.inputs["name"] == "x"
    assert torch.equal(second.targets, torch.tensor([2, 3]))
    assert (second.start, second.stop, second.samples) == (2, 4, 2)


def test_one_part_is_the_batch_itself() -> None:
    inputs = torch.arange(4)
    assert pieces(inputs, None, 1, 1, 0)[0].inputs is inputs


def test_cut_leaves_scalars_alone() -> None:
    scalar = torch.tensor(3)
    assert cut((scalar, torch.arange(3)), 3, 1, 2)[0] is scalar


def test_batch_size_is_that_of_the_first_tensor_with_dims() -> None:
    assert batch_size({"scale": torch.tensor(1.0), "x": torch.zeros(6, 2)}) == 6
    with pytest.raises(ValueError, match="no tensor with a batch dim"):
        batch_size({"scale": torch.tensor(1.0), "n": 4})
    with pytest.raises(ValueError, match=r"the batch is empty: .* \[0, 2\]"):
        batch_size(torch.zeros(0, 2))


def test_arrays_are_no_inputs() -> None:
    array = torch.zeros(4, 2).numpy()
    for inputs in (array, (array, 3), {"x": array}):
        with pytest.raises(ValueError, match=r"NumPy ndarray; inputs are tensors: torch.from_numpy"):
            batch_size(inputs)


def _noted(error: Exception, whole: dict[str, Any], part: dict[str, Any]) -> list[str]:
    with pytest.raises(type(error)) as caught, explaining(whole, part, 4):
        raise error
    assert caught.value is error
    return getattr(error, "__notes__", [])


def test_an_error_in_a_part_says_what_was_cut() -> None:
    x, state = torch.zeros(4, 2), torch.zeros(1, 4)
    (note,) = _noted(TypeError("no"), {"inputs": (x, {"h": state})}, {"inputs": (x[:2], {"h": state})})
    assert note.startswith(
        "The batch of 4 samples was cut along dim 0: inputs[0] [4, 2] -> [2, 2]; given whole: inputs[1]['h'] [1, 4]."
    )
    assert not _noted(TypeError("no"), {"inputs": x}, {"inputs": x})
    assert not _noted(Released("no"), {"inputs": x}, {"inputs": x[:2]})


def test_how_inputs_call_the_model() -> None:
    x = torch.zeros(1)
    assert arguments(x) == ((x,), {})
    assert arguments((x, 2)) == ((x, 2), {})
    assert arguments([x]) == (([x],), {})
    assert arguments({"x": x}) == ((), {"x": x})


def test_checksum_sees_values_shapes_and_types() -> None:
    base = torch.arange(6.0)
    same = checksum([base.clone()])
    assert checksum([base]) == same
    for other in (base + 1e-3, base.view(2, 3), base.double(), base.flip(0)):
        assert checksum([other]) != same
    assert checksum([base.view(2, 3).t()]) == checksum([base.view(2, 3).t().contiguous()])
    assert checksum([torch.zeros(0)]) != checksum([])
    assert checksum([base.bfloat16()]) == checksum([base.bfloat16()])


def test_odd_ranks_are_the_minority() -> None:
    assert odd_ranks([5, 5, 5, 5]) == []
    assert odd_ranks([5, 7, 5, 5]) == [1]
    assert odd_ranks([7, 5, 5, 5]) == [0]
    assert odd_ranks([7, 5]) == [1]
    assert ranks_text([1]) == "rank 1"
    assert ranks_text([0, 2, 3]) == "ranks 0, 2 and 3"
