"""Playing a schedule: golden numbers, uneven stages, slow links."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb import checks
from colossal_nb.plan import Action, schedule, simulate
from colossal_nb.record.measures import bubble, bubbles, steps

GOLDEN = [  # F=1, B=2, no communication: name, p, m, T, bubble, in flight per rank
    ("gpipe", 4, 8, 33, 0.2727, [8, 8, 8, 8]),
    ("gpipe", 4, 16, 57, 0.1579, [16] * 4),
    ("gpipe", 2, 4, 15, 0.2000, [4, 4]),
    ("gpipe", 8, 32, 117, 0.1795, [32] * 8),
    ("1f1b", 4, 8, 33, 0.2727, [4, 3, 2, 1]),
]


def peaks(record):
    found = []
    for rank in record.ranks:
        held = peak = 0
        for row in record.slices[record.slices["rank"] == rank]:
            held += 1 if row["kind"] == "F" else -1
            peak = max(peak, held)
        found.append(peak)
    return found


@pytest.mark.parametrize("name, p, m, end, share, in_flight", GOLDEN)
def test_golden_numbers(name, p, m, end, share, in_flight):
    record = simulate(schedule(name, p, m))
    assert record.slices["t1"].max() == end
    assert bubble(record) == pytest.approx(share, abs=5e-5)
    assert peaks(record) == in_flight
    assert len(record.slices) == 2 * p * m


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(2, 8), st.integers(1, 20))
def test_bubble_is_the_formula_and_the_record_agrees_with_the_plan(name, p, m):
    orders = schedule(name, p, m)
    record = simulate(orders)
    assert bubble(record) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert checks.pipeline(record, orders) == []
    assert checks.bubble(record, p, m, name) == []


def test_one_step_from_zero_to_the_end():
    record = simulate(schedule("1f1b", 2, 2), {"F": 0.5, "B": 1.0})
    [step] = steps(record)
    assert (step.t0, step.t1, step.seconds) == (0.0, 4.5, 4.5)
    assert len(bubbles(record)) == 1


def test_slow_stage_sets_the_pace():
    def seconds(action: Action) -> float:
        return (3.0 if action.stage == 1 else 1.0) * (2 if action.kind == "B" else 1)

    record = simulate(schedule("1f1b", 2, 10), seconds)
    # Stage 1 works without pause from its first input at 1 to 1 + 10 * 9; the last backward of stage 0 takes 2.
    assert record.slices["t1"].max() == 1 + 90 + 2


def test_link_time_lies_between_stages_only():
    # One microbatch: down F, link, F, B, link, B.
    assert simulate(schedule("gpipe", 2, 1), link_s=0.25).slices["t1"].max() == 6.5
    assert simulate(schedule("gpipe", 1, 3), link_s=0.25).slices["t1"].max() == 9.0


def test_schedule_that_cannot_end_is_refused():
    with pytest.raises(ValueError, match="cannot be played"):
        simulate([[Action("B", 0, 0), Action("F", 0, 0)]])
