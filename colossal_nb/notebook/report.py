"""`%colossal report`: what the last cell sharded, what each rank held and sent, what limited it."""
from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from colossal_nb.notebook import summary
from colossal_nb.notebook.fold import rank_list
from colossal_nb.notebook.page import Page, say
from colossal_nb.plan import sent_bytes
from colossal_nb.plan.layout import Layout, On, Partial, Shard
from colossal_nb.record import measures
from colossal_nb.run import Run
from colossal_nb.views.words import duration, size


def report_on(run: Run, page: Page) -> None:
    """Put the report of a run on the page."""
    said = summary.line(run)
    say(page, said or f"the last cell ran {duration(run.seconds)} and recorded no training step")
    if len(run.record.layouts):
        page.display(summary.table(("layout", "tensors", "bytes on a rank", "for example"), _layouts(run)))
    rows = _per_rank(run)
    if rows:
        page.display(summary.table(("rank", "peak memory", "sent", "waited in collectives"), rows))
    for note in run.notes:
        say(page, note)


def _layouts(run: Run) -> list[tuple[str, ...]]:
    """What was cut how: tensors that are cut alike together, with the bytes of the rank that holds most of them."""
    latest: dict[tuple[str, int], Any] = {(str(row["tensor"]), int(row["rank"])): row for row in run.record.layouts}
    tensors: dict[str, dict[str, str]] = defaultdict(dict)
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for (name, rank), row in latest.items():
        how = layout_words(Layout.from_json(str(row["layout"])))
        tensors[how].setdefault(name, str(row["local_shape"]))
        sizes[how][rank] += int(row["local_bytes"])
    return [(how, str(len(found)), size(max(sizes[how].values())), " ".join(next(iter(found.items()))))
            for how, found in tensors.items()]


def layout_words(layout: Layout) -> str:
    """A layout for people: `dim 0 over tp, stage 1 of pp`, or `whole on every rank`."""
    parts = []
    for axis, length, placement in zip(layout.mesh.axes, layout.mesh.shape, layout.placements, strict=True):
        if length > 1 and isinstance(placement, Shard):
            parts.append(f"dim {placement.dim} over {axis}")
        elif length > 1 and isinstance(placement, On):
            where = rank_list(placement.coordinates)
            parts.append(f"stage {where}" if axis == "pp" else f"only {where} of {axis}")
        elif length > 1 and isinstance(placement, Partial):
            parts.append(f"partial sums over {axis}")
    return ", ".join(parts) or "whole on every rank"


def _per_rank(run: Run) -> list[tuple[str, ...]]:
    record = run.record
    peaks = measures.peak_memory(record)
    waits = measures.waits(record)
    sent: dict[int, float] = defaultdict(float)
    for (rank, _), count in measures.sent_bytes(record, sent_bytes).items():
        sent[rank] += float(count)
    ranks = sorted({*peaks, *sent})
    return [(str(rank), size(peaks[rank].total_bytes) if rank in peaks else "-", size(sent[rank]),
             duration(waits.get(rank, 0.0))) for rank in ranks]
