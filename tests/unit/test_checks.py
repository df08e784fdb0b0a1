"""Every check sees nothing in what agrees, and the fault that was planted in what does not."""

import numpy as np
import pytest
from recorded import sample

from colossal_nb import checks
from colossal_nb.plan import Layout, Mesh, On, Partial, Shard, schedule, simulate
from colossal_nb.record import Mark, Record, RecordBuilder, Recorder, Slice

MESH = Mesh({"tp": 2})


def changed(record, change, *, table="slices"):
    """A copy in which `change(rows)` has changed the rows in place, or given others back."""
    rows = getattr(record, table).copy()
    result = change(rows)
    rows = rows if result is None else result
    return Record(**{table: rows}, **({} if table == "marks" else {"marks": record.marks.copy()}))


# --- M


def test_categories_sum_to_the_ledgers_total():
    record = Record.of(memory=[sample(0, 1.0, parameter=4, gradient=4), sample(0, 2.0, parameter=4)])
    assert checks.memory(record, {(0, 1.0): 8, (0, 2.0): 4}) == []
    assert checks.memory(record, {(0, 1.0): 9}) == ["rank 0 at 1.000000 s: categories sum to 8 B, the total is 9 B"]
    freed_twice = Record.of(memory=[sample(1, 1.0, activation=-4)])
    assert checks.memory(freed_twice) == ["rank 1 holds -4 B of activation at 1.000000 s"]


def test_adam_keeps_two_moments_and_a_scalar_per_tensor():
    record = Record.of(memory=[sample(0, 0.0), sample(0, 1.0, parameter=100, optimizer=212)])
    assert checks.adam_state(record, {0: 3}) == []
    assert checks.adam_state(record, {0: 2}) == ["rank 0: Adam's state is 212 B, expected 208 B"]
    mixed = Record.of(memory=[sample(0, 1.0, parameter=50, optimizer=312)])  # 25 numbers: 2 B, and 4 + 8 B
    assert checks.adam_state(mixed, {0: 3}, weight_bytes=2) == []
    assert checks.adam_state(mixed, {0: 3}) == ["rank 0: Adam's state is 312 B, expected 112 B"]


def test_metered_peak_is_the_allocators():
    memory = [sample(0, 0.0, basis="metered", temporary=960), sample(0, 1.0, temporary=5000)]
    assert checks.peak(Record.of(memory=memory), {0: 1000}) == []
    assert checks.peak(Record.of(memory=memory), {0: 1100}) == [
        "rank 0: metered peak 960 B, the allocator's 1100 B (-12.7%)"
    ]
    assert len(checks.peak(Record.of(memory=memory[1:]), {0: 5000})) == 1


def test_memory_comes_back_to_its_base():
    memory = [sample(0, 0.0, parameter=7), sample(0, 1.0, parameter=7, activation=3), sample(0, 2.0, parameter=7)]
    assert checks.memory_returns(Record.of(memory=memory), base_t=0.5) == []
    assert checks.memory_returns(Record.of(memory=memory[:2]), base_t=0.5) == [
        "rank 0: activation went from 0 B to 3 B"
    ]


# --- P


@pytest.fixture
def planned():
    orders = schedule("1f1b", 3, 4)
    return orders, simulate(orders)


def test_a_played_schedule_agrees(planned):
    orders, record = planned
    assert checks.pipeline(record, orders) == checks.pipeline(record) == checks.bubble(record, 3, 4) == []


def test_a_lost_backward_is_seen(planned):
    orders, record = planned
    faulty = changed(
        record, lambda rows: rows[~((rows["kind"] == "B") & (rows["stage"] == 1) & (rows["microbatch"] == 2))]
    )
    assert "step 0: rank 1 ran 1B2 0 times, expected 1" in checks.pipeline(faulty, orders)
    assert "step 0: rank 1 ran 1B2 0 times, expected 1" in checks.pipeline(faulty)


def test_a_forward_that_ran_twice_is_seen(planned):
    orders, record = planned
    faulty = changed(record, lambda rows: np.concatenate([rows, rows[:1]]))
    assert "step 0: rank 0 ran 0F0 2 times, expected 1" in checks.pipeline(faulty, orders)


def test_a_stage_that_never_ran_is_seen(planned):
    orders, record = planned
    faulty = changed(record, lambda rows: rows[rows["stage"] != 2])
    assert "step 0: stage 2 did not run" in checks.pipeline(faulty, orders)


def test_two_slices_at_once_are_seen(planned):
    orders, record = planned

    def longer(rows):
        rows["t1"][rows["kind"] == "F"] += 0.5

    assert any("before another slice ended" in reason for reason in checks.pipeline(changed(record, longer), orders))


def test_an_input_that_comes_late_is_seen(planned):
    orders, record = planned

    def earlier(rows):
        rows["t0"][(rows["stage"] == 1) & (rows["kind"] == "F") & (rows["microbatch"] == 0)] -= 0.25

    faulty = changed(record, earlier)
    assert "step 0: rank 1 begins 1F0 before 0F0 has ended" in checks.pipeline(faulty, orders)
    assert checks.pipeline(faulty, orders, clock_error_s=0.25) == []


def test_more_in_flight_than_planned_is_seen():
    record = simulate(schedule("gpipe", 3, 4))
    assert checks.pipeline(record, schedule("1f1b", 3, 4)) == [
        "step 0: rank 0 has 4 microbatches in flight at most, the plan says 3",
        "step 0: rank 1 has 4 microbatches in flight at most, the plan says 2",
        "step 0: rank 2 has 4 microbatches in flight at most, the plan says 1",
    ]
    assert len(checks.bubble(record, 3, 4, "1f1b")) == 3


def test_every_step_is_checked_by_itself():
    orders = schedule("gpipe", 1, 2)
    first = simulate(orders)
    late = [[*row] for row in first.slices.tolist()]
    for row in late:
        row[6] += 10.0
        row[7] += 10.0
    marks = [
        Mark(0, t, step, phase) for t, step, phase in ((0, 0, "begin"), (9, 0, "end"), (10, 1, "begin"), (19, 1, "end"))
    ]
    record = Record.of(slices=[*first.slices.tolist(), *map(tuple, late[:-1])], marks=marks)
    assert checks.pipeline(record, orders) == ["step 1: rank 0 ran 0B1 0 times, expected 1"]


def test_a_wrong_bubble_is_seen(planned):
    _, record = planned

    def slower(rows):
        rows["t1"][-1] += 1.0

    assert checks.bubble(changed(record, slower), 3, 4)[0].startswith("bubble 0.3")


def test_ranks_of_one_stage_are_all_compared(planned):
    orders, record = planned
    twins = [tuple(row) for row in record.slices.tolist()] + [(row[0] + 3, *row[1:]) for row in record.slices.tolist()]
    marks = [Mark(rank, t, 0, phase) for rank in range(6) for t, phase in ((0.0, "begin"), (99.0, "end"))]
    assert checks.pipeline(Record.of(slices=twins, marks=marks), orders) == []
    faulty = [row for row in twins if not (row[0] == 4 and row[2] == "F" and row[5] == 3)]
    assert "step 0: rank 4 ran 1F3 0 times, expected 1" in checks.pipeline(
        Record.of(slices=faulty, marks=marks), orders
    )


# --- S


@pytest.mark.parametrize("placements", [
    {}, {"tp": Shard(0)}, {"tp": Partial()}, {"tp": On(1)}, {"tp": Shard(1)}, {"tp": Shard(0, ((0, 2), (1,)))},
    {"tp": Shard(0, ((0, 1), (1, 2)))},
])  # fmt: skip
def test_whole_layouts_agree(placements):
    assert checks.layout(Layout.of((3, 2), "float32", MESH, **placements)) == []


def test_an_element_without_an_owner_is_seen():
    layout = Layout.of((3, 2), "float32", MESH, tp=Shard(0, ((0,), (2,))))
    assert checks.layout(layout) == ["element [1, 0] is owned by 0 ranks, declared are 1"]


def held(rank, tensor, layout, shape, size):
    return (rank, 0.0, tensor, layout.to_json(), str(list(shape)), size)


def test_real_tensors_are_the_formulas_slices():
    weight = Layout.of((5, 2), "float32", MESH, tp=Shard(0))
    bias = Layout.of((3,), "float32", MESH)
    layouts = [
        held(0, "w", weight, (3, 2), 24), held(1, "w", weight, (2, 2), 16),
        held(0, "b", bias, (3,), 12), held(1, "b", bias, (3,), 12),
    ]  # fmt: skip
    memory = [sample(0, 1.0, parameter=36), sample(1, 1.0, parameter=28)]
    assert checks.sharding(Record.of(layouts=layouts, memory=memory)) == []
    faulty = [held(0, "w", weight, (2, 2), 16), *layouts[1:]]
    assert checks.sharding(Record.of(layouts=faulty, memory=memory)) == [
        "rank 0 has w as [2, 2] (16 B), its layout says [3, 2] (24 B)",
        "rank 0: layouts sum to 28 B, the ledger has 36 B of parameters",
    ]


# --- C


def called(rank, kind, seq, group="tp:0,1", payload=8):
    return Slice(rank, "comm", kind, group=group, seq=seq, payload_bytes=payload, t0=float(seq), t1=float(seq) + 1)


GOOD = [
    *(called(rank, "all_reduce", seq) for rank in (0, 1) for seq in (0, 1)),
    called(0, "send", 0, "pp:0>2", 40),
    called(2, "recv", 0, "pp:0>2", 40),
]
PLAN = {
    (0, "all_reduce", "tp:0,1", 8): 2,
    (1, "all_reduce", "tp:0,1", 8): 2,
    (0, "send", "pp:0>2", 40): 1,
    (2, "recv", "pp:0>2", 40): 1,
}


def test_whole_calls_as_planned_agree():
    assert checks.communication(Record.of(slices=GOOD), PLAN) == []


FAULTY_CALLS = {
    "one rank did not come": (GOOD[1:], "call 0 of tp:0,1 is not whole: rank 1 all_reduce"),
    "ranks did different things": (
        [called(0, "all_gather", 0), *GOOD[1:]],
        "call 0 of tp:0,1 is not whole: rank 0 all_gather, rank 1 all_reduce"),
    "payloads differ": (
        [called(0, "all_reduce", 0, payload=4), *GOOD[1:]], "call 0 of tp:0,1 has different payloads: [4, 8] B"),
    "sent and not received": (GOOD[:-1], "call 0 of pp:0>2 is not whole: rank 0 send"),
    "received less than was sent": (
        [*GOOD[:-1], called(2, "recv", 0, "pp:0>2", 39)], "call 0 of pp:0>2 has different payloads: [39, 40] B"),
    "a stranger came": ([*GOOD, called(3, "all_reduce", 0)],
        "call 0 of tp:0,1 is not whole: rank 0 all_reduce, rank 1 all_reduce, rank 3 all_reduce"),
    "one call too many": ([*GOOD, called(0, "all_reduce", 2), called(1, "all_reduce", 2)],
        "rank 0 called all_reduce on tp:0,1 with 8 B 3 times, planned 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY_CALLS)
def test_a_faulty_call_is_seen(fault):
    slices, said = FAULTY_CALLS[fault]
    assert said in checks.communication(Record.of(slices=slices), PLAN)


def test_a_planned_call_that_never_came_is_seen():
    assert checks.communication(Record(), {(0, "barrier", "dp:0,1", 0): 1}) == [
        "rank 0 called barrier on dp:0,1 with 0 B 0 times, planned 1"
    ]


def test_dropped_events_are_seen():
    recorder, builder = Recorder(5, capacity=2), RecordBuilder()
    for _ in range(5):
        recorder.end(recorder.begin("F"))
    builder.feed(recorder.drain())
    assert checks.communication(builder.record()) == ["rank 5 dropped 3 events"]


# --- L


def test_values_agree_within_the_rule_and_no_further():
    b = np.array([0.0, 2.0])
    assert checks.values("loss", b + 1.9e-10, b, rtol=1e-10) == []
    assert checks.values("loss", b + 2.1e-10, b, rtol=1e-10) == ["loss differs by 2.1e-10, allowed are 2e-10"]
    assert checks.values("w", [1e-7], [0.0], rtol=1e-5, lr=1e-2, steps=5) == []
    assert len(checks.values("w", [1e-6], [0.0], rtol=1e-5, lr=1e-2, steps=5)) == 1
    assert len(checks.values("w", [np.nan], [0.0], rtol=1.0, lr=1.0, steps=1)) == 1
    assert checks.values("w", [1.0, 2.0], [1.0], rtol=1.0) == ["w has the shape [2], expected [1]"]
