"""The ipyparallel controller (Hub and schedulers) as one small process: `python -m colossal_nb.cluster.controller DIR`.

Threads instead of its usual eleven processes; no task scheduler and no database, which we do not use; a heart beat of
200 ms, because the Hub admits an engine only after a beat, with 50 misses allowed, because a rank in native code may
hold its interpreter for seconds.
"""
from __future__ import annotations

import os
import sys
import threading
from typing import Any

import ipyparallel.controller.app as controller

from colossal_nb.cluster.host import die_with

BEAT_MS, MISSES = 200, 50


class _Beside(threading.Thread):
    """Stands for the process in which the controller would run its heart monitor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "daemon": True})

    def terminate(self) -> None:
        """A daemon thread ends with the process."""


def main(directory: str, parent: int) -> None:
    die_with(parent)
    os.umask(0o077)
    controller.Process = _Beside
    controller.IPController.launch_instance(argv=[
        f"--profile-dir={directory}", "--ip=127.0.0.1", "--location=127.0.0.1", "--log-level=ERROR", "--nodb",
        "--IPController.use_threads=True", "--IPController.broadcast_scheduler_depth=0", "--scheme=none",
        f"--HeartMonitor.period={BEAT_MS}", f"--HeartMonitor.max_heartmonitor_misses={MISSES}"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
