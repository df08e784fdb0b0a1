"""Schedules: complete, in order, free of deadlock, with the known peaks; and faults that validate must find."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.plan import Action, Exchange, in_flight, program, schedule, simulate, validate

NAMES = ("gpipe", "1f1b")
sizes = st.tuples(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 24))


def actions(text):
    """`"F0 F1 B0 B1"` on stage 0, `"1F0"` on stage 1."""
    parts = (re.fullmatch(r"(\d*)([A-Z])(\d+)", word).groups() for word in text.split())
    return [Action(kind, int(stage or 0), int(microbatch)) for stage, kind, microbatch in parts]


@given(sizes)
def test_every_schedule_is_valid_with_the_known_peaks(size):
    name, p, m = size
    orders = schedule(name, p, m)
    validate(orders)
    assert in_flight(orders) == [m if name == "gpipe" else min(m, p - rank) for rank in range(p)]


@given(sizes)
def test_forward_only_is_valid(size):
    validate([[action for action in order if action.kind == "F"] for order in schedule(*size)])


def test_1f1b_order_written_out():
    assert schedule("1f1b", 3, 4) == [
        actions("F0 F1 F2 B0 F3 B1 B2 B3"),
        actions("1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3"),
        actions("2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"),
    ]


def test_gpipe_order_written_out():
    assert schedule("gpipe", 2, 2) == [actions("F0 F1 B0 B1"), actions("1F0 1F1 1B0 1B1")]


def shown(steps):
    words = []
    for step in steps:
        if isinstance(step, Exchange):
            sends = [f">{transfer.made}@{transfer.target}" for transfer in step.sends]
            words.append("{" + " ".join(sends + [f"<{t.made}@{t.source}" for t in step.receives]) + "}")
        else:
            words.append(str(step))
    return " ".join(words)


def test_exchanges_written_out():
    first, last = program(schedule("1f1b", 2, 2))
    assert shown(first) == "0F0 {>0F0@1} 0F1 {>0F1@1 <1B0@1} 0B0 {<1B1@1} 0B1"
    assert shown(last) == "{<0F0@0} 1F0 1B0 {>1B0@0 <0F1@0} 1F1 1B1 {>1B1@0}"


@given(sizes)
def test_every_message_is_sent_and_received_once(size):
    _, p, m = size
    steps = [step for steps in program(schedule(*size)) for step in steps if isinstance(step, Exchange)]
    sends = sorted(transfer for step in steps for transfer in step.sends)
    assert sends == sorted(transfer for step in steps for transfer in step.receives)
    assert len(set(sends)) == len(sends) == 2 * (p - 1) * m


def swapped(orders, rank, one, other):
    order = orders[rank]
    i, j = order.index(one), order.index(other)
    order[i], order[j] = order[j], order[i]
    return orders


def without(orders, rank, position):
    del orders[rank][position]
    return orders


FAULTS = {
    "a forward is missing": (lambda: without(schedule("1f1b", 2, 3), 1, 0), "1F0 is there 0 times"),
    "a backward is there twice": (lambda: [actions("F0 B0 B0")], "0B0 is there 2 times"),
    "a microbatch is skipped": (lambda: [actions("F0 B0 F2 B2")], "microbatches are numbered [0, 2]"),
    "a stage is on two ranks": (lambda: [actions("F0 B0"), actions("F1 B1")], "stage 0 is on ranks [0, 1]"),
    "backward before forward": (
        lambda: swapped(schedule("gpipe", 1, 2), 0, Action("F", 0, 1), Action("B", 0, 1)), "rank 0 has 0B1 before 0F1"),
    "ends of a link disagree": (
        lambda: [actions("F0 F1 B0 B1"), actions("1F1 1F0 1B0 1B1")],
        "rank 0 sends to rank 1 in another order"),
    "both wait for the other": (
        # Rank 0 wants 1B0 before it makes 0F1; rank 1 wants 0F1 before it makes 1B0.
        lambda: [actions("F0 B0 F1 B1"), actions("1F0 1F1 1B0 1B1")],
        "rank 0 waits for ever in recv of 1B0 from rank 1; rank 1 waits for ever in recv of 0F1 from rank 0"),
    "nothing to do": (lambda: [[]], "it has the kinds none"),
    "an unknown kind": (lambda: [actions("F0 X0")], "not F and B"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_validate_finds_a_planted_fault(fault):
    make, said = FAULTS[fault]
    with pytest.raises(ValueError, match=re.escape(said)):
        validate(make())


def test_deadlock_of_rendezvous_sends_is_found_where_buffered_sends_would_pass():
    # Rank 0 stands in the send of 0F2 until rank 1 receives it; rank 1 stands in the send of 1B0 before that.
    orders = [actions("F0 F1 F2 F3 B0 B1 B2 B3"), actions("1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3")]
    simulate(orders)
    with pytest.raises(ValueError, match="waits for ever") as caught:
        validate(orders)
    assert str(caught.value) == (
        "this schedule is not valid: rank 0 waits for ever in send of 0F2 to rank 1;"
        " rank 1 waits for ever in send of 1B0 to rank 0"
    )


@pytest.mark.parametrize("call, said", [
    (lambda: schedule("zb-h1", 2, 2), "schedule 'zb-h1' is not built; built: 1f1b, gpipe"),
    (lambda: schedule("gpip", 2, 2), "did you mean gpipe?"),
    (lambda: schedule("gpipe", 0, 2), "p=0: p is a whole number, at least 1"),
    (lambda: schedule("1f1b", 2, 0), "m=0: m is a whole number, at least 1"),
    (lambda: schedule("1f1b", 2, 2, chunks=2), "one chunk per rank, not 2"),
])  # fmt: skip
def test_what_cannot_be_scheduled_is_refused(call, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        call()
