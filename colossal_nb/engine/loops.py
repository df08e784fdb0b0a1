"""Top-level `await` in a rank's cell: the coroutine runs to its end on a loop of its own."""
from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class PrivateLoop:
    """Called with a coroutine, returns its result. Tasks that a cell leaves behind go on at the next `await`.

    The engine's own loop is running in this thread; it is set aside meanwhile, so that the cell sees a thread without
    a running loop (which also lets `asyncio.run` work there).
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        outside = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            with suppress(KeyboardInterrupt):
                return self._loop.run_until_complete(task)
            task.cancel()                              # IPython's coroutine turns it into the cell's error
            return self._loop.run_until_complete(task)
        finally:
            asyncio.set_event_loop(outside)
            asyncio._set_running_loop(outside)


def apart(function: Any) -> Any:
    """Call `function` as if no loop ran in this thread (a cell without `await` may use `asyncio.run`)."""
    outside = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function()
    finally:
        asyncio._set_running_loop(outside)
