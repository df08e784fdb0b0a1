"""What is typed, before IPython looks for magics in it: odd spaces around ours, and help on a verb."""
from __future__ import annotations

import re

_ODD = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff"  # have no width and are no spaces to Python
_SPACES = rf"(?:[^\S\n]|[{_ODD}])*"
_MAGIC = re.compile(rf"({_SPACES})(%%?colossal)(?![\w?]){_SPACES}(.*)", re.DOTALL)
_CELL = re.compile(rf"{_SPACES}%%")
_EMPTY = re.compile(rf"{_SPACES}\n?$")
_HELP = re.compile(r"^(\s*)(?:\?+\s*(%%?colossal)|(%%?colossal)\s*\?+)\s*$")
_VERB_HELP = re.compile(r"^(\s*)%colossal\s+([\w-]+)\s*\?+\s*$")


def forgive(lines: list[str]) -> list[str]:
    """Our magics with plain spaces before their name and one behind it, whatever a web page or an editor has put there.

    To IPython a name ends at a plain space only. This comes before all of its own transformers.
    """
    first = next((i for i, line in enumerate(lines) if not _EMPTY.match(line)), len(lines))
    if first < len(lines) and _CELL.match(lines[first]):  # what follows is the cell's own text
        return _cell(_plain(lines[first]), lines[first + 1:])
    return [_plain(line) for line in lines]


def _cell(first: str, rest: list[str]) -> list[str]:
    """IPython takes away spaces that all lines begin with; before the first line of a cell alone they are no matter."""
    indent = first[: len(first) - len(first.lstrip(" "))]
    together = all(line.startswith(indent) or not line.strip() for line in rest)
    return [first if together else first.lstrip(" "), *rest]


def _plain(line: str) -> str:
    match = _MAGIC.match(line)
    if match is None:
        return line
    indent = "".join(" " for c in match[1] if c.isspace())
    return f"{indent}{match[2]} {match[3]}"


def ask_help(lines: list[str]) -> list[str]:
    """Questions about our magics become the one that IPython answers as we mean it.

    With two question marks it would show the source in place of the help, and for `%colossal push?` it would look for
    an object called push.
    """
    if lines and lines[0].startswith("%%"):
        return [_HELP.sub(r"\1\2\3?\n", lines[0]), *lines[1:]]
    return [_VERB_HELP.sub(r"\1%colossal help \2\n", _HELP.sub(r"\1\2\3?\n", line)) for line in lines]
