"""What follows from a record, on records written out by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded import sample

from colossal_nb.plan import sent_bytes as ring
from colossal_nb.record import Mark, Record, Slice, measures
from colossal_nb.record.events import CATEGORIES


def piece(rank, kind, t0, t1, **more):
    lane = "compute" if kind in ("F", "B", "R", "optimizer") else "comm"
    more = {"stage": rank, "microbatch": 0} | more if lane == "compute" else more
    return Slice(rank, lane, kind, t0=t0, t1=t1, **more)


def step(number, t0, t1, *between, ranks=(0,)):
    return [
        mark
        for rank in ranks
        for mark in (
            Mark(rank, t0, number, "begin"),
            *(Mark(rank, t0, number, *rest) for rest in between),
            Mark(rank, t1, number, "end"),
        )
    ]


def test_steps_run_from_the_first_begin_to_the_last_end():
    marks = [
        *step(7, 1.0, 2.0, ("metered",), ("log", "loss", 3.5)),
        *step(8, 2.5, 3.0, ("log", "loss", 3.25)),
        *(mark._replace(rank=1, t=mark.t + 0.125) for mark in [*step(7, 1.0, 2.0), *step(8, 2.5, 3.0)]),
        Mark(0, 3.5, 9, "begin"),
    ]
    first, second = measures.steps(Record.of(marks=marks))
    assert (first.number, first.t0, first.t1, first.metered, first.loss) == (7, 1.0, 2.125, True, 3.5)
    assert (second.number, second.t0, second.t1, second.metered, second.loss) == (8, 2.5, 3.125, False, 3.25)
    assert second.seconds == 0.625


def test_several_backwards_make_one_step():
    marks = [Mark(0, t, 0, "begin") for t in (0.0, 1.0, 2.0)] + [Mark(0, 3.0, 0, "end")]
    assert [(found.t0, found.t1) for found in measures.steps(Record.of(marks=marks))] == [(0.0, 3.0)]


def test_slices_belong_to_the_step_they_begin_in():
    slices = [piece(0, "F", t, t + 0.1) for t in (0.5, 1.0, 1.9, 2.2, 2.5, 9.0)]
    record = Record.of(slices=slices, marks=[*step(0, 1.0, 2.0), *step(1, 2.5, 3.0)])
    assert measures.step_of(record).tolist() == [-1, 0, 0, -1, 1, -1]


def test_bubble_is_one_minus_busy_over_the_window():
    slices = [piece(0, "F", 0, 1), piece(1, "F", 1, 2), piece(1, "B", 2, 4), piece(0, "B", 4, 6)]
    record = Record.of(slices=slices, marks=step(0, -5.0, 9.0, ranks=(0, 1)))
    assert measures.bubble(record) == measures.bubbles(record)[0] == 1 - (3 + 3) / (2 * 6)


def test_recompute_inside_of_a_backward_counts_once():
    slices = [piece(0, "F", 0, 1), piece(0, "B", 1, 4), piece(0, "R", 1, 2), piece(1, "F", 0, 4)]
    assert measures.bubble(Record.of(slices=slices, marks=step(0, 0.0, 4.0, ranks=(0, 1)))) == 0.0


def test_metered_steps_do_not_speak_for_speed():
    slow = [piece(0, "F", 0, 1), piece(1, "F", 9, 10)]
    fast = [piece(0, "F", 20, 21), piece(1, "F", 21, 22)]
    marks = [*step(0, 0.0, 10.0, ("metered",), ranks=(0, 1)), *step(1, 20.0, 22.0, ranks=(0, 1))]
    record = Record.of(slices=slow + fast, marks=marks)
    assert measures.bubbles(record) == pytest.approx([0.9, 0.5])
    assert measures.bubble(record) == pytest.approx(0.5)
    assert measures.bubble(Record.of(slices=slow, marks=marks[:6])) == pytest.approx(0.9)


def test_without_a_pipeline_there_is_no_bubble():
    assert measures.bubble(Record()) is None
    slices = [piece(0, "F", 0, 1, stage=0), piece(1, "F", 1, 2, stage=0)]
    assert measures.bubble(Record.of(slices=slices, marks=step(0, 0.0, 2.0, ranks=(0, 1)))) is None


def test_who_comes_last_waits_least():
    calls = [
        piece(0, "all_reduce", 0.0, 5.0, group="tp:0,1", seq=3),
        piece(1, "all_reduce", 4.0, 5.0, group="tp:0,1", seq=3),
        piece(0, "all_reduce", 6.0, 7.0, group="tp:0,1", seq=4),
        piece(1, "all_reduce", 6.0, 7.5, group="tp:0,1", seq=4),
        piece(0, "recv", 8.0, 9.0, group="pp:1>0", seq=0),
    ]
    assert measures.waits(Record.of(slices=calls)) == {0: 4.0, 1: 0.5}


def test_bytes_sent_by_rank_and_kind():
    calls = [
        piece(0, "all_reduce", 0, 1, group="dp:0,1,2", seq=0, payload_bytes=100),
        piece(0, "all_reduce", 1, 2, group="dp:0,1,2", seq=1, payload_bytes=100),
        piece(0, "all_reduce", 2, 3, group="tp:0,3", seq=0, payload_bytes=8),
        piece(0, "send", 3, 4, group="pp:0>6", seq=0, payload_bytes=7),
        piece(6, "recv", 3, 4, group="pp:0>6", seq=0, payload_bytes=7),
        piece(0, "F", 4, 5),
    ]
    assert measures.sent_bytes(Record.of(slices=calls), ring) == {
        (0, "all_reduce"): 2 * Fraction(400, 3) + 8,
        (0, "send"): 7,
        (6, "recv"): 0,
    }


def test_overlap_of_the_golden_trace():
    # Two lanes per rank: compute 20-220 and 320-520, one collective 120-420: 200 of its 300 are overlapped.
    slices = [
        Slice(rank, lane, kind, t0=t0, t1=t1)
        for rank in (0, 1)
        for lane, kind, t0, t1 in (
            ("compute", "F", 20, 220),
            ("compute", "B", 320, 520),
            ("comm", "all_reduce", 120, 420),
        )
    ]
    record = Record.of(slices=slices)
    assert measures.overlap(record) == pytest.approx({0: 2 / 3, 1: 2 / 3})
    assert measures.busy(record) == {0: 400.0, 1: 400.0}
    assert math.isnan(measures.overlap(Record.of(slices=slices[:2]))[0])


def test_peak_is_the_largest_sum_on_the_device():
    memory = [
        sample(0, 1.0, parameter=5, activation=5),
        sample(0, 2.0, parameter=5, activation=9),
        sample(0, 3.0, parameter=5),
        sample(0, 2.5, "host", parameter=99),
        sample(1, 1.0, gradient=3),
    ]
    peaks = measures.peak_memory(Record.of(memory=memory))
    assert (peaks[0].total_bytes, peaks[0].t, peaks[0].categories["activation"]) == (14, 2.0, 9)
    assert peaks[1].total_bytes == 3 and set(peaks[1].categories) == set(CATEGORIES)
    assert measures.peak_memory(Record.of(memory=memory), "host")[0].total_bytes == 99


def test_losses_by_step():
    marks = [*step(0, 0, 1, ("log", "loss", 4.0), ("log", "accuracy", 0.5)), *step(1, 1, 2, ("log", "loss", 3.0))]
    assert measures.losses(Record.of(marks=marks)) == {0: 4.0, 1: 3.0}
    assert measures.losses(Record.of(marks=marks), "accuracy") == {0: 0.5}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_covered_time_is_the_union(intervals):
    slices = Record.of(slices=[Slice(0, "comm", "send", t0=t0, t1=t0 + length) for t0, length in intervals]).slices
    ticks = np.zeros(64, bool)
    for t0, length in intervals:
        ticks[t0 : t0 + length] = True
    assert measures.covered(slices) == ticks.sum()
