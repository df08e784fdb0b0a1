"""What may stand on a `%%colossal` line beside the strategy, and after `%colossal`: tables for parsing and help."""
from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colossal_nb.plan.strategy import MOST_ENGINES

MOST_RANK = 1023
MOST_CELL = 99_999


@dataclass(frozen=True)
class Option:
    """One option: `value` is how help writes what follows it ("" for a switch), `read` turns that into a value."""

    name: str
    value: str
    doc: str
    read: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()


def ranks(text: str) -> tuple[int, ...]:
    """`0,2`, `0-2` or `[0, 2]` as sorted ranks."""
    return _numbers(text, "ranks", MOST_RANK)


def cells(text: str) -> tuple[int, ...]:
    """`3-7` or `3,5` as sorted numbers of cells."""
    return _numbers(text, "cells", MOST_CELL)


def _numbers(text: str, what: str, most: int) -> tuple[int, ...]:
    found: set[int] = set()
    for part in text.strip("[]()").replace(" ", ",").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:[-:.]+(\d{1,6}))?", part.strip()) if part.strip() else None
        if part.strip() and match is None:
            raise ValueError(f"{text!r} names no {what}: write 0,2 or 0-3")
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first or last > most:
                raise ValueError(f"{part.strip()} is no range of {what}: write the smaller one first, up to {most}")
            found.update(range(first, last + 1))
    if not found:
        raise ValueError(f"names no {what}: write 0,2 or 0-3")
    return tuple(sorted(found))


def seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `1h30m` as seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|min|m|h)?", text)
    if not parts or re.sub(r"[\s\d.]|ms|sec|s|min|m|h", "", text) or not re.match(r"\d", text):
        raise ValueError(f"{text!r} is no time: write 90s, 10m or 1h30m")
    total = sum(float(number) * {"ms": 0.001, "m": 60, "min": 60, "h": 3600}.get(unit, 1) for number, unit in parts)
    if total <= 0:
        raise ValueError(f"{text!r} is no time to wait for: write 90s, 10m or 1h30m")
    return total


def name(text: str) -> str:
    """A name of a variable."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError(f"{text!r} is no name of a variable")
    return text


def names(text: str) -> tuple[str, ...]:
    """Names, with commas between them."""
    return tuple(name(part) for part in re.split(r"[,\s]+", text.strip(", ")))


def shown(text: str) -> tuple[int, ...] | str:
    """`all`, or the ranks whose output is wanted."""
    return "all" if text.lower() == "all" else ranks(text)


def strategies(text: str) -> tuple[str, ...]:
    """`dp=4 ; tp=4` as strategies. They are read later, all at once."""
    found = tuple(part.strip() for part in text.split(";") if part.strip())
    if not found:
        raise ValueError('names no strategies: write "dp=4 ; tp=4"')
    return found


def count(text: str) -> int:
    """A number of engines that can be started."""
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise ValueError(f"{text!r} is no number of engines: write 1, 2, 3, ...")
    if int(text) > MOST_ENGINES:
        raise ValueError(f"{text} engines are more than the {MOST_ENGINES} that can be started here")
    return int(text)


def rank(text: str) -> int:
    """One rank."""
    if not re.fullmatch(r"\d{1,6}", text):
        raise ValueError(f"{text!r} is no rank: write 0, 1, 2, ...")
    return int(text)


CELL = {option.name: option for option in (
    Option("--ranks", "0,2", "run on these ranks only (a cell without a strategy)", ranks),
    Option("--out", "NAME", "bind the cell's Run (outputs, record, summary) to a variable here", name),
    Option("--pull", "a,b", "afterwards bring rank 0's variables here (numpy unless torch is imported here)", names),
    Option("--timeout", "10m", "interrupt the cell after this time (there is no limit otherwise)", seconds),
    Option("--show", "all|0", "every line of every rank on the page, or only these ranks' output", shown, ("all", "0")),
    Option("--local", "", "run the cell here in the kernel as well"),
    Option("--verify", "", "check the first forward_backward against the sequential program, and some steps more"),
    Option("--compare", '"dp=4 ; tp=4"', "run the cell under each strategy: one table, one picture", strategies),
)}

# Options of later versions: refused by name, so that nobody believes they did something.
CELL_LATER = {
    "--watch": "live views of a running cell",
    "--on-hang": "a choice of what ends a proven hang, which ends by itself",
    "--memory": "a memory capacity for each engine",
    "--trace": "a trace of memory by source line",
}


@dataclass(frozen=True)
class Verb:
    """One word after `%colossal`."""

    usage: str
    doc: str
    example: str
    options: tuple[Option, ...] = ()


_RANK = Option("--rank", "R", "this rank only", rank)
_RANKS = Option("--rank", "0,2", "these ranks only: new processes, with copies of a free rank's variables", ranks)
_CELLS = Option("--cells", "3-7", "cells by their numbers (default: the last strategy cell that succeeded)", cells)

VERBS = {
    "start": Verb("start [-n 4]", "Start the engines now. The first %%colossal cell does it by itself, with as many as "
                  "its strategy needs.", "%colossal start -n 4",
                  (Option("-n", "4", "how many engines", count),)),
    "status": Verb("status", "Which engines run, what each does, what is loaded. The same as %colossal alone.",
                   "%colossal status"),
    "stop": Verb("stop", "Stop all engines; their variables are gone. The next %%colossal cell starts new ones.",
                 "%colossal stop"),
    "restart": Verb("restart [--rank 0,2]", "Replace some ranks, or all of them, by new processes.",
                    "%colossal restart --rank 2", (_RANKS,)),
    "push": Verb("push NAME ...", "Copy values, functions, classes or modules from here to all ranks.",
                 "%colossal push batch make_model np"),
    "pull": Verb("pull NAME [--rank R]", "Bring a rank's variable here (numpy unless torch is imported here).",
                 "%colossal pull losses --rank 0", (_RANK,)),
    "report": Verb("report", "What the last cell sharded, what it cost, and what limited it.", "%colossal report"),
    "who": Verb("who", "The variables on the ranks; those that not all ranks have; parallel objects.",
                "%colossal who"),
    "compare": Verb('compare "STRATEGY ; STRATEGY"', "Run the last %%colossal cell again under each strategy and "
                    "show one table and one picture: loss, time, peak memory, bytes sent, bubble. What fails is a row.",
                    '%colossal compare "dp=4 ; tp=4 ; pp=4"'),
    "export": Verb("export FILE [--cells 3-7]", "Write the last cell with a strategy that succeeded as a plain "
                   "script for torchrun. If it needs other cells --cells names them all.",
                   "%colossal export train.py --cells 3-7", (_CELLS,)),
    "help": Verb("help [WORD]", "Help on a verb, a strategy field or an option.", "%colossal help microbatches"),
}

VERBS_LATER = {
    "memory": "the memory view", "pipeline": "the pipeline view", "layout": "the layout view",
    "comm": "the communication view", "attach": "attaching to running engines", "plan": "planning without running",
    "look": "the stacks of all ranks", "repair": "repair by hand",
}
OPTIONS_LATER = {
    "start": {"--memory": "a memory capacity for each engine", "--profile": "engines on other hosts",
              "--device": "the choice of a device", "--transport": "the choice of a transport",
              "--host-memory": "a limit on host memory", "--idle": "stopping when idle"},
    "stop": {"--rank": "stopping one rank (%colossal restart --rank R replaces it)"},
}
