"""An operation of the gate under way, and what frees a rank from it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from colossal_nb.parallel.group import Group


class Released(RuntimeError):
    """This rank was freed from a collective, or kept out of one, because its group was closed.

    Never the cause of a failure: the cause is what closed the group (an interrupt, another rank's error or death).
    """


class Work:
    """An operation under way; `wait` ends it. The tensors hold the result only afterwards."""

    def __init__(self, group: "Group", handles: Sequence[Any], finish: Callable[[], None] | None, token: Any) -> None:
        self.group, self.handles, self._finish, self._token = group, handles, finish, token
        self._done = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Block until done. Raises Released, or KeyboardInterrupt, when the group is closed meanwhile."""
        if self._done:
            return
        self.group.epoch.world.recorder.set_background(self._token, False)
        try:
            for handle in self.handles:
                handle.wait()
            self.complete()
        except BaseException as error:
            raise self.group.translated(error) from (None if isinstance(error, Released) else error)
        finally:
            self.close()  # also where a KeyboardInterrupt lands in the handler above

    def complete(self) -> None:
        """The handles are done: put the result where it belongs, write the slice; the first call counts."""
        with self._lock:
            if self._done:
                return
            try:
                if self._finish:
                    with torch.no_grad():
                        self._finish()
            finally:
                self._done = True
                self.group.epoch.world.recorder.end(self._token)

    def close(self) -> None:
        """Write the slice of what failed."""
        with self._lock:
            done, self._done = self._done, True
            if not done:
                self.group.epoch.world.recorder.end(self._token)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done or all(handle.is_completed() for handle in self.handles)


class Finished(Work):
    """What a group of one rank returns: there was nothing to do."""

    def __init__(self, group: "Group") -> None:
        self.group, self._done, self.handles = group, True, ()


class Later:
    """A handle for what another thread does."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def wait(self) -> Any:
        return self._future.result()

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Any:
        """The same as a future of torch."""
        theirs: Any = torch.futures.Future()

        def pass_on(ours: "Future[Any]") -> None:
            error = ours.exception()
            if error is None:
                theirs.set_result(None)
            else:
                theirs.set_exception(error)

        self._future.add_done_callback(pass_on)
        return theirs
