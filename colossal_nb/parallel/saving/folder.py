"""A checkpoint on disk: a folder with one small file that names where the data is, replaced in one instant.

    path/checkpoint.json      what is in it; written last
    path/data-1f2e3d4c/       the tensors, in the format of torch's distributed checkpoint

A save writes a new data folder, then replaces checkpoint.json, then removes the old data: whatever ends it, the file
names a whole checkpoint, the old one or the new one. Of several saves at once the last one's stays. What is written or
read at the moment is locked (see `locks`), and nobody removes it; what a dead save left goes with the next. On a file
system without locks only the checkpoint that was replaced is removed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.objects import all_gather
from colossal_nb.parallel.saving.locks import DATA, Lock
from colossal_nb.validation import shown

FILE = "checkpoint.json"
FORMAT, VERSION = "colossal_nb checkpoint", 1
_BLOCK_BYTES = 2**20
_TRIES = 20


def agreed(path: Any, group: Group, of: str) -> Path:
    """The absolute path that all ranks were given. Raises ValueError on all of them where they were not given one.

    Collective.
    """
    try:
        name = os.fspath(path)
        text = str(Path(name).expanduser().absolute()) if name and "\0" not in name else ""
    except (TypeError, RuntimeError):
        text = ""
    given = all_gather((text, shown(path)), group, of)
    wrong = [kind for each, kind in given if not each]
    if wrong:
        raise ValueError(f"the path of a checkpoint is a string or a pathlib.Path, not {wrong[0]}")
    if len({each for each, _ in given}) > 1:
        listed = ", ".join(f"rank {rank}: {each}" for rank, (each, _) in zip(group.ranks, given, strict=True))
        raise ValueError(
            f"{of} takes the same path on every rank, and all ranks work on the one folder; it was given {listed}: "
            "leave rank out of the path, and give an absolute one where ranks have changed their folder"
        )
    return Path(text)


def new_name() -> str:
    """A name for a data folder that nobody has had."""
    return f"data-{uuid.uuid4().hex[:8]}"


def begin(path: Path, name: str, lock: Lock) -> None:
    """Make a data folder and lock it. Raises ValueError where something else lies at the path."""
    for _ in range(_TRIES):  # another save may just be removing what looked left over
        _require_ours(path)
        with suppress(FileExistsError):
            (path / name).mkdir(parents=True)
        if lock.share(path / name):
            return
    raise OSError(f"{path / name} is removed by others as soon as it is made")


def _require_ours(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; a checkpoint is a folder: choose another name")
    others = [name for name in _names(path) if not _is_ours(name)]
    if others:
        shown = ", ".join(sorted(others)[:3])
        raise ValueError(
            f"{path} is a folder with other things in it ({shown}{', ...' if len(others) > 3 else ''}): "
            "a checkpoint has a folder of its own"
        )
    if (path / FILE).is_dir():
        raise ValueError(f"{path / FILE} is a folder, where a checkpoint has a file: remove it or choose another name")


def drop(path: Path, name: str) -> None:
    """Remove what `begin` made, of a save that did not come to its end; not what `commit` has made the checkpoint."""
    try:
        if read(path)["data"] == name:
            return
    except (FileNotFoundError, ValueError):
        pass
    except OSError:
        return
    _remove(path, name)
    with suppress(OSError):
        path.rmdir()  # only where it is empty: there was no checkpoint before


def commit(path: Path, content: dict[str, Any], lock: Lock) -> None:
    """Make this the checkpoint, in one instant; then end the lock and remove the data of the one before."""
    text = json.dumps(content)
    head = json.dumps({"format": FORMAT, "version": VERSION, "crc32": zlib.crc32(text.encode())})
    file = path / content["data"] / FILE  # a place that no other save has
    with open(file, "w", encoding="utf-8") as draft:
        draft.write(f"{head}\n{text}\n")
        draft.flush()
        os.fsync(draft.fileno())
    before = _current(path)
    os.replace(file, path / FILE)
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
    lock.release()
    for name in _names(path):
        if DATA.fullmatch(name):
            _remove_unused(path, name, before)


def _remove_unused(path: Path, name: str, before: str) -> None:
    """Remove data that is not the checkpoint's and will not be. `before`: what was the checkpoint's until now."""
    lock = Lock()
    alone = lock.alone(path / name)
    # Looked up under the lock: who wrote this data has made it the checkpoint by now, or never will.
    if (alone or (alone is None and name == before)) and _current(path) not in ("", name):
        _remove(path, name)
    lock.release()


def _remove(path: Path, name: str) -> None:
    gone = path / f".{name.removeprefix('.')}"
    with suppress(OSError):
        os.rename(path / name, gone)  # at once: a rank that is still writing there cannot leave it half removed
    shutil.rmtree(gone, ignore_errors=True)


def _current(path: Path) -> str:
    """The name of the data folder of the checkpoint, "" where that cannot be said."""
    try:
        name: str = read(path)["data"]
    except (OSError, ValueError):
        return ""
    return name


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def opened(path: Path, lock: Lock) -> dict[str, Any]:
    """As `read`; others keep from removing the data until the lock is released."""
    for _ in range(_TRIES):
        content = read(path)
        is_there = lock.share(path / content["data"])
        if _current(path) == content["data"]:  # else it may be going, or gone
            return content
        lock.release()
        time.sleep(0.05 if is_there else 0)
    raise OSError("other saves replace it again and again")


def is_replaced(path: Path, content: dict[str, Any]) -> bool:
    """Whether another checkpoint has taken the place of this one."""
    return _current(path) not in ("", content["data"])


def read(path: Path) -> dict[str, Any]:
    """What `commit` wrote. Raises FileNotFoundError or ValueError, saying what is there instead."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}: nothing of that name")
    if not path.is_dir():
        raise ValueError(
            f"{path} is a file, no checkpoint of cnb.save (a folder); weights of torch.save come in by "
            "model.load_state_dict(torch.load(path))"
        )
    if (path / FILE).is_dir():
        raise ValueError(f"{path / FILE} is a folder, no file of cnb.save: there is no checkpoint at {path}")
    if not (path / FILE).is_file():
        started = any(DATA.fullmatch(name) for name in _names(path))
        why = "a save began there and did not come to its end" if started else f"it has no {FILE}"
        raise FileNotFoundError(f"there is no checkpoint of cnb.save at {path}: {why}")
    try:
        head, text, *_ = (path / FILE).read_text(encoding="utf-8").split("\n")
        about = json.loads(head)
        if about["format"] != FORMAT:
            raise ValueError
        if about["version"] == VERSION and about["crc32"] == zlib.crc32(text.encode()):
            content: dict[str, Any] = json.loads(text)
            return content
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path / FILE} is damaged, or no file of cnb.save") from None
    if about["version"] != VERSION:
        raise ValueError(f"{path} has version {about['version']} of the format; this colossal_nb reads {VERSION}")
    raise ValueError(f"{path / FILE} is damaged: its text is not what was written")


def checksum(file: Path, pause: Callable[[], None] | None = None) -> list[int]:
    """Bytes and CRC-32 of a file. `pause` is called before each block."""
    crc = size = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            if pause is not None:
                pause()
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def verify(folder: Path, files: Iterable[tuple[str, list[int]]]) -> None:
    """Raises ValueError where a file is not what was written."""
    for name, (size, crc) in files:
        if not (folder / name).is_file():
            raise ValueError(f"the checkpoint is not whole: {folder / name} is missing")
        found = checksum(folder / name)
        if found[0] != size:
            raise ValueError(f"the checkpoint is damaged: {folder / name} has {found[0]} of {size} bytes")
        if found[1] != crc:
            raise ValueError(f"the checkpoint is damaged: the bytes of {folder / name} are not those that were written")


def _is_ours(name: str) -> bool:
    # Hidden files (of a file manager, of Jupyter) are nobody's; a save leaves them where they are.
    return name == FILE or name.startswith(".") or DATA.fullmatch(name) is not None
