"""A record in other tools' formats, read back."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.plan import schedule, simulate
from colossal_nb.record import Mark, Record, Slice
from colossal_nb.record.events import CATEGORIES, TABLES
from colossal_nb.record.export import to_chrome_trace, to_csv, to_frames, tracks


def example():
    slices = [
        Slice(0, "compute", "F", 0, 0, 2, t0=10.0, t1=12.0),
        Slice(0, "comm", "all_reduce", t0=10.5, t1=11.0, payload_bytes=64, group="tp:0,1", seq=4, of='a, "b"'),
        Slice(0, "comm", "send", t0=12.0, t1=13.0, payload_bytes=8, group="pp:0>2", seq=1),
        Slice(2, "comm", "recv", t0=11.0, t1=13.0, payload_bytes=8, group="pp:0>2", seq=1),
    ]
    memory = [(0, 10.25, "device", "hooks", *range(8))]
    return Record.of(
        slices=slices, memory=memory, marks=[Mark(0, 10.0, 3, "log", "loss", 1.5), Mark(0, 14.0, 3, "end")]
    )


def test_csv_has_named_columns_and_every_value(tmp_path):
    record = example()
    files = to_csv(record, tmp_path / "new" / "folder")
    assert [file.stem for file in files] == list(TABLES)
    for file in files:
        with file.open(newline="") as text:
            names, *rows = csv.reader(text)
        assert tuple(names) == TABLES[file.stem].names
        assert rows == [[str(value) for value in row] for row in getattr(record, file.stem).tolist()]


def test_frames_have_the_same_columns():
    frames = to_frames(example())
    assert {table: tuple(frame.columns) for table, frame in frames.items()} == {t: c.names for t, c in TABLES.items()}
    assert frames["slices"].groupby("kind")["payload_bytes"].sum().to_dict() == {
        "F": 0, "all_reduce": 64, "send": 8, "recv": 8,
    }  # fmt: skip


def events(record, tmp_path):
    return json.loads(to_chrome_trace(record, tmp_path / "trace.json").read_text())["traceEvents"]


def test_trace_puts_ranks_in_processes_and_lanes_in_threads(tmp_path):
    found = events(example(), tmp_path)
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]}
    assert named[0, None] == "rank 0" and named[2, None] == "rank 2"
    [forward] = [e for e in found if e["ph"] == "X" and e["name"] == "F2"]
    assert named[0, forward["tid"]] == "compute"
    assert (forward["ts"], forward["dur"]) == (0.0, 2e6)
    [reduce] = [e for e in found if e["name"] == "all_reduce"]
    assert named[0, reduce["tid"]] == "comm" and reduce["tid"] != forward["tid"]
    assert reduce["args"] == {
        "kind": "all_reduce", "stage": -1, "chunk": 0, "microbatch": -1, "payload_bytes": 64, "group": "tp:0,1",
        "seq": 4, "of": 'a, "b"',
    }  # fmt: skip


def test_trace_draws_messages_memory_and_marks(tmp_path):
    found = events(example(), tmp_path)
    start, finish = ([e for e in found if e["ph"] == ph] for ph in "sf")
    assert [(e["pid"], e["id"]) for e in start + finish] == [(0, "pp:0>2 1"), (2, "pp:0>2 1")]
    [counter] = [e for e in found if e["ph"] == "C"]
    assert counter["args"] == dict(zip(CATEGORIES, range(8), strict=True)) and counter["ts"] == 0.25e6
    assert [(e["name"], e["args"]) for e in found if e["ph"] == "i"] == [
        ("step 3 log", {"step": 3, "loss": 1.5}), ("step 3 end", {"step": 3}),
    ]  # fmt: skip


def assert_nested(found):
    """On each thread two slices are apart or one holds the other."""
    threads = {}
    for event in found:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            threads.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1e3)))
    for pieces in threads.values():
        for i, (start, end) in enumerate(pieces):
            for other_start, other_end in pieces[:i]:
                apart = end <= other_start or other_end <= start
                inside = other_start <= start <= end <= other_end or start <= other_start <= other_end <= end
                assert apart or inside


times = st.one_of(st.integers(0, 12).map(float), st.floats(0, 10, allow_nan=False))
lists = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["compute", "comm"]), times, times), max_size=25)


@given(lists)
def test_slices_nest_on_every_thread(tmp_path_factory, pieces):
    slices = [Slice(rank, lane, "F", t0=min(t0, t1), t1=max(t0, t1)) for rank, lane, t0, t1 in pieces]
    found = events(Record.of(slices=slices), tmp_path_factory.mktemp("traces"))
    assert sum(event["ph"] == "X" for event in found) == len(pieces)
    assert_nested(found)


def test_what_crosses_gets_a_thread_of_its_own():
    slices = Record.of(slices=[Slice(0, "comm", "send", t0=t0, t1=t1) for t0, t1 in ((0, 4), (1, 2), (3, 6), (5, 7))])
    assert tracks(slices.slices) == [0, 0, 1, 0]
    with pytest.raises(AssertionError):
        assert_nested([{"ph": "X", "pid": 0, "tid": 0, "ts": ts, "dur": 2.0} for ts in (0.0, 1.0)])


def test_plan_is_exported_like_a_run(tmp_path):
    found = events(simulate(schedule("1f1b", 2, 3)), tmp_path)
    assert sum(event["ph"] == "X" for event in found) == 12
    assert_nested(found)


def test_empty_record_is_an_empty_trace(tmp_path):
    assert events(Record(), tmp_path) == []
    assert all(frame.empty for frame in to_frames(Record()).values())
