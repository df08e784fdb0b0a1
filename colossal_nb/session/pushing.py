"""Values for the ranks, with what their functions read: the ranks' own names come first, the kernel's fill in."""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from colossal_nb.cluster import parcel


@dataclass(frozen=True)
class Push:
    """`helping`: what functions among the values read and the ranks lack; `left`: name -> why it cannot come along."""

    values: Mapping[str, Any]
    helping: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """Sentences for the user."""
        along = [f"with {', '.join(self.helping)}, which they read and the ranks did not have"] if self.helping else []
        return along + [f"{name}, which they read, is not on the ranks and cannot be copied ({why}): make it in a cell"
                        for name, why in self.left.items()]


def gather(values: Mapping[str, Any], lacking: Callable[[list[str]], set[str]]) -> Push:
    """Look for what goes along. `lacking` says which names some rank lacks. Raises what pickling the values raises."""
    push, here = Push(dict(values)), cell_names()
    needed = parcel.needs(push.values, pickler)
    asked: set[str] = set(push.values)
    while needed - asked:
        new = sorted(needed - asked)
        asked |= needed
        for name in sorted(lacking(new)):
            try:
                needed |= parcel.needs(here[name], pickler)
            except Exception as error:
                push.left[name] = type(error).__name__
            else:
                push.helping[name] = here[name]
    return push


def cell_names() -> dict[str, Any]:
    """The names of this kernel's cells."""
    return vars(sys.modules["__main__"])


def pickler(file: Any, take: Any) -> parcel.Pickler:
    """For values of this kernel."""
    return parcel.Pickler(file, cell_names(), take)
