"""The line under a cell says what the record says, and nothing else."""
from __future__ import annotations

import json

import pytest

from colossal_nb.notebook import summary
from colossal_nb.notebook.files import written_together
from colossal_nb.notebook.report import layout_words
from colossal_nb.plan.layout import Layout, On, Partial, Replicate, Shard
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy
from colossal_nb.record.events import Mark, Slice, group_name, link_name
from colossal_nb.record.store import Record
from colossal_nb.run import Run
from colossal_nb.views.words import duration, size


def run_of(record: Record, strategy: Strategy | None = None, seconds: float = 3.21, status: str = "ok") -> Run:
    run = Run("", strategy, (0, 1))
    run._record, run.seconds, run.status = record, seconds, status
    return run


def steps(*others: Slice, t1: float = 10.0) -> Record:
    marks = [mark for rank in (0, 1) for mark in (
        Mark(rank, 0.0, 0, "begin"), Mark(rank, t1, 0, "log", "loss", 1.23456), Mark(rank, t1, 0, "end"))]
    return Record.of(slices=list(others), marks=marks)


def pipeline(microbatches: int = 4) -> Record:
    """Two stages, busy 4 of 5 seconds each: bubble 20%. The last action ends the step."""
    each_s = 2.0 / microbatches
    stages = [Slice(stage, "compute", kind, stage=stage, microbatch=i, t0=t0 + stage + i * each_s,
                    t1=t0 + stage + (i + 1) * each_s)
              for stage in (0, 1) for kind, t0 in (("F", 0.0), ("B", 2.0)) for i in range(microbatches)]
    sends = [Slice(0, "comm", "send", t0=2.0, t1=2.1, payload_bytes=3 << 20, group=link_name("pp", 0, 1), seq=0)]
    return steps(*stages, *sends, t1=5.0)


def test_a_pipeline_cell() -> None:
    line = summary.line(run_of(pipeline(), Strategy(pp=2, microbatches=4)))
    assert line == ("2 engines, pp=2 microbatches=4 | 3.2 s | bubble 20% | sent 3.0 MiB | "
                    "limited by: pipeline bubble (microbatches=16 would give 6%, if the batch has as many samples)")


def test_no_more_microbatches_are_proposed_than_the_batch_has_samples() -> None:
    run = run_of(pipeline(3), Strategy(pp=2, microbatches=4))
    assert summary.line(run).endswith("limited by: pipeline bubble")


def test_communication_limits_where_it_takes_more() -> None:
    talk = [Slice(rank, "comm", "all_reduce", t0=1.0, t1=6.0, payload_bytes=1024, group=group_name("dp", (0, 1)), seq=0)
            for rank in (0, 1)]
    run = run_of(steps(*talk), Strategy(dp=2))
    assert summary.communication(run.record) == pytest.approx(0.5)
    assert summary.line(run).endswith("limited by: communication (50% of the step time)")


def test_nothing_is_named_that_the_record_does_not_say() -> None:
    assert summary.line(run_of(Record(), Strategy(dp=2))) == "2 engines, dp=2 | 3.2 s"
    assert summary.limited_by(run_of(steps(), Strategy(dp=2))) == ""


def test_bare_cells_speak_only_after_a_second() -> None:
    assert summary.line(run_of(Record(), seconds=0.9)) == ""
    assert summary.line(run_of(Record(), seconds=1.5)) == "2 engines | 1.5 s"


def test_a_failed_cell_that_did_not_train_has_no_line() -> None:
    assert summary.line(run_of(Record(), Strategy(dp=2), status="error")) == ""


def test_a_table_is_text_and_html() -> None:
    bundle = summary.table(("a", "b"), [("1", "<2>")])
    assert bundle["text/plain"] == "a  b\n1  <2>"
    assert "&lt;2&gt;" in bundle["text/html"]


@pytest.mark.parametrize("count, said", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (412 << 20, "412 MiB"),
                                         (1.2 * 2**30, "1.2 GiB"), (5 << 50, "5120 TiB")])
def test_sizes(count: float, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize("seconds, said", [(0.034, "0.03 s"), (3.21, "3.2 s"), (125, "2 min 5 s"), (7260, "2 h 1 min")])
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_layouts_in_words() -> None:
    mesh = Mesh({"dp": 2, "pp": 2, "tp": 2})
    layout = Layout((8, 4), "float32", mesh, (Replicate(), On(1), Replicate(), Shard(0)))
    assert layout_words(layout) == "stage 1, dim 0 over tp"
    assert layout_words(Layout((8,), "float32", mesh, (Replicate(),) * 4)) == "whole on every rank"
    assert layout_words(Layout((8,), "float32", mesh, (Partial(), *(Replicate(),) * 3))) == "partial sums over dp"
    assert json.loads(layout.to_json())["shape"] == [8, 4]


def test_files_that_several_ranks_wrote_are_named() -> None:
    states = [(0, 1.0, "writes", "/home/log.txt"), (1, 1.0, "writes", "/home/log.txt"),
              (0, 2.0, "writes", "/home/rank0.txt"), (1, 2.0, "writes", "/home/rank1.txt")]
    said = written_together(run_of(Record.of(states=states)))
    assert said.startswith("ranks 0,1 wrote the same file log.txt: ") and "cnb.once" in said
    assert written_together(run_of(Record.of(states=states[2:]))) == ""
