"""Short tracebacks for what is no mistake of the user's code: an interrupt, a release from a collective.

IPython's full one reads and parses every file on the way, a second and more when all ranks do it at once, while the
user waits for the prompt. Here: the cell's own lines, the place below them, the message. A recursion without end gets
the same: thousands of frames take IPython half a minute.
"""
from __future__ import annotations

import asyncio
import linecache
import os
import traceback
from types import TracebackType
from typing import Any

from colossal_nb.parallel.work import Released

_OURS = os.path.dirname(__file__)
_MOST_LINES = 6


def install(shell: Any) -> None:
    """A cancelled task is included: it is how an interrupt reaches a cell that awaits."""
    shell.set_custom_exc((KeyboardInterrupt, Released, asyncio.CancelledError, RecursionError), _show)

    def stored(error: BaseException, *_: Any, **__: Any) -> dict[str, Any]:
        """What the history keeps: the traceback that was shown (IPython would format it a second time)."""
        return {"ename": type(error).__name__, "evalue": str(error), "traceback": shell._last_traceback or []}

    shell._format_exception_for_storage = stored


def _show(shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None,
          tb_offset: int | None = None) -> list[str]:
    if kind is asyncio.CancelledError:
        kind = KeyboardInterrupt
    lines = short(shell, kind, error, trace)
    shell._showtraceback(kind, error, lines)
    return lines


def short(shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> list[str]:
    """The lines of a short traceback."""
    lines = [f"{kind.__name__:<42}Traceback (most recent call last)"]
    cells = getattr(shell.compile, "_filename_map", {})
    frames = [(frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in traceback.walk_tb(trace)]
    inside = [place for place in frames if place[0] in cells]
    if len(inside) > _MOST_LINES:
        inside = inside[:_MOST_LINES // 2] + inside[-_MOST_LINES // 2:]
    for name, number, _function in inside:
        lines += [f"Cell In[{cells[name]}], line {number}",
                  f"----> {number} {linecache.getline(name, number).rstrip()}"]
    below = [place for place in frames if not place[0].startswith(_OURS)]
    if below and below[-1][0] not in cells and inside:
        name, number, function = below[-1]
        lines.append(f"File {name}:{number}, in {function}")
    lines.append(f"{kind.__name__}: {error}")
    return lines
