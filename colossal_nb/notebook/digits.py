"""Lines that are equal but for their numbers."""
from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SPACES = re.compile(r"\s+")


def skeleton(text: str) -> str:
    """A line with its numbers and the width of its spaces taken out: equal for lines that differ only in digits."""
    return _SPACES.sub(" ", _NUMBER.sub("#", text))


def differing_numbers(texts: Sequence[str]) -> int:
    """At how many positions the numbers of lines with equal skeletons differ."""
    return sum(len(set(column)) > 1 for column in zip(*(_NUMBER.findall(text) for text in texts), strict=True))
