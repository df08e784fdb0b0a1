"""Writing events and reading them back: nothing lost, nothing dropped in silence, readable from another thread."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.record import (
    Mark,
    Record,
    RecordBuilder,
    Recorder,
    Slice,
    group_axis,
    group_name,
    group_ranks,
    link_name,
)  # fmt: skip
from colossal_nb.record.events import CATEGORIES, TABLES, Frame


def read(*recorders):
    builder = RecordBuilder()
    for recorder in recorders:
        builder.feed(recorder.drain())
    return builder.record()


def test_slice_comes_back_as_it_was_written():
    recorder = Recorder(3)
    before = recorder.now()
    token = recorder.begin(
        "all_reduce", "comm", stage=2, chunk=1, microbatch=5, group="tp:2,3", seq=7, payload_bytes=1 << 40, of="block.é"
    )
    recorder.end(token)
    [row] = read(recorder).slices
    assert row.tolist()[:6] == (3, "comm", "all_reduce", 2, 1, 5)
    assert row.tolist()[8:] == (1 << 40, "tp:2,3", 7, "block.é")
    assert before <= row["t0"] <= row["t1"] <= recorder.now()


def test_every_table_comes_back():
    recorder = Recorder(1)
    recorder.memory("device", {"parameter": 8, "unknown": 5}, basis="metered")
    recorder.mark(4, "log", "loss", 2.5)
    recorder.mark(4, "end")
    recorder.layout("head.weight", "{}", "[4, 2]", 32)
    recorder.state("blocked", "recv")
    record = read(recorder)
    [sample] = record.memory
    assert (sample["where"], sample["basis"], sample["parameter"], sample["unknown"]) == ("device", "metered", 8, 5)
    assert sum(sample[category] for category in CATEGORIES) == 13
    assert record.marks[["rank", "step", "phase", "name", "value"]].tolist()[0] == (1, 4, "log", "loss", 2.5)
    assert math.isnan(record.marks["value"][1])
    [held] = record.layouts
    assert held[["tensor", "layout", "local_shape", "local_bytes"]].tolist() == ("head.weight", "{}", "[4, 2]", 32)
    assert record.states[["rank", "state", "reason"]].tolist() == [(1, "blocked", "recv")]
    assert record.ranks == (1,)


def test_unknown_memory_category_is_our_mistake():
    with pytest.raises(AssertionError, match="cache"):
        Recorder(0).memory("device", {"cache": 3})


def test_open_slices_are_known_until_they_end():
    recorder = Recorder(2)
    outer = recorder.begin("F", stage=0, microbatch=1)
    inner = recorder.begin("recv", "comm", group="pp:0>2", seq=9)
    assert [(piece.kind, piece.group, piece.seq) for piece in recorder.open()] == [("F", "", -1), ("recv", "pp:0>2", 9)]
    assert all(math.isnan(piece.t1) and piece.rank == 2 for piece in recorder.open())
    assert len(read(recorder).slices) == 0
    recorder.end(inner)
    assert [piece.kind for piece in recorder.open()] == ["F"]
    recorder.end(outer)
    assert recorder.open() == []
    assert read(recorder).slices["kind"].tolist() == ["F", "recv"]


def test_what_was_cut_short_is_neither_open_nor_written():
    recorder = Recorder(rank=0)
    cut = recorder.begin("optimizer")
    recorder.abandon()
    assert recorder.open() == recorder.waits() == []
    recorder.end(cut)  # by whoever learns of it later
    recorder.end(recorder.begin("F"))
    assert read(recorder).slices["kind"].tolist() == ["F"]


def test_switched_off_it_writes_nothing_but_knows_what_is_open():
    recorder = Recorder(0)
    recorder.enabled = False
    token = recorder.begin("F")
    assert [piece.kind for piece in recorder.open()] == ["F"]
    recorder.end(token)
    recorder.memory("device", {"parameter": 1})
    recorder.mark(0, "begin")
    assert read(recorder).ranks == () and recorder.open() == []


def test_full_ring_drops_the_oldest_and_says_how_many():
    recorder = Recorder(0, capacity=10)
    for seq in range(25):
        recorder.end(recorder.begin("F", seq=seq))
    record = read(recorder)
    assert record.slices["seq"].tolist() == list(range(15, 25))
    assert record.dropped == {0: 15}
    recorder.end(recorder.begin("F"))
    assert read(recorder).dropped == {0: 15}


def test_clock_shift_moves_what_is_written():
    recorder = Recorder(0)
    recorder.shift_s = 1e6
    recorder.end(recorder.begin("F"))
    recorder.mark(0, "begin")
    record = read(recorder)
    assert record.slices["t0"][0] > 1e6 and record.slices["t1"][0] >= record.slices["t0"][0]
    assert record.marks["t"][0] > 1e6


def test_threads_write_and_drain_at_once_and_nothing_is_lost():
    recorder, builder = Recorder(0), RecordBuilder()
    each, writers = 3000, 4

    def write(number):
        for seq in range(each):
            recorder.end(recorder.begin("send", "comm", seq=seq, group=f"pp:{number}>9", of=f"tensor {seq % 50}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recorder.open()
        builder.feed(recorder.drain())
    builder.feed(recorder.drain())
    slices = builder.record().slices
    assert len(slices) == each * writers
    for number in range(writers):
        mine = slices[slices["group"] == f"pp:{number}>9"]
        assert sorted(mine["seq"].tolist()) == list(range(each))
        assert all(row["of"] == f"tensor {row['seq'] % 50}" for row in mine)


def test_every_frame_can_be_read_by_itself_and_in_any_order():
    recorder = Recorder(0)
    frames = []
    for seq in range(3):
        recorder.end(recorder.begin("F", seq=seq, of="the same long name"))
        frames.append(recorder.drain())
    builder = RecordBuilder()
    for frame in reversed(frames):
        assert builder.feed(frame).slices["of"].tolist() == ["the same long name"]
    assert builder.record().slices["seq"].tolist() == [0, 1, 2]
    assert builder.record().slices["seq"].tolist() == [0, 1, 2]


def test_frame_carries_only_the_names_it_uses():
    recorder = Recorder(0)
    for number in range(500):
        recorder.end(recorder.begin("F", of=f"tensor {number}"))
    recorder.drain()
    recorder.end(recorder.begin("F", of="tensor 7"))
    assert sorted(Frame.unpack(recorder.drain()).names.values()) == ["", "F", "compute", "tensor 7"]


@pytest.mark.parametrize("spoil, said", [
    (lambda data: b"", "at least"),
    (lambda data: b"xxxx" + data[4:], "not an event frame"),
    (lambda data: data[:4] + b"\x09\x00" + data[6:], "version 9"),
    (lambda data: data[:-1], "came as"),
    (lambda data: data + b"0", "came as"),
])  # fmt: skip
def test_other_bytes_are_refused(spoil, said):
    recorder = Recorder(0)
    recorder.end(recorder.begin("F"))
    with pytest.raises(ValueError, match=said):
        RecordBuilder().feed(spoil(recorder.drain()))


def test_records_are_read_only():
    recorder = Recorder(0)
    recorder.end(recorder.begin("F"))
    record = read(recorder)
    for table in TABLES:
        with pytest.raises(ValueError, match="read-only"):
            getattr(record, table)["rank"] = 5
    with pytest.raises(TypeError):
        record.dropped[0] = 1


def test_empty_record_has_all_columns():
    for record in (Record(), Record.concat([]), RecordBuilder().record(), Record.of()):
        for table, columns in TABLES.items():
            assert getattr(record, table).dtype.names == columns.names
        assert record.ranks == ()


times = st.floats(-1e6, 1e6, allow_nan=False)
rows = st.lists(st.builds(
    Slice, rank=st.integers(0, 3), lane=st.sampled_from(["compute", "comm"]), kind=st.sampled_from(["F", "send"]),
    stage=st.integers(-1, 7), chunk=st.just(0), microbatch=st.integers(-1, 9), t0=times, t1=times,
    payload_bytes=st.integers(0, 1 << 50), group=st.just("tp:0,1"), seq=st.integers(-1, 1 << 40),
    of=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
))  # fmt: skip


@given(rows, rows)
def test_concat_keeps_every_row_in_the_order_of_time(some, others):
    joined = Record.concat([Record.of(slices=some), Record.of(slices=others)]).slices
    assert joined["t0"].tolist() == sorted(joined["t0"].tolist())
    assert sorted(map(repr, joined.tolist())) == sorted(repr(tuple(row)) for row in some + others)


def test_select_keeps_the_rest():
    record = Record.of(
        slices=[Slice(0, "comm", "send", t0=0.0), Slice(1, "comm", "send", t0=1.0)], marks=[Mark(0, 0.0, 0, "begin")]
    )
    chosen = record.select(slices=record.slices["rank"] == 1)
    assert chosen.slices["rank"].tolist() == [1] and len(chosen.marks) == 1
    assert chosen.ranks == (0, 1)


def test_group_names_list_their_ranks():
    assert group_name("tp", (2, 3)) == "tp:2,3"
    assert group_ranks("tp:2,3") == (2, 3) and group_axis("tp:2,3") == "tp"
    assert group_ranks(link_name("pp", 10, 2)) == (10, 2) and group_axis(link_name("pp", 10, 2)) == "pp"
    assert group_ranks("") == ()


def test_decoded_columns_have_no_text_numbers():
    recorder = Recorder(0)
    recorder.end(recorder.begin("F", of="x"))
    slices = read(recorder).slices
    assert all(slices.dtype[name].kind == "U" for name in TABLES["slices"].text)
    assert np.issubdtype(slices.dtype["payload_bytes"], np.int64)


def test_a_slice_in_the_background_is_open_but_not_waited_for() -> None:
    recorder = Recorder(0)
    sending = recorder.begin("send", "comm", group="pp:0>1", seq=0)
    reducing = recorder.begin("all_reduce", "comm", group="dp:0,1", seq=0)
    recorder.begin("F", stage=0)
    assert [piece.kind for piece in recorder.waits()] == ["send", "all_reduce"]
    recorder.set_background(sending, True)
    assert [piece.kind for piece in recorder.waits()] == ["all_reduce"]
    assert [piece.kind for piece in recorder.open()] == ["send", "all_reduce", "F"]
    recorder.set_background(sending, False)
    assert [piece.kind for piece in recorder.waits()] == ["send", "all_reduce"]
    recorder.end(sending)
    recorder.set_background(sending, True)  # too late to matter
    recorder.end(reducing)
    assert recorder.waits() == []
