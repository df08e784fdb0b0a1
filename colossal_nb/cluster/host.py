"""What this host gives us: cores, and the kernel's promise that a child ends with its parent."""
from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1      # PR_SET_PDEATHSIG of prctl(2)


def usable_cores() -> int:
    """Cores this process may use: the affinity mask, cut by the cgroup's quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def _cgroup_quota() -> float | None:
    """Cores' worth of time that the cgroup grants (version 2, then 1), None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def threads_per_engine(engines: int) -> int:
    """Threads that each of `engines` ranks on this host should use."""
    return max(1, usable_cores() // max(1, engines))


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask Linux to end this process when its parent ends; end at once if the parent has gone already.

    Elsewhere the ends of pipes do the same work a little later.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)
    except (AttributeError, OSError):
        return
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(status: int) -> str:
    """A wait status in words: `killed by SIGKILL`, `exit code 3`."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
