"""A real ipykernel, driven as a front end drives it; sessions in a plain process; what their tests share."""
from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from colossal_nb.run import Run
from colossal_nb.session import Session

ALL = (0, 1, 2, 3)                                     # the ranks of `session`


@dataclass
class Reply:
    """What one cell did: its status, and everything it put on the page in order."""

    status: str = ""
    ename: str = ""
    evalue: str = ""
    pages: str = ""
    """What `name?` shows in the front end's pager."""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def stream(self, name: str = "stdout") -> str:
        return "".join(each["text"] for kind, each in self.messages if kind == "stream" and each["name"] == name)

    @property
    def displays(self) -> list[dict[str, Any]]:
        """Bundles, an updated one in its last state."""
        found: dict[str, dict[str, Any]] = {}
        for kind, each in self.messages:
            if kind in ("display_data", "execute_result", "update_display_data"):
                found[each.get("transient", {}).get("display_id") or f"#{len(found)}"] = each["data"]
        return list(found.values())

    @property
    def said(self) -> str:
        """The text of all displays."""
        return "\n".join(str(data.get("text/plain", "")) for data in self.displays)

    @property
    def error(self) -> str:
        """The error as shown, without colours."""
        text = "\n".join("\n".join(each["traceback"]) for kind, each in self.messages if kind == "error")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    @property
    def size(self) -> int:
        """Bytes of text that the page got."""
        return sum(len(str(each)) for _, each in self.messages)


class Notebook:
    """Cells run one after another; each must end within `LIMIT_S`."""

    LIMIT_S = 120.0

    def __init__(self) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code: str, limit_s: float = LIMIT_S) -> Reply:
        sent = self.client.execute(code)
        reply = Reply()
        end = time.monotonic() + limit_s
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            reply.messages.append((kind, content))
        content = self.answer(sent, end)
        reply.status = content["status"]
        reply.pages = "\n".join(each["data"]["text/plain"] for each in content.get("payload", []) if "data" in each)
        reply.ename, reply.evalue = content.get("ename", ""), content.get("evalue", "")
        return reply

    def ok(self, code: str, limit_s: float = LIMIT_S) -> Reply:
        reply = self.run(code, limit_s)
        assert reply.status == "ok", reply.error or reply.evalue
        return reply

    def matches(self, code: str, cursor: int | None = None) -> list[str]:
        content = self.answer(self.client.complete(code, len(code) if cursor is None else cursor))
        return [str(match) for match in content["matches"]]

    def inspect(self, code: str, cursor: int) -> dict[str, Any]:
        return self.answer(self.client.inspect(code, cursor))

    def value(self, expression: str) -> str:
        """repr of an expression in the kernel."""
        return str(self.ok(expression).displays[-1]["text/plain"])

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def answer(self, sent: str, end: float | None = None) -> dict[str, Any]:
        end = time.monotonic() + 30 if end is None else end
        while True:
            message = self.client.get_shell_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") == sent:
                content: dict[str, Any] = message["content"]
                return content


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """A notebook with the extension loaded. The cluster starts with the first cell that needs it."""
    found = Notebook()
    try:
        found.ok("%load_ext colossal_nb\nimport colossal_nb as cnb")
        # However slow a rank is, its lines are compared with the others': what a cell shows is the same on any machine.
        found.ok("import colossal_nb.notebook.merge\ncolossal_nb.notebook.merge.HOLD_S = 60.0")
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Four engines and no notebook."""
    made = Session()
    made.start(len(ALL))
    yield made
    made.stop()


def printed(run: Run) -> list[str]:
    """What each rank printed, without the white space around it."""
    return [run.text(rank).strip() for rank in run.ranks]


def eventually(fact: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + limit_s
    while not fact():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
