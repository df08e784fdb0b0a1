"""The comparison of strategies: what the records say, in a table, a sentence and a picture."""

import xml.etree.ElementTree as ET

import pytest
from recorded import sample

from colossal_nb.record.events import Mark, Slice, group_name
from colossal_nb.record.store import Record
from colossal_nb.views import comparison, comparison_svg
from colossal_nb.views.comparison import Entry

LONG = "dp=2 tp=2 pp=2 schedule=gpipe microbatches=16 tp_mode=1d recompute=none"


def record(loss: float, step_s: float = 1.0, activation: int = 600, steps: int = 2) -> Record:
    """Two ranks, steps of which the first is metered, one all-reduce of 1 KiB, peaks of 1000 and some bytes."""
    marks, memory, slices = [], [], []
    for rank in (0, 1):
        for step in range(steps):
            begin = 100.0 * step
            marks.append(Mark(rank, begin, step, "begin"))
            marks += [Mark(rank, begin, step, "metered")] if step == 0 else []
            marks.append(Mark(rank, begin, step, "log", "loss", loss / (step + 1)))
            marks.append(Mark(rank, begin + (5.0 if step == 0 else step_s), step, "end"))
        memory.append(sample(rank, 1.0, parameter=300 + 100 * rank, gradient=100, activation=activation))
        slices.append(Slice(rank, "comm", "all_reduce", t0=1.0, t1=2.0, payload_bytes=1024,
                            group=group_name("dp", (0, 1)), seq=0))  # fmt: skip
    return Record.of(slices=slices, marks=marks, memory=memory)


def entries() -> list[Entry]:
    return [
        Entry("dp=2", record(2.0), 3.0, 2, limit="communication (40% of the step time)"),
        Entry("tp=2", record(2.000001, step_s=0.5, activation=100), 4.0, 2),
        Entry("tp=3", None, reason="ValueError: 4 heads <cannot> be dealt to 3 ranks"),
    ]


def test_the_tables_say_what_the_records_say() -> None:
    found = comparison.tables(entries())
    assert found["step_s"].tolist()[:2] == [1.0, 0.5]
    assert found["peak_bytes"].tolist()[:2] == [1100, 600]
    assert found["categories"][0].sum() == 1100 and found["categories"][0].tolist()[:4] == [400, 100, 0, 600]
    assert found["sent_bytes"].tolist()[:2] == [2048, 2048]
    assert found["loss_difference"][1] == pytest.approx(1e-6)
    assert found["reference"].tolist() == [True, False, False]
    assert comparison.rows(found) == [
        ("dp=2", "2", "1.0000", "reference", "3.0 s", "1.0 s", "1.1 KiB", "2.0 KiB", "-",
         "communication (40% of the step time)"),
        ("tp=2", "2", "1.0000", "1.0e-06", "4.0 s", "500 ms", "600 B", "2.0 KiB", "-", "-"),
        ("tp=3", "-", "-", "-", "-", "-", "-", "-", "-", "ValueError: 4 heads <cannot> be dealt to 3 ranks"),
    ]  # fmt: skip


def test_what_the_peak_is_made_of_is_said_in_words() -> None:
    found = comparison.tables(entries())
    assert comparison.memory(found) == (
        ("peak memory of a rank", "in all", "parameters", "gradients", "activations"),
        [("dp=2", "1.1 KiB", "400 B", "100 B", "600 B"), ("tp=2", "600 B", "400 B", "100 B", "100 B")])  # fmt: skip
    assert comparison.peaks(found) == (
        "Peak memory: dp=2 1.1 KiB (parameters 400 B, gradients 100 B, activations 600 B); "
        "tp=2 600 B (parameters 400 B, gradients 100 B, activations 100 B).")  # fmt: skip
    nothing = comparison.tables([Entry("tp=3", reason="ValueError: <no>")])
    assert comparison.peaks(nothing) == "" and comparison.memory(nothing)[1] == []


def test_one_rank_is_the_reference_wherever_it_stands() -> None:
    found = comparison.tables([*entries(), Entry("dp=1", record(2.5), 9.0, 1)])
    assert found["reference"].tolist() == [False, False, False, True]
    assert found["loss_difference"][0] == pytest.approx(0.5)


def test_the_sentence_names_the_best_and_the_failed() -> None:
    said = comparison.sentence(comparison.tables(entries()))
    assert said == ("3 strategies compared; shortest time of a step 500 ms under tp=2; lowest peak memory 600 B under "
                    "tp=2; fewest bytes sent 2.0 KiB under dp=2; losses differ from those under dp=2 by 1.0e-06 at "
                    "most; without a result: tp=3 (ValueError: 4 heads <cannot> be dealt to 3 ranks).")  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_picture_is_whole_and_says_itself(count: int) -> None:
    many = [Entry(LONG if at % 2 else f"dp={at + 1}", record(2.0, step_s=at + 1.0), 3.0, 2) for at in range(count - 1)]
    found = comparison.tables([*many, Entry("tp=3", reason="ValueError: <no>")])
    picture = comparison_svg.svg(found)
    root = ET.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert root.attrib["role"] == "img"
    described = root.find(f"{space}desc")
    assert described is not None
    assert described.text == comparison.described(found)
    fills = {element.get("fill", "") for element in root.iter()}
    used = {fill.removeprefix("url(#").rstrip(")") for fill in fills if fill.startswith("url(#")}
    assert used <= {element.get("id") for element in root.iter() if element.get("id")}
    text = "".join(root.itertext())
    assert "no result: ValueError: <no>" in text
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    ET.fromstring(comparison_svg.alone(picture))


def test_cells_that_do_not_train_are_compared_by_their_time() -> None:
    found = comparison.tables([Entry("dp=2", Record(), 0.25, 2), Entry("tp=2", Record(), 0.5, 2)])
    assert comparison.time_of(found)[0] == "time of the cell"
    assert "shortest time of the cell 250 ms under dp=2" in comparison.sentence(found)
    ET.fromstring(comparison_svg.svg(found))
