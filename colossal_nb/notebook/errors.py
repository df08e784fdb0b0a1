"""Errors as people want them: each once, with its ranks and the user's line, the first cause first."""
from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from colossal_nb.notebook.digits import skeleton
from colossal_nb.notebook.fold import named, rank_list
from colossal_nb.run import RankError, Run

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CELL = re.compile(r"(?<=In)\[(\d+)\]")
_CHAIN = re.compile("The above exception was the direct cause|During handling of the above exception")
_FRAME = re.compile(r"(Cell|File) ")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_MODELS = re.compile(r"File \S*[/\\]colossal_nb[/\\](models|corpus)")
_OURS = re.compile(r"File \S*[/\\]colossal_nb[/\\]")
_LIBRARY = re.compile(r"File \S*[/\\](?:site-packages|lib[/\\]python[0-9.]+)[/\\]")
_HEADER = "Traceback (most recent call last)"
MOST_LIBRARY_FRAMES = 2
MOST_FRAMES = 20
MOST_OTHERS = 8
LONGEST_VALUE = 2_000


class CellError(Exception):
    """What a magic raises: the front end shows `lines` instead of a traceback of our own code."""

    def __init__(self, value: str, lines: Sequence[str]) -> None:
        super().__init__(value)
        self.lines = list(lines)

    def _render_traceback_(self) -> list[str]:
        return self.lines


def fail(name: str, value: str, lines: Sequence[str] = ()) -> NoReturn:
    """Raise an error called `name` whose display is `lines` (by itself: one sentence)."""
    kind = type(name, (CellError,), {"__module__": "builtins"})
    raise kind(value, lines or [f"{_red(name)}: {value}"]) from None


def fail_for(run: Run, numbers: Mapping[int, int]) -> NoReturn:
    """Raise what happened on the ranks of a run that did not end well.

    `numbers`: the ranks' number of a cell -> the notebook's, for "In [3]" in tracebacks.
    """
    first = run.error
    if run.status == "interrupted" or first is None:
        where, lines = interrupted(run)
        fail("KeyboardInterrupt", where, lines)
    where = _where(first, _same(first, run.errors), run.errors)
    value = first.evalue[:LONGEST_VALUE]
    lines = [_CELL.sub(lambda match: f"[{numbers.get(int(match[1]), match[1])}]", line) for line in report(run)]
    fail(first.ename, f"{value} ({where})" if value else where, lines)


def interrupted(run: Run) -> tuple[str, list[str]]:
    """Where the ranks were when the user stopped them and which run on: one sentence, and what is shown."""
    stopped = {rank: error for rank, error in run.errors.items() if error.ename == "KeyboardInterrupt"}
    lines = sorted({(error.line or 0) for error in stopped.values()} - {0})
    at = f", line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}" if lines else ""
    where = f"stopped on {named(sorted(stopped))}{at}" if stopped else "no rank has stopped"
    others = {rank: error for rank, error in run.errors.items() if rank not in stopped}
    running = sorted(rank for rank, error in others.items() if error.ename == "StillRunning")
    if running:
        where += f"; {_still_running(running, set(run.ranks) - set(running))}"
    kept = "" if running else "; variables are kept"
    return where, [f"{_red('KeyboardInterrupt')}: {where}{kept}", *_others(others)]


def _still_running(ranks: Sequence[int], rest: Collection[int]) -> str:
    """That these ranks did not stop, the command that ends them, and what it costs."""
    run, them, their = ("run", "them", "their") if ranks[1:] else ("runs", "it", "its")
    kept = ", the others keep theirs" if rest else ""
    return (f"{named(ranks)} still {run}: %colossal restart --rank {','.join(map(str, ranks))} ends {them} "
            f"({their} variables are lost{kept})")


def report(run: Run) -> list[str]:
    """The first cause with its traceback, then one line for each other error, then one for the consequences."""
    first = run.error
    assert first is not None
    same = _same(first, run.errors)
    rest = {rank: error for rank, error in run.errors.items() if rank not in same}
    causes = {rank: error for rank, error in rest.items() if not error.consequence}
    others = {rank: run.errors[rank] for rank in same if not _equal(run.errors[rank], first)}
    header = bool(first.traceback) and len(run.ranks) > 1
    differ = f" with other numbers; this is rank {first.rank}'s" if others else ""
    lines = [f"{_red(_who(same, run.ranks, bool(causes)) + differ)}:"] if header else []
    frames = shortened(first.traceback)
    if not _says(frames, first.ename):  # a death, or a verdict of ours on why the rank was stopped
        frames = [frame for frame in frames if _FRAME.match(_COLOUR.sub("", frame))]
        frames.append(f"{_red(first.ename)}: {first.evalue}")
    lines += frames
    lines += _others({**others, **causes}, first)
    consequences = {rank: error for rank, error in rest.items() if error.consequence}
    if consequences:
        at = sorted({error.line for error in consequences.values() if error.line})
        line = f" (line{'s' * (len(at) > 1)} {', '.join(map(str, at))})" if at else ""
        lines.append(f"{named(list(consequences))}: stopped because of that{line}")
    return lines


def shortened(traceback: Sequence[str]) -> list[str]:
    """A traceback without frames of this package, the last few frames of libraries, and nothing of great length."""
    kept: list[str] = []
    library: list[str] = []
    for frame in _last_of_chain(traceback):
        text = _COLOUR.sub("", frame)
        models = _MODELS.search(text)
        if _OURS.search(text) and not models:
            continue
        if _LIBRARY.search(text) and not models:
            library.append(frame)
            continue
        kept += [*_few(library), _cut(frame)]
        library = []
    kept += _few(library)
    left_out = len(kept) - MOST_FRAMES
    if left_out > 0:
        kept[MOST_FRAMES // 2: -MOST_FRAMES // 2] = [f"    ... {left_out} frames ..."]
    return kept


def _last_of_chain(traceback: Sequence[str]) -> Sequence[str]:
    """Without errors that were raised again as the same error: the last one says all."""
    parts: list[list[str]] = [[]]
    for frame in traceback:
        parts[-1].append(frame)
        if _CHAIN.search(frame):
            parts.append([])
    last = _said(parts[-1])
    return [frame for part in parts if part is parts[-1] or _said(part) != last for frame in part]


def _said(part: Sequence[str]) -> str:
    """The line with the error itself."""
    lines = [line for frame in part if not _CHAIN.search(frame) for line in frame.splitlines() if line.strip()]
    return _COLOUR.sub("", lines[-1]) if lines else ""


def _says(frames: Sequence[str], name: str) -> bool:
    """Whether a traceback shows the error of this name; notes may stand below it."""
    texts = [_COLOUR.sub("", frame) for frame in frames]
    return any(name in text for text in texts if not _FRAME.match(text) and _HEADER not in text)


def _cut(text: str) -> str:
    if len(text) <= LONGEST_VALUE:
        return text
    return f"{text[:LONGEST_VALUE]} ... ({len(text):,} characters; all in cnb.last_run.errors)"


def _few(frames: list[str]) -> list[str]:
    left_out = len(frames) - MOST_LIBRARY_FRAMES
    return [f"    ... {left_out} frames in libraries ...", *frames[left_out:]] if left_out > 0 else frames


def _same(first: RankError, errors: dict[int, RankError]) -> list[int]:
    """The ranks that raised what `first` says (numbers may differ)."""
    key = (first.ename, skeleton(first.evalue), first.line)
    return sorted(rank for rank, error in errors.items()
                  if (error.ename, skeleton(error.evalue), error.line) == key and not error.consequence)


def _equal(one: RankError, other: RankError) -> bool:
    """Whether two errors say the same; addresses of objects are no difference."""
    return (one.ename, _ADDRESS.sub("", one.evalue)) == (other.ename, _ADDRESS.sub("", other.evalue))


def _who(same: Sequence[int], ranks: Sequence[int], first: bool) -> str:
    if list(same) == sorted(ranks):
        return f"all ranks ({rank_list(same)}) raised this"
    return f"{named(same)} raised this{' first' if first else ''}"


def _where(first: RankError, same: Sequence[int], errors: Mapping[int, RankError]) -> str:
    line = f", line {first.line}" if first.line else ""
    alike = [rank for rank in same if not _equal(errors[rank], first)]
    if not alike:
        return named(same) + line
    return f"{named([rank for rank in same if rank not in alike])}{line}; {named(alike)} with other numbers"


def _others(errors: dict[int, RankError], shown: RankError | None = None) -> list[str]:
    """One line for each different error, ranks with the same one together."""
    lines: list[str] = []
    left = dict(sorted(errors.items()))
    while left:
        error = next(iter(left.values()))
        same = [rank for rank, each in left.items() if _equal(each, error) and each.line == error.line]
        line = f" (line {error.line})" if error.line else ""
        if shown is not None and _equal(error, shown):
            lines.append(f"{named(same)}: the same{line}")
        else:
            value = error.evalue.splitlines()[0] if error.evalue else ""
            lines.append(f"{named(same)}: {error.ename}{': ' if value else ''}{value}{line}")
        left = {rank: each for rank, each in left.items() if rank not in same}
    hidden = len(lines) - MOST_OTHERS
    return [*lines[:MOST_OTHERS], f"... and {hidden} more: cnb.last_run.errors"] if hidden > 0 else lines


def _red(text: str) -> str:
    return f"\x1b[0;31m{text}\x1b[0m"
