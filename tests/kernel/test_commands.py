"""`!command` on ranks: output as it is written, empty input, Stop ends it."""
from __future__ import annotations

import os
import time

import pytest
from conftest import Notebook, eventually


@pytest.mark.parametrize("command, said", [
    ("!read x; echo code $?", "code 1"), ("!cat", ""), ("!python -c 'input()' 2>&1 | tail -1", "EOFError"),
    ("!read x < /dev/tty || echo refused", "refused"), ("found = !read x; echo $?\nprint(found)", "['1']"),
    ("!git credential fill < /dev/null; echo over", "over")])
def test_a_command_that_asks_gets_no_answer_and_ends(notebook: Notebook, command: str, said: str) -> None:
    reply = notebook.ok(f"%%colossal dp=2\n{command}", 60)
    assert said in reply.stream()


def test_its_output_is_that_of_a_terminal(notebook: Notebook) -> None:
    reply = notebook.ok("%%colossal dp=2 --out run\n!test -t 1 && echo a; echo b >&2; stty size < /dev/stdout")
    assert reply.stream() == "a\nb\n24 80\n"
    assert notebook.value("run.text(1)") == "'a\\nb\\n24 80\\n'"
    assert notebook.ok("%%colossal dp=2\nname = 'x'\n!echo {name} $name; exit 3\nprint(_exit_code)").stream() == \
        "x x\n3\n"
    assert notebook.ok("%%colossal dp=2\n!kill -9 $$\nprint(_exit_code)").stream() == "-9\n"
    assert notebook.ok("%%colossal dp=2\n!(sleep 30 &) ; echo at once", 20).stream() == "at once\n"


def test_it_is_streamed(notebook: Notebook) -> None:
    sent = notebook.client.execute("%%colossal dp=2\n!echo first; sleep 2; echo last")
    seen: dict[str, float] = {}
    while "idle" not in seen:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == sent and message["msg_type"] == "stream":
            seen[message["content"]["text"].split()[0]] = time.monotonic()
        elif message["content"].get("execution_state") == "idle" and message["parent_header"].get("msg_id") == sent:
            seen["idle"] = time.monotonic()
    notebook.answer(sent)
    assert seen["last"] - seen["first"] > 1.0


def test_stop_ends_it_and_what_it_started(notebook: Notebook) -> None:
    sent = notebook.client.execute("%%colossal dp=2 --show all\n!echo $$; (trap '' INT; sleep 60); echo never")
    pids: list[int] = []
    while not pids:
        message = notebook.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream":
            pids = [int(word) for word in message["content"]["text"].split() if word.isdigit()]
    notebook.manager.interrupt_kernel()
    assert notebook.answer(sent)["ename"] == "KeyboardInterrupt"
    assert eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert notebook.ok("%%colossal dp=2\nprint('on')").stream() == "on\n"
