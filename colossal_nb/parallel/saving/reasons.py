"""What the system says of a disk, in sentences: what is wrong, with which path, what to do."""

from __future__ import annotations

import errno
from pathlib import Path

from colossal_nb.parallel.outcome import system_text

_ELSEWHERE = "choose another path"
_KNOWN = {
    errno.ENOSPC: ("the disk is full", "make room there, or choose another path"),
    errno.EDQUOT: ("your share of the disk is used up", "make room there, or choose another path"),
    errno.EFBIG: ("a file may not grow that large there", _ELSEWHERE),
    errno.EACCES: ("no permission", "choose a folder of your own"),
    errno.EPERM: ("no permission", "choose a folder of your own"),
    errno.EROFS: ("nothing can be written there", _ELSEWHERE),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
    errno.ENOTDIR: ("a part of the path is a file, not a folder", _ELSEWHERE),
    errno.EEXIST: ("a part of the path is a file, not a folder", _ELSEWHERE),
}


def reason(error: Exception) -> str:
    """Why a save failed, and the way out where there is one."""
    if not isinstance(error, OSError):
        return str(error)
    what, way = _KNOWN.get(error.errno or 0, ("", ""))
    return f"{what} ({system_text(error)}): {way}" if what else system_text(error)


def not_saved(path: Path, error: OSError) -> OSError:
    """The error of a save that came to no end."""
    said = reason(error)
    if error.errno == errno.ENOENT:
        said = f"no folder can be made or kept there ({said}): {_ELSEWHERE}"
    return _error(f"nothing was saved to {path}: {said}; what was there before is there still", error)


def not_opened(path: Path, error: OSError) -> OSError:
    """The error of a load that has not begun to change anything."""
    what, _ = _KNOWN.get(error.errno or 0, ("", ""))
    said = f"{what} ({system_text(error)})" if what else system_text(error)
    return _error(f"the checkpoint at {path} cannot be read: {said}; nothing was changed", error)


def half_loaded(path: Path, error: OSError, replaced: bool) -> OSError:
    """The error of a load that has changed something."""
    said = "another save replaced it meanwhile" if replaced else system_text(error)
    return _error(
        f"the checkpoint at {path} could not be read to its end: {said}. Weights and states are partly those of the "
        "checkpoint now: load again, or make the model anew, before it is used",
        error,
    )


def _error(text: str, before: OSError) -> OSError:
    error = OSError(text)
    error.errno = before.errno
    return error
