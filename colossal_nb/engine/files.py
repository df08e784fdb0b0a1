"""Which files a cell writes: to notice when all ranks write the same one at once.

Noted as states `writes` of the record, with the path as reason; the notebook compares the ranks.
"""
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from colossal_nb.parallel.saving import locks
from colossal_nb.record.recorder import Recorder

_WRITING = os.O_WRONLY | os.O_RDWR
_NOT_THE_USERS = ("/dev/", "/proc/", "/__pycache__/", "/.cache/", "/.config/", "/torchinductor", "/.ipython/")


def install(recorder: Callable[[], Recorder], own_directory: str) -> None:
    """Watch this process's `open` calls, and `torch.save`, which opens its files in C++."""
    def note(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            text = os.path.abspath(os.fsdecode(path))
            ours = text.startswith(own_directory) or locks.is_lock(text)
            if not ours and not any(part in text for part in _NOT_THE_USERS):
                recorder().state("writes", text)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            note(arguments[0])

    save = torch.save

    @functools.wraps(save)
    def noted_save(obj: Any, f: Any, *rest: Any, **options: Any) -> None:
        note(f)
        save(obj, f, *rest, **options)

    sys.addaudithook(hook)
    torch.save = noted_save
