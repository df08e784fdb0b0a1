"""Completion and help while typing: fields and values on the magic line, the ranks' variables below it."""
from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from colossal_nb.cluster.client import ClusterLost, RankFailed
from colossal_nb.notebook import help as helps
from colossal_nb.notebook.magics import Notebook
from colossal_nb.notebook.names import binds
from colossal_nb.notebook.options import CELL, VERBS
from colossal_nb.plan.strategy import FIELDS

CELL_MAGIC, LINE_MAGIC = "%%colossal", "%colossal"
_WORD = re.compile(r"\w+$")
_CELL = re.compile(rf"{CELL_MAGIC}(?!\w)")
_LINE = re.compile(rf"\s*{LINE_MAGIC}(?!\w)")
LIMIT_S = 2.0
"""No key press waits longer for the ranks."""


def words_for_cell(typed: str) -> list[str]:
    """What may follow on a `%%colossal` line; `typed` is what stands between the magic and the cursor."""
    before, word = _last_word(typed)
    name, equals, value = word.partition("=")
    if equals:
        return [f"{name}={each}" for each in helps.values(name) if each.startswith(value)] if name in FIELDS else []
    if before and before[-1] in CELL and CELL[before[-1]].value:
        return [choice for choice in CELL[before[-1]].choices if choice.startswith(word)]
    given = {part.partition("=")[0] for part in before}
    fields = [f"{field}=" for field in FIELDS if field not in given]
    return [each for each in [*fields, *(option for option in CELL if option not in given)] if each.startswith(word)]


def words_for_verb(typed: str, here: list[str], there: list[str]) -> list[str]:
    """What may follow on a `%colossal` line, with the names of variables here and on the ranks."""
    before, word = _last_word(typed)
    if not before:
        found = list(VERBS)
    elif before[0] not in VERBS:
        found = []
    else:
        more = {"push": here, "pull": there, "help": [*VERBS, *FIELDS, *CELL]}.get(before[0], [])
        found = [*more, *(option.name for option in VERBS[before[0]].options if option.name not in before)]
    return [each for each in found if each.startswith(word)]


def _last_word(typed: str) -> tuple[list[str], str]:
    words = typed.split()
    return (words, "") if not words or typed[-1].isspace() else (words[:-1], words[-1])


def split_cell(text: str) -> tuple[str, str] | None:
    """A `%%colossal` cell's first line and its body (None for any other cell)."""
    first, _, body = text.partition("\n")
    return (first, body) if _CELL.match(first) else None


def names_above(lines: list[str], cursor: int) -> list[str]:
    """Names that the cell binds above the last of these lines, unless what stands there cannot be a name alone.

    The ranks do not have them before the cell has run.
    """
    last = lines[-1]
    if re.search(r"\.\s*\w*$", last[:cursor]):
        return []
    indent = last[: len(last) - len(last.lstrip())]
    return binds("\n".join([*lines[:-1], f"{indent}pass"]))


class Completion:
    """Joins IPython's completer and the kernel's inspection."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def matcher(self) -> Callable[[CompletionContext], Any]:
        """A matcher for `Completer.custom_matchers`."""
        def colossal(context: CompletionContext) -> Any:
            return self.complete(context)
        found: Callable[[CompletionContext], Any] = context_matcher(identifier="colossal_nb")(colossal)
        return found

    def complete(self, context: CompletionContext) -> dict[str, Any]:
        """Completions for one request; nothing, and no say, outside of our cells and lines."""
        line = context.full_text.split("\n")[context.cursor_line][: context.cursor_position]
        cell = split_cell(context.full_text)
        if cell is not None and context.cursor_line == 0 and len(line) > len(CELL_MAGIC):
            return _found(words_for_cell(line[len(CELL_MAGIC):]), _last_word(line)[1])
        if cell is not None and context.cursor_line > 0:
            return self._on_ranks(context, cell[1])
        magic = _LINE.match(line)
        if magic and len(line) > magic.end():
            return _found(self._verbs(line[magic.end():]), _last_word(line)[1])
        return {"completions": [], "suppress": False}

    def _verbs(self, typed: str) -> list[str]:
        here = [name for name in self._notebook.here() if not name.startswith("_")]
        there: list[str] = []
        if typed.split()[:1] == ["pull"]:
            with suppress(RankFailed, ClusterLost, TimeoutError):  # typing goes on without them
                there = sorted({name for found in self._notebook.ranks_names(LIMIT_S).values() for name in found})
        return words_for_verb(typed, here, there)

    def _on_ranks(self, context: CompletionContext, body: str) -> dict[str, Any]:
        lines = body.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line - 1]) + context.cursor_position
        own = names_above(lines[: context.cursor_line], context.cursor_position)
        reply = self._notebook.session.complete(body, cursor)
        matches = reply.get("matches", [])
        word = _WORD.search(body, 0, cursor)
        start = reply["cursor_start"] if matches else word.start() if word else cursor
        typed = body[start: cursor]
        found = list(dict.fromkeys([*(name for name in own if typed and name.startswith(typed)), *matches]))
        return _found(found, typed, "rank 0") if found else {"completions": [], "suppress": False}

    def inspect(self, code: str, cursor: int, detail: int) -> dict[str, Any] | None:
        """An inspect_reply's content for a cursor in our cells and lines; None where the kernel knows better."""
        cell = split_cell(code)
        if cell is None:
            line = code[code.rfind("\n", 0, cursor) + 1:].partition("\n")[0]
            return _line_help(line, cursor - code.rfind("\n", 0, cursor) - 1) if _LINE.match(line) else None
        first, body = cell
        if cursor <= len(first):
            word = _word_at(first, cursor)
            return _help(helps.word(word) if word in FIELDS or word in CELL else helps.cell())
        reply = self._notebook.session.inspect(body, cursor - len(first) - 1, detail)
        return reply if reply.get("found") else None


def _line_help(line: str, cursor: int) -> dict[str, Any] | None:
    """Help on the magic or its verb; what follows them are names of the kernel."""
    word = _word_at(line, cursor)
    if LINE_MAGIC.startswith(word):
        return _help(helps.line())
    return _help(helps.verb(word)) if word in VERBS and line.split()[1] == word else None


def _word_at(line: str, cursor: int) -> str:
    """The word in which the cursor stands or which it has just left, without a value."""
    start = max(i for i in range(cursor + 1) if i == 0 or line[i - 1].isspace())
    return line[start:].split(maxsplit=1)[0].partition("=")[0] if line[start:].strip() else ""


def _help(text: str) -> dict[str, Any]:
    return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}


def _found(matches: list[str], typed: str, kind: str = "strategy") -> dict[str, Any]:
    return {"completions": [SimpleCompletion(text=match, type=kind) for match in matches],
            "matched_fragment": typed, "suppress": True, "ordered": True}
