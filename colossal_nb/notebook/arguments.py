"""Reading the line after `%%colossal` and `%colossal`: forgiving in form, strict in meaning."""
from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from colossal_nb.notebook import options
from colossal_nb.notebook.options import CELL, CELL_LATER, VERBS, VERBS_LATER, Option
from colossal_nb.plan.hints import MEANT
from colossal_nb.plan.strategy import FIELDS, Strategy

_WORD = re.compile(r""""([^"]*)"|'([^']*)'|(\S+)""")
_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u201e": '"', "\u2018": "'", "\u2019": "'"})
_DASHES = re.compile(r"(?<!\S)[\u2012-\u2015\u2212](?=\w)")


@dataclass(frozen=True)
class CellArguments:
    """What a `%%colossal` line asks for. `only`: the ranks whose output is shown (None: all, merged)."""

    strategy: Strategy | None = None
    ranks: tuple[int, ...] | None = None
    out: str = ""
    pull: tuple[str, ...] = ()
    timeout_s: float | None = None
    show_all: bool = False
    only: tuple[int, ...] | None = None
    local: bool = False
    verify: bool = False
    compare: tuple[Strategy, ...] = ()


@dataclass(frozen=True)
class VerbArguments:
    """What a `%colossal` line asks for."""

    verb: str
    words: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def plain(line: str) -> str:
    """The line with odd spaces, quotes and dashes made plain and its comment taken off."""
    line = unicodedata.normalize("NFKC", line).translate(_QUOTES)
    line = "".join(" " if unicodedata.category(c) in ("Zs", "Cc", "Cf") else c for c in line)
    line = _DASHES.sub("--", line)
    quoted = ""
    for i, c in enumerate(line):
        if c in "\"'":
            quoted = "" if quoted == c else quoted or c
        elif c == "#" and not quoted:
            return line[:i].strip()
    return line.strip()


def words(line: str) -> list[str]:
    """The words of a line; quotes keep spaces together, spaces around `=` and after commas do not count."""
    text = re.sub(r"\s*=\s*(?=[^\"']*(?:\"[^\"]*\"[^\"]*|'[^']*'[^']*)*$)", "=", plain(line))
    text = re.sub(r"(?<=\w),\s+(?=\w+(?:[\s,]|$))", ",", text)
    return ["".join(match) for match in _WORD.findall(text)]


def read_cell(line: str) -> CellArguments:
    """The line of a `%%colossal` cell. ValueError with everything that is wrong with it."""
    found = words(line)
    if found and found[0] in VERBS:
        raise ValueError(f"{found[0]} is a verb, which has one percent sign and no cell: %colossal {' '.join(found)}")
    rest, given = _split(found, CELL, CELL_LATER, "%%colossal")
    strategy = _strategy(" ".join(rest)) if rest else None
    compare = tuple(Strategy.parse(text) for text in given.get("--compare", ()))  # what cannot run is a row
    ranks, show = given.get("--ranks"), given.get("--show")
    if ranks is not None and (strategy is not None or compare):
        raise ValueError(f"--ranks is for cells without a strategy: {strategy or 'a strategy'} uses all its ranks")
    if strategy is not None and compare:
        raise ValueError(f'--compare names all strategies itself: --compare "{strategy} ; ..." with no strategy before')
    alone = [name for name in ("--pull", "--timeout", "--show", "--local", "--verify") if compare and name in given]
    if alone:
        raise ValueError(f"{', '.join(alone)} does not go with --compare, which shows its runs as one table (--out "
                         "NAME binds them)")
    return CellArguments(strategy, ranks, given.get("--out", ""), given.get("--pull", ()), given.get("--timeout"),
                         show == "all", None if show in (None, "all") else show, given.get("--local", False),
                         given.get("--verify", False), compare)


def read_verb(line: str) -> VerbArguments:
    """The line after `%colossal`. ValueError with the nearest verb, or with the fix for a strategy."""
    found = words(line)
    if not found:
        return VerbArguments("status")
    verb, rest = found[0], found[1:]
    if verb not in VERBS:
        raise ValueError(_no_verb(verb, " ".join(found)))
    if verb == "help":
        return VerbArguments(verb, tuple(rest))        # on an option too: `help --out`
    known = {option.name: option for option in VERBS[verb].options}
    rest, given = _split(rest, known, options.OPTIONS_LATER.get(verb, {}), f"%colossal {verb}")
    return VerbArguments(verb, tuple(rest), given)


def _strategy(text: str) -> Strategy:
    strategy = Strategy.parse(text)
    strategy.check()
    return strategy


def _split(found: list[str], known: Mapping[str, Option], later: Mapping[str, str],
           where: str) -> tuple[list[str], dict[str, Any]]:
    """Words that are no options, and the options' values."""
    rest: list[str] = []
    given: dict[str, Any] = {}
    wrong: list[str] = []
    i = 0
    while i < len(found):
        word, equals, value = found[i].partition("=")
        i += 1
        if not re.match(r"-{1,2}[A-Za-z]", word):
            rest.append(found[i - 1])
        elif word not in known:
            wrong.append(_no_option(word, known, later, where))
            i += word in later and i < len(found) and "=" not in found[i] and not found[i].startswith("-")
        elif word in given:
            wrong.append(f"{word} is given twice")
        elif not known[word].value:
            given[word] = True
        elif not equals and (i == len(found) or found[i].startswith("--")):
            wrong.append(f"{word} needs a value: {word} {known[word].value}")
            given[word] = None
        else:
            given[word] = _value(known[word], value if equals else found[i], wrong)
            i += not equals
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return rest, given


def _value(option: Option, text: str, wrong: list[str]) -> Any:
    try:
        return option.read(text)
    except ValueError as error:
        wrong.append(f"{option.name}: {error}")
        return None


def _no_option(word: str, known: Mapping[str, Option], later: Mapping[str, str], where: str) -> str:
    if word in later:
        return f"{word} ({later[word]}) is not built yet"
    bare = word.lstrip("-").replace("-", "_")
    if where == "%%colossal" and bare in FIELDS:
        return f"{where} has no option {word}; a strategy is written without dashes: {bare}={FIELDS[bare].values}"
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"{where} has no option {word}; did you mean {near[0]} {known[near[0]].value}".rstrip() + "?"
    takes = ", ".join(known) or "none"
    return f"{where} has no option {word}; its options: {takes}"


def _no_verb(verb: str, line: str) -> str:
    name = verb.partition("=")[0].lower()
    if "=" in verb or name in FIELDS:
        return _in_a_cell(line)
    if verb in VERBS_LATER:
        return f"%colossal {verb} ({VERBS_LATER[verb]}) is not built yet"
    if verb in CELL or verb in CELL_LATER:
        return f"{verb} belongs to a cell: write %%colossal {line} (two percent signs) as the cell's first line"
    if f"--{verb}" in CELL:
        return f"{verb} is an option of a cell: write %%colossal --{verb} as the cell's first line"
    near = [each for each in VERBS if len(verb) > 1 and each.startswith(verb)]
    near = near or get_close_matches(verb, VERBS, n=1, cutoff=0.6)
    if near:
        return f"there is no %colossal {verb}; did you mean %colossal {near[0]}?"
    if name in MEANT:
        return _in_a_cell(MEANT[name])
    return f"there is no %colossal {verb}; the verbs are {', '.join(VERBS)}"


def _in_a_cell(line: str) -> str:
    return f"a strategy belongs to a cell: write %%colossal {line} (two percent signs) as the cell's first line"
