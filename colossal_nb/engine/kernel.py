"""A rank's ipyparallel engine: an ordinary one (any ipyparallel client can use it) with our way to run a cell."""
from __future__ import annotations

import asyncio
import builtins
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ipyparallel.engine.app as engine_app
from ipykernel.zmqshell import ZMQInteractiveShell
from ipyparallel.engine.kernel import IPythonParallelKernel

from colossal_nb.engine import files, progress, prompts, tracebacks
from colossal_nb.engine.cell import Cells
from colossal_nb.engine.loops import PrivateLoop
from colossal_nb.engine.requests import Requests
from colossal_nb.engine.streams import Stream, Streams, pack

SETTINGS = "colossal"


class RankShell(ZMQInteractiveShell):
    """IPython's shell of a rank."""

    @contextmanager
    def _tee(self, channel: str) -> Iterator[None]:
        """Without the copy of all that is printed: `Run` has it, and here it would grow as long as the rank lives."""
        yield


class RankKernel(IPythonParallelKernel):                               # type: ignore[misc]
    """Runs cells in the main thread to their end, one reply each; answers `colossal_request` (see `requests`)."""

    cells: Cells                                       # set on the class before the engine makes its kernel
    shell_class = RankShell

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.session.pack = pack
        self.iopub_socket.send_multipart = self.cells.flow.counted(self.iopub_socket.send_multipart)
        shows = self.shell.display_pub
        shows.publish, shows.clear_output = map(self.cells.flow.paced, (shows.publish, shows.clear_output))
        self._streams: Streams | None = None           # there are none before the engine has redirected its output
        self.shell.loop_runner = PrivateLoop()
        progress.install()
        prompts.install(self.shell)
        tracebacks.install(self.shell)
        self._builtins = dict(vars(builtins))
        self._requests = Requests(self.shell, self.cells)
        self.shell_handlers["colossal_request"] = self.colossal_request

    def pre_handler_hook(self) -> None:
        """SIGINT belongs to `interrupts`, whatever the message."""

    def post_handler_hook(self) -> None:
        """As above."""

    def _forward_input(self, allow_stdin: bool = False) -> None:
        """Nobody types on a rank: `prompts` has replaced input()."""

    def _restore_input(self) -> None:
        """As above."""

    def _publish_execute_input(self, code: str, parent: dict[str, Any], execution_count: int) -> None:
        if SETTINGS not in parent["metadata"]:
            super()._publish_execute_input(code, parent, execution_count)

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """As the base does, and a reply in any case: without one the cell would have no end."""
        try:
            await super().execute_request(stream, ident, parent)
        except Exception as error:                     # none of the cell's own errors, but it may be the cell's doing
            trace = traceback.format_exception(error)
            vars(builtins).update(self._builtins)
            if self._streams is not None:
                self._streams.put_back()
            self.session.send(stream, "execute_reply", {
                "status": "error", "ename": type(error).__name__, "traceback": trace, "line": None,
                "evalue": f"the cell has broken what its rank needs to answer ({error}); builtins and streams are put "
                          f"back"}, parent, ident=ident)

    async def do_execute(self, code: str, silent: bool, store_history: bool = True,
                         user_expressions: dict[str, str] | None = None, allow_stdin: bool = False, *,
                         cell_meta: dict[str, Any] | None = None, cell_id: str | None = None) -> dict[str, Any]:
        settings = (cell_meta or {}).get(SETTINGS) or {
            "cell": self.shell.execution_count, "ranks": self.cells.world.ranks}
        self._streams = self._streams or Streams()
        self._streams.begin_cell()
        reply: dict[str, Any] = await _outside_tasks(lambda: self.cells.run(
            self.shell, code, settings, silent=silent, store_history=store_history))
        reply["notes"] = [*reply.get("notes", []), *self._streams.end_cell(self.cells.interrupted)]
        if reply["status"] == "error":
            reply["engine_info"] = self.get_engine_info(method="execute")
        else:
            reply["user_expressions"] = self.shell.user_expressions(user_expressions or {})
        reply["payload"] = self.shell.payload_manager.read_payload()
        self.shell.payload_manager.clear_payload()
        return reply

    async def colossal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        content = self._requests.answer(parent["content"])
        self.session.send(stream, "colossal_reply", content, parent=parent, ident=ident)


async def _outside_tasks(function: Callable[[], Any]) -> Any:
    """Call it from a plain callback of the loop: no asyncio task is current there, so a cell may run loops itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def call() -> None:
        try:
            done.set_result(function())
        except BaseException as error:                 # the loop of the engine must outlive whatever a cell does
            done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    loop.call_soon(call)
    return await done


class RankEngine(engine_app.IPEngine):                                 # type: ignore[misc]
    """The engine of one rank. `on_ready` is called when it can take cells."""

    on_ready: Callable[[str, Any], None]
    out_stream_factory = Stream

    async def register(self) -> None:
        await super().register()
        self.on_ready(self.ident, self.kernel.shell)

    def redirect_output(self, iopub_socket: Any) -> None:
        """As the base does, without its print of every log handler into the first cell."""
        handlers, self.log.handlers = self.log.handlers, []
        super().redirect_output(iopub_socket)
        self.log.handlers = handlers

    def init_signal(self) -> None:
        """The fork server ends ranks, `interrupts` owns SIGINT."""


def start(rank: int, directory: str, cells: Cells, on_ready: Callable[[str, Any], None]) -> None:
    """Become the ipyparallel engine with this rank's number; returns when the engine ends."""
    files.install(lambda: cells.world.recorder, directory)
    RankKernel.cells, Stream.flow = cells, cells.flow
    engine_app.Kernel = RankKernel
    RankEngine.on_ready = staticmethod(on_ready)
    RankEngine.launch_instance(argv=[
        f"--file={directory}/profile/security/ipcontroller-engine.json", f"--profile-dir={directory}/profile",
        f"--IPEngine.work_dir={os.getcwd()}", f"--IPEngine.id={rank}", "--IPEngine.enable_nanny=False",
        "--log-level=ERROR", "--IPEngine.max_heartbeat_misses=0", "--HistoryManager.enabled=False"])
