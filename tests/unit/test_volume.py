"""Bytes on the wire and bytes per parameter, against numbers worked out by hand."""

from fractions import Fraction

import pytest

from colossal_nb.models import GPT
from colossal_nb.plan import Strategy, sent_bytes
from colossal_nb.plan.states import GPTShape, state_bytes


@pytest.mark.parametrize("op, ranks, payload_bytes, expected", [
    ("all_reduce", 4, 1000, 1500),  # 2 * 3/4
    ("all_gather", 4, 1000, 750),
    ("reduce_scatter", 4, 1000, 750),
    ("all_to_all", 4, 1000, 750),
    ("broadcast", 4, 1000, 750),  # 3 payloads in all, over 4 ranks
    ("send", 2, 1000, 1000),
    ("recv", 2, 1000, 0),
    ("barrier", 4, 0, 0),
    ("all_reduce", 3, 1000, Fraction(4000, 3)),
    ("all_reduce", 1, 1000, 0),
])  # fmt: skip
def test_ring_model(op, ranks, payload_bytes, expected):
    assert sent_bytes(op, ranks, payload_bytes) == expected


def test_all_reduce_is_reduce_scatter_and_all_gather():
    for ranks in range(1, 9):
        parts = sent_bytes("reduce_scatter", ranks, 77) + sent_bytes("all_gather", ranks, 77)
        assert sent_bytes("all_reduce", ranks, 77) == parts


@pytest.mark.parametrize("op, ranks, said", [("gossip", 2, "'gossip' is none"), ("send", 0, "at least 1 rank, not 0")])
def test_unknown_is_refused(op, ranks, said):
    with pytest.raises(ValueError, match=said):
        sent_bytes(op, ranks, 1)


@pytest.mark.parametrize("text, optimizer, total", [
    ("", "adam", 16),
    ("", "sgd", 8),
    ("", "momentum", 12),
    ("dp=4", "adam", 16),
    ("precision=bf16", "adam", 18),  # 2 + 4 + 12: gradients are fp32
    ("precision=fp16", "sgd", 10),  # 2 + 4 + 4
    ("dp=4 zero=1 precision=bf16", "adam", 6 + 3),  # 6 + 12/d
    ("dp=4 zero=2 precision=bf16", "adam", 2 + 4),  # 2 + 16/d
    ("dp=4 zero=3 precision=bf16", "adam", Fraction(18, 4)),
    ("dp=4 zero=1", "adam", 8 + 2),
])  # fmt: skip
def test_bytes_per_parameter(text, optimizer, total):
    assert state_bytes(Strategy.parse(text), optimizer).total == total


def test_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="'lion' is none"):
        state_bytes(Strategy(), "lion")


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_gpt_are_the_models(tied):
    model = GPT(vocab_size=96, layers=3, hidden=32, heads=4, max_length=40, tied=tied)
    shape = GPTShape(96, 3, 32, 40, tied)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    whole = ("norm", "position", "out.bias", "down.bias")
    divided = sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in whole))
    assert shape.divided == divided


def test_flops_of_a_gpt_are_the_closed_form():
    b, s, h, layers, v = 4, 128, 64, 3, 256
    closed = 72 * b * s * layers * h * h * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * layers * h))
    assert GPTShape(v, layers, h).flops(b, s) == closed
