"""One cell under several strategies: what each took, held and sent. Tables of the records, a sentence, the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colossal_nb.plan import sent_bytes
from colossal_nb.record import measures
from colossal_nb.record.events import CATEGORIES
from colossal_nb.record.store import Record
from colossal_nb.views.words import duration, percent, size, step_time

Tables = Mapping[str, NDArray[Any]]
COLUMNS = ("strategy", "engines", "loss", "loss difference", "time", "step", "peak memory", "sent", "bubble",
           "limited by")  # fmt: skip
PLURAL = {"parameter": "parameters", "gradient": "gradients", "optimizer": "states", "activation": "activations",
          "buffer": "buffers", "communication": "communication", "temporary": "temporaries",
          "unknown": "unknown"}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One strategy's run: `reason` says why it failed ("" if it did not), `limit` what took its time; `ranks` of its
    mesh, 0 where it never ran."""

    strategy: str
    record: Record | None = None
    seconds: float = math.nan
    ranks: int = 0
    reason: str = ""
    limit: str = ""


def tables(entries: Sequence[Entry]) -> dict[str, NDArray[Any]]:
    """One place for each strategy in every array; nan where a record has nothing. `categories`: bytes by category on
    the rank with the highest peak. `loss_difference`: the largest of all steps against `reference`, the run on one
    rank or the first that trained."""
    losses = [{} if each.record is None else measures.losses(each.record) for each in entries]
    reference = _reference(entries, losses)
    figures = [_figures(each) for each in entries]
    columns = {name: np.array([row[name] for row in figures]) for name in figures[0]} if figures else {}
    return {
        **columns,
        "strategy": np.array([each.strategy for each in entries]),
        "engines": np.array([each.ranks for each in entries]),
        "seconds": np.array([each.seconds for each in entries]),
        "reason": np.array([each.reason for each in entries]),
        "limit": np.array([each.limit for each in entries]),
        "loss": np.array([found[max(found)] if found else math.nan for found in losses]),
        "loss_difference": np.array([_difference(found, losses[reference]) for found in losses]),
        "reference": np.array([at == reference for at in range(len(entries))]),
    }


def _reference(entries: Sequence[Entry], losses: Sequence[Mapping[int, float]]) -> int:
    trained = [at for at, found in enumerate(losses) if found and not entries[at].reason]
    alone = [at for at in trained if entries[at].ranks == 1]
    return (alone or trained or [0])[0]


def _difference(found: Mapping[int, float], expected: Mapping[int, float]) -> float:
    steps = found.keys() & expected.keys()
    return max((abs(found[step] - expected[step]) for step in steps), default=math.nan)


def _figures(entry: Entry) -> dict[str, Any]:
    """What one record says."""
    nothing = np.full(len(CATEGORIES), math.nan)
    if entry.record is None:
        return {"step_s": math.nan, "steps": 0, "peak_bytes": math.nan, "categories": nothing, "sent_bytes": math.nan,
                "bubble": math.nan}  # fmt: skip
    record = entry.record
    steps = measures.steps(record)
    timed = [step.seconds for step in steps if not step.metered] or [step.seconds for step in steps]
    peaks = measures.peak_memory(record)
    top = max(peaks.values(), key=lambda peak: peak.total_bytes, default=None)
    sent = measures.sent_bytes(record, sent_bytes)
    bubble = measures.bubble(record)
    return {
        "step_s": median(timed) if timed else math.nan,
        "steps": len(steps),
        "peak_bytes": math.nan if top is None else float(top.total_bytes),
        "categories": nothing if top is None else np.array([float(top.categories[name]) for name in CATEGORIES]),
        "sent_bytes": float(sum(sent.values())) if sent else (0.0 if steps else math.nan),
        "bubble": math.nan if bubble is None else bubble,
    }


def present(found: Tables) -> list[str]:
    """The categories of which some run held something at its peak, in their fixed order."""
    held = np.nan_to_num(found["categories"]).sum(axis=0)
    return [name for name, count in zip(CATEGORIES, held, strict=True) if count]


def memory(found: Tables) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What the peaks are made of: columns, one for each category that some run held, and rows of those with a peak."""
    shares = [CATEGORIES.index(name) for name in present(found)]
    known = np.flatnonzero(~np.isnan(found["peak_bytes"]))
    lines = [
        (str(found["strategy"][at]), *(size(float(held)) for held in (found["peak_bytes"][at],
                                                                     *found["categories"][at][shares])))
        for at in known
    ]  # fmt: skip
    return ("peak memory of a rank", "in all", *(PLURAL[name] for name in present(found))), lines


def rows(found: Tables) -> list[tuple[str, ...]]:
    """In words; a dash where the record has nothing."""

    def words(at: int) -> tuple[str, ...]:
        reason, engines = str(found["reason"][at]), int(found["engines"][at])
        base = bool(found["reference"][at]) and not _nothing(found["loss"][at])
        return (
            str(found["strategy"][at]),
            str(engines or "-"),
            _text(found["loss"][at], lambda value: f"{value:.4f}"),
            "reference" if base else _text(found["loss_difference"][at], lambda value: f"{value:.1e}"),
            _text(found["seconds"][at], duration),
            _text(found["step_s"][at], step_time),
            _text(found["peak_bytes"][at], size),
            _text(found["sent_bytes"][at], size),
            _text(found["bubble"][at], percent),
            reason or str(found["limit"][at]) or "-",
        )

    return [words(at) for at in range(len(found["strategy"]))]


def _text(value: float, words: Any) -> str:
    return "-" if _nothing(value) else str(words(float(value)))


def _nothing(value: float) -> bool:
    return math.isnan(float(value))


def described(found: Tables) -> str:
    """The picture for who does not see it."""
    return f"{sentence(found)} {peaks(found)}".strip()


def peaks(found: Tables) -> str:
    """What the peak of memory is made of under each strategy."""
    head, lines = memory(found)
    said = []
    for name, total, *held in lines:
        parts = [f"{what} {share}" for what, share in zip(head[2:], held, strict=True) if share != "0 B"]
        said.append(f"{name} {total} ({', '.join(parts)})")
    return f"Peak memory: {'; '.join(said)}." if said else ""


def time_of(found: Tables) -> tuple[str, NDArray[Any]]:
    """What is drawn as time: that of a step where every run that went well trained, else that of the cell."""
    ran = found["reason"] == ""
    steps = ran.any() and not np.isnan(found["step_s"][ran]).any()
    return ("time of a step", found["step_s"]) if steps else ("time of the cell", found["seconds"])


def sentence(found: Tables) -> str:
    """What the picture says: who is fastest, who holds least, who sends least, who failed."""
    names, ran = found["strategy"], found["reason"] == ""
    said = [f"{len(names)} strateg{'y' if len(names) == 1 else 'ies'} compared"]
    what, times = time_of(found)
    for values, words, show in (
        (times, f"shortest {what}", step_time), (found["peak_bytes"], "lowest peak memory", size),
        (found["sent_bytes"], "fewest bytes sent", size),
    ):  # fmt: skip
        known = np.flatnonzero(ran & ~np.isnan(values))
        if len(known) > 1:
            best = known[np.argmin(values[known])]
            said.append(f"{words} {show(float(values[best]))} under {names[best]}")
    apart = found["loss_difference"][ran & ~np.isnan(found["loss_difference"])]
    if len(apart) > 1:
        base = names[np.flatnonzero(found["reference"])[0]]
        said.append(f"losses differ from those under {base} by {apart.max():.1e} at most")
    failed = [f"{name} ({reason})" for name, reason in zip(names, found["reason"], strict=True) if reason]
    return "; ".join([*said, *([f"without a result: {', '.join(failed)}"] if failed else [])]) + "."
