"""Lines that are equal but for their numbers."""
from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPACES = re.compile(r"\s+")
_DIGITS = str.maketrans(dict.fromkeys("0123456789", "0"))


def is_measured(text: str) -> bool:
    """Whether a line is what %timeit or %time has measured: its numbers are what it is for."""
    return " per loop (mean" in text or text.startswith(("CPU times: ", "Wall time: "))


def skeleton(text: str) -> str:
    """A line with its numbers and the width of its spaces taken out: equal for lines that differ only in digits."""
    if is_measured(text):
        return text
    return _SPACES.sub(" ", _NUMBER.sub("#", text))


def blanked(text: str) -> str:
    """A line with every digit a 0: lines that are equal so have equal skeletons, and it costs a tenth."""
    return text if is_measured(text) else text.translate(_DIGITS)


def differing_numbers(texts: Sequence[str], blank: str = "") -> int:
    """At how many positions the numbers of lines with equal skeletons differ. `blank`: what all are when blanked."""
    if blank:
        return sum(len({text[start:end] for text in texts}) > 1 for start, end in _places(blank))
    return sum(len(set(column)) > 1 for column in zip(*(_NUMBER.findall(text) for text in texts), strict=True))


@lru_cache(maxsize=64)
def _places(text: str) -> list[tuple[int, int]]:
    """Where the numbers of a line stand."""
    return [match.span() for match in _NUMBER.finditer(text)]
