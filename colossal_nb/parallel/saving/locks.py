"""Who works with a data folder: writers and readers share its lock, and only who has it alone may delete the folder.

The lock is the kernel's (flock), on a hidden file in the folder: it ends with its process, however that ends. Where a
file system has no such locks everybody works without: see `Lock.alone`.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

NAME = ".lock"
DATA = re.compile(r"\.?data-[0-9a-f]{8}")  # a data folder; hidden while it is being removed
_PATIENCE_S, _LOOK_S = 60.0, 0.01


def is_lock(path: str) -> bool:
    """Whether this is such a hidden file, which all ranks open."""
    file = Path(path)
    return file.name == NAME and DATA.fullmatch(file.parent.name) is not None


class Lock:
    """Of one data folder; holds nothing at first. Child processes that were forked meanwhile do not prolong it."""

    def __init__(self) -> None:
        self._number: int | None = None

    def share(self, folder: Path) -> bool:
        """Keep others from deleting the folder; waits while one looks at it. False where it is not (or no longer)
        there, True also where there are no locks."""
        until = time.monotonic() + _PATIENCE_S
        while self._try(folder, fcntl.LOCK_SH) is False and folder.is_dir() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if not folder.is_dir():
            self.release()
            return False
        return True

    def alone(self, folder: Path) -> bool | None:
        """Whether nobody else works with the folder; None where that cannot be known."""
        return self._try(folder, fcntl.LOCK_EX)

    def _try(self, folder: Path, kind: int) -> bool | None:
        assert self._number is None
        try:
            number = _opened(folder / NAME)
        except OSError:
            return None if folder.is_dir() else False
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(number), os.stat(folder / NAME)):  # else it was deleted in between
                self._number = number
                return True
            return False
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:
            return None
        finally:
            if self._number is None:
                os.close(number)

    def release(self) -> None:
        number, self._number = self._number, None
        if number is not None:
            with suppress(OSError):
                fcntl.flock(number, fcntl.LOCK_UN)  # closing alone leaves it to a forked child that has the file too
            os.close(number)


def _opened(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(file, os.O_RDONLY)  # somebody else's checkpoint
