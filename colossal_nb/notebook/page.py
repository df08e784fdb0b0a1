"""Where a cell's output goes: the page."""
from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from typing import Any, Protocol


class Page(Protocol):
    """What shows things to the user. Text of the ranks is a stream; what we say ourselves is a display."""

    def write(self, stream: str, text: str) -> None: ...

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: str = "",
                update: bool = False) -> None: ...

    def clear(self, wait: bool) -> None: ...


def new_id() -> str:
    """An identifier of a display that will be updated."""
    return uuid.uuid4().hex


class KernelPage:
    """The output area of the cell that the kernel runs."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def write(self, stream: str, text: str) -> None:
        out = sys.stderr if stream == "stderr" else sys.stdout
        out.write(text)
        out.flush()

    def display(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, display_id: str = "",
                update: bool = False) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        transient = {"display_id": display_id} if display_id else {}
        self._shell.display_pub.publish(dict(data), dict(metadata or {}), transient=transient, update=update)

    def clear(self, wait: bool) -> None:
        self._shell.display_pub.clear_output(wait)


def say(page: Page, text: str) -> None:
    """A sentence of our own."""
    page.display({"text/plain": text})
