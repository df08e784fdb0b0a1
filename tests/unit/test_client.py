"""What the kernel says of a process that its cluster has lost."""
from __future__ import annotations

from pathlib import Path

from colossal_nb.cluster.children import tail
from colossal_nb.cluster.client import _fault


def test_how_a_process_ended_and_only_the_last_error_of_its_log() -> None:
    log = ("2026-11-30 23:49:05.717 [IPController] INFO | Hub listening\n2026-11-30 23:49:05.718 [IPController] "
           "monitor traffic: b'iopub'\n2026-11-30 23:49:05.719 [IPController] ERROR | no room\nOSError: full\n\n")
    assert _fault("controller", -9, log) == (
        "the controller ended (killed by SIGKILL)\nOSError: full")
    assert _fault("fork server", 1, "2026-11-30 INFO | started") == "the fork server ended (exit code 1)"
    stray = "2026-12-01 18:42:50.537 [IPController] ERROR | queue::unknown engine b'5994' is sending a reply: "
    assert _fault("controller", -9, stray) == "the controller ended (killed by SIGKILL)"
    assert _fault("fork server", -120, "") == "the fork server ended (killed by signal 120)"


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("2026 [IPController] queue::client\nDied: no room\n")
    assert tail(log, 30) == tail(log, 14) == "Died: no room"
    assert tail(log, 5) == "" and tail(log).startswith("2026 ") and tail(tmp_path / "none") == ""
