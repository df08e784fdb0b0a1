"""A save whose data is written while training goes on.

Each rank copies what it writes, and a thread of its own puts the copy on disk: it talks to no other rank. A rank that
is done leaves a small file in the data folder; rank 0 collects these, makes the checkpoint and removes them, which
tells the others.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from colossal_nb.parallel.outcome import alike, root
from colossal_nb.parallel.saving import folder
from colossal_nb.parallel.saving.locks import Lock
from colossal_nb.parallel.saving.reasons import not_saved, reason
from colossal_nb.parallel.saving.shards import METADATA, Job, plain_results, results_of
from colossal_nb.parallel.world import World

_PAUSE = 20
"""Seconds of rest for each second of the thread's work: it holds Python's lock for a part of the time only."""
_LOOK_S = 0.03


@dataclass(frozen=True)
class Target:
    """Where a save goes, and which of the `ranks` this one is. `lock`: this rank's, on the data folder."""

    path: Path
    name: str
    ranks: tuple[int, ...]
    index: int
    lock: Lock = field(default_factory=Lock)

    @property
    def data(self) -> Path:
        return self.path / self.name

    def enter(self) -> None:
        """Rank 0 has made the data folder: lock it on this rank too."""
        if self.index and not self.lock.share(self.data):
            raise FileNotFoundError(
                f"{self.data}, which rank 0 has just made, is not to be seen here: the ranks need one file system"
            )

    def note(self, index: int) -> Path:
        """The file that says that a rank is done."""
        return self.data / f"rank{index}.json"

    def leave(self, said: dict[str, Any]) -> None:
        """Say how this rank's part went; at once whole."""
        draft = self.note(self.index).with_suffix(".new")
        draft.write_text(json.dumps(said), encoding="utf-8")
        os.replace(draft, self.note(self.index))


class Saving:
    """What `save(..., wait=False)` returns: `wait()` returns when the checkpoint is there, `done` looks."""

    def __init__(self, target: Target, job: Job, content: dict[str, Any], group: Callable[[], Any]) -> None:
        self._target, self._job, self._content, self._group = target, job, content, group
        self._hurry = threading.Event()
        self._busy_s = 0.0
        self._lives = dict(World.current().lives)
        self._failure: Exception | None = None
        self._told = False
        self.on_success: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="cnb.save")  # a program ends when its save is on disk

    def start(self) -> None:
        self._thread.start()

    def __repr__(self) -> str:
        state = "under way" if not self.done else "failed" if self._failure else "done"
        return f"<save to {self._target.path}: {state}>"

    @property
    def path(self) -> Path:
        return self._target.path

    @property
    def done(self) -> bool:
        """Whether this rank's part has come to its end, also a bad one, which `wait` raises."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is whole on disk; raise OSError on all ranks where it could not be. Collective."""
        try:
            alike(self._joined, self._group(), "save")
        except OSError as error:
            raise not_saved(self.path, error) from error

    def _joined(self) -> None:
        self._hurry.set()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            self._group().epoch.check()  # its end may need a rank that was lost
        self._told = True
        if self._failure is not None:
            raise self._failure

    def join(self) -> None:
        """Return when this rank's part has come to its end."""
        self._hurry.set()
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)

    def trouble(self) -> str:
        """What is to be said, once, of a save that failed and for which nobody waited."""
        if not self.done or self._failure is None or self._told:
            return ""
        self._told = True
        where, why = f"rank {self._target.ranks[self._target.index]}", reason(self._failure)
        return f"the save to {self.path} failed on {where}: {why}; what was there before is there still"

    # in the thread
    def _run(self) -> None:
        try:
            with suppress(OSError, AttributeError):  # the trainer comes first, where a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)
            results = self._job.write(self._pause)
            names = sorted({each.storage_data.relative_path for each in results})
            sums = {name: folder.checksum(self._target.data / name, self._pause) for name in names}
            if self._target.index == 0:
                self._finish(results, sums)
            else:
                self._target.leave({"results": plain_results(results), "sums": sums})
                self._wait_until(lambda: not self._target.note(self._target.index).exists())
            self.on_success()
        except Exception as error:
            self._failure = root(error)
            with suppress(OSError):
                self._target.leave({"failed": reason(self._failure)})
            if self._target.index == 0:
                folder.drop(self._target.path, self._target.name)
        finally:
            self._target.lock.release()

    def _finish(self, results: list[WriteResult], sums: dict[str, list[int]]) -> None:
        notes = [self._target.note(index) for index in range(1, len(self._target.ranks))]
        self._wait_until(lambda: all(note.exists() for note in notes))
        said = [json.loads(note.read_text(encoding="utf-8")) for note in notes]
        for index, each in enumerate(said, 1):
            if "failed" in each:
                raise OSError(f"rank {self._target.ranks[index]} could not write its part: {each['failed']}")
        everything = [results, *(results_of(each["results"]) for each in said)]
        self._job.finish(everything)
        self._content["tensors"] = self._job.index(everything).to_plain()
        sums[METADATA] = folder.checksum(self._target.data / METADATA, self._pause)
        self._content["files"] = dict(ChainMap(sums, *(each["sums"] for each in said)))
        folder.commit(self._target.path, self._content, self._target.lock)
        for note in notes:
            note.unlink(missing_ok=True)

    def _wait_until(self, fact: Callable[[], bool]) -> None:
        while not fact():
            lives = World.current().lives
            lost = [rank for rank in self._target.ranks if lives.get(rank, 1) != self._lives.get(rank, 1)]
            if lost:
                raise OSError(f"rank {lost[0]} was lost before its part was written")
            time.sleep(_LOOK_S)
        if not self._target.data.is_dir():
            raise OSError("another rank could not write its part")

    def _pause(self) -> None:
        """Rest in proportion to the work since the last rest, unless somebody waits."""
        worked_s, self._busy_s = time.thread_time() - self._busy_s, time.thread_time()
        self._hurry.wait(_PAUSE * worked_s)


def give_up(target: Target) -> None:
    """This rank leaves a save that others may have begun."""
    with suppress(OSError):
        target.leave({"failed": "it was stopped"})


def join_pending() -> None:
    """Return when the last save of this rank has come to its end; say so where that was a bad one."""
    world = World.current()
    pending = world.saving
    if pending is not None:
        pending.join()
        if said := pending.trouble():
            world.note(said)
        world.saving = None
