"""%debug in the kernel: no debugger for errors of the ranks, the usual one for the kernel's own."""
from __future__ import annotations

import queue
import re

import pytest
from conftest import Notebook


def debugged(notebook: Notebook, code: str) -> tuple[str, str]:
    """Run a cell as a front end that can type; `q` answers a debugger. What it printed, and its last prompt."""
    sent = notebook.client.execute(code, allow_stdin=True, stop_on_error=False)
    prompt, printed = "", ""
    while True:
        try:
            asked = notebook.client.get_stdin_msg(timeout=0.1)
            prompt = asked["content"]["prompt"]
            notebook.client.input("q")
        except queue.Empty:
            pass
        try:
            message = notebook.client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        content = message["content"]
        printed += str(content.get("text", "")) + "\n".join(content.get("traceback", []))
        if content.get("execution_state") == "idle":
            notebook.answer(sent)
            return re.sub(r"\x1b\[[0-9;]*m", "", printed), prompt


@pytest.mark.parametrize("failing", ["%%colossal dp=2\n1 / 0", "%%colossal zz=2\npass"])
def test_an_error_of_the_ranks_has_no_frames_here(notebook: Notebook, failing: str) -> None:
    assert notebook.run(failing).status == "error"
    for _ in range(2):  # the refusal is no error to debug either
        reply = notebook.run("%debug")
        assert reply.status == "error" and reply.ename == "UsageError"
        assert "cnb.last_run.errors" in reply.error and "/colossal_nb/" not in reply.error


def test_an_error_of_the_kernel_is_debugged_as_usual(notebook: Notebook) -> None:
    notebook.run("%%colossal dp=2\n1 / 0")
    assert notebook.run("[][1]").status == "error"
    printed, prompt = debugged(notebook, "%debug")
    assert "[][1]" in printed and prompt.startswith("ipdb>")


def test_with_pdb_on_only_errors_of_the_kernel_open_it(notebook: Notebook) -> None:
    notebook.ok("%pdb on")
    try:
        printed, prompt = debugged(notebook, "%%colossal dp=2\n1 / 0")
        assert prompt == "" and "no debugger: " in printed and "ZeroDivisionError" in printed
        printed, prompt = debugged(notebook, "{}['key']")
        assert prompt.startswith("ipdb>")
    finally:
        notebook.ok("%pdb off")
