"""The line under a cell, and the table that compares runs: figures of the record in words."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from colossal_nb.record.measures import covered, steps
from colossal_nb.record.store import Record
from colossal_nb.run import Run
from colossal_nb.views.words import duration, percent, size

WORTH_A_LINE_S = 1.0
LEAST_SHARE = 0.1  # of the time, to be called what limits a run
WELL = 0.06  # a bubble that nobody minds: pp=2 with 16 microbatches


def line(run: Run) -> str:
    """What is said under a cell; nothing under a bare cell that was over at once, or where nothing was run."""
    if run.strategy is None and run.seconds < WORTH_A_LINE_S:
        return ""
    figures = run.summary
    if run.status == "error" and not figures.steps:
        return ""
    engines = f"{figures.engines} engine{'s' * (figures.engines != 1)}"
    parts = [f"{engines}, {figures.strategy}" if figures.strategy else engines, duration(figures.seconds)]
    if figures.peak_bytes is not None:
        where = f" (rank {figures.peak_rank})" if figures.engines > 1 else ""
        parts.append(f"peak {size(figures.peak_bytes)}{where}")
    if figures.bubble is not None:
        parts.append(f"bubble {percent(figures.bubble)}")
    if figures.sent_bytes:
        parts.append(f"sent {size(figures.sent_bytes)}")
    limit = limited_by(run)
    return " | ".join([*parts, f"limited by: {limit}"] if limit else parts)


def limited_by(run: Run) -> str:
    """What took the largest share of the training steps beside computing, if that is a tenth at least."""
    bubble = run.summary.bubble or 0.0
    talk = communication(run.record)
    if max(bubble, talk) < LEAST_SHARE:
        return ""
    if talk > bubble:
        return f"communication ({percent(talk)} of the step time)"
    return "pipeline bubble" + _more_microbatches(run)


def communication(record: Record) -> float:
    """Share of the ranks' step time spent in collectives. Point-to-point waits are the pipeline's bubble."""
    whole = sum(step.seconds for step in steps(record))
    chosen = record.slices[(record.slices["lane"] == "comm") & ~np.isin(record.slices["kind"], ("send", "recv"))]
    ranks = record.ranks
    if whole <= 0 or not ranks:
        return 0.0
    inside = [covered(chosen[chosen["rank"] == rank]) for rank in ranks]
    return float(min(1.0, sum(inside) / (whole * len(ranks))))


def _more_microbatches(run: Run) -> str:
    """With p stages and m microbatches of equal times the bubble of gpipe and 1f1b is (p - 1) / (m + p - 1)."""
    strategy = run.strategy
    if strategy is None or strategy.pp < 2:
        return ""
    stages, count = strategy.pp, strategy.microbatches or strategy.pp
    cut = {int(number) for number in run.record.slices["microbatch"][run.record.slices["kind"] == "F"]}
    if cut and len(cut) < count:  # the batch had no more samples
        return ""
    more = count
    while (stages - 1) / (more + stages - 1) > WELL:
        more *= 2
    if more == count:
        return ""
    share = percent((stages - 1) / (more + stages - 1))
    return f" (microbatches={more} would give {share}, if the batch has as many samples)"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> dict[str, str]:
    """The same table as text and as HTML."""
    widths = [max(len(row[i]) for row in [columns, *lines]) for i in range(len(columns))]
    text = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in [columns, *lines])
    head = "".join(f'<th style="text-align:left">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in row) + "</tr>"
                   for row in lines)
    return {"text/plain": text, "text/html": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"}
