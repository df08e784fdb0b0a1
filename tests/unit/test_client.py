"""What the kernel says of a process that its cluster has lost."""
from __future__ import annotations

from colossal_nb.cluster.client import _fault


def test_how_a_process_ended_and_only_the_errors_of_its_log() -> None:
    log = ("2026-11-30 23:49:05.717 [IPController] INFO | Hub listening\n2026-11-30 23:49:05.718 [IPController] "
           "monitor traffic: b'iopub'\n2026-11-30 23:49:05.719 [IPController] ERROR | no room\nOSError: full\n\n")
    assert _fault("controller", -9, log) == (
        "the controller ended (killed by SIGKILL)\n2026-11-30 23:49:05.719 [IPController] ERROR | no room\n"
        "OSError: full")
    assert _fault("fork server", 1, "2026-11-30 INFO | started") == "the fork server ended (exit code 1)"
    assert _fault("fork server", -120, "") == "the fork server ended (killed by signal 120)"
