"""A rank's stdout and stderr: they wait while the kernel is behind, and take whatever a program writes.

ipykernel's own streams are without a limit: what a rank prints faster than a page can be drawn fills the memory of
three processes, and hides the user's Stop behind it.
"""
from __future__ import annotations

import codecs
import fcntl
import json
import os
import select
import struct
import sys
import termios
import threading
import time
from collections import deque
from typing import Any

import ipykernel.iostream as iostream
from jupyter_client.jsonutil import json_clean, json_default

from colossal_nb.engine.flow import Flow

_CHUNK_BYTES = 1 << 15
_SHORT, _GRAIN, _MESSAGE = 1 << 10, 1 << 12, 1 << 17    # characters
_LOG_BYTES = 1 << 20
_DRAIN_S = 0.5
_WAKE_MS = 200
_ESCAPE = "colossal_nb.escape"


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """What cannot be encoded as the user would write it, inside JSON text: a backslash there is two."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(f"\\\\u{ord(each):04x}" for each in error.object[error.start:error.end]), error.end


codecs.register_error(_ESCAPE, _escaped)


def pack(value: Any) -> bytes:
    """A message's part as JSON. Half a surrogate pair (a file name that is no UTF-8, say) is written as `\\udcff`."""
    try:
        text = json.dumps(value, default=json_default, ensure_ascii=False, allow_nan=False)
    except ValueError:                                 # NaN, infinity
        text = json.dumps(json_clean(value), default=json_default, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", _ESCAPE)


_Base: Any = iostream.OutStream                        # its methods are not typed


class Stream(_Base):                                                   # type: ignore[misc]
    """stdout or stderr. `flow` is set on the class before the engine makes its streams."""

    flow: Flow

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._pending = 0                              # characters since the last message
        self._paced = 0                                # of these, how many were there at the last look at the flow
        self._asked = False
        self._short: deque[str] = deque()              # not yet in ipykernel's buffer: the main thread's short texts
        self._short_parent: Any = None
        self._main = threading.main_thread().ident
        self._logged = 0
        self._reading = threading.Lock()
        super().__init__(*arguments, **options)

    def write(self, string: str) -> int:
        if type(string) is str and len(string) < _SHORT and self._takes_short():
            self._short.append(string)
            self._pending += len(string)
            if not self._flush_pending:
                self._schedule_flush()
            if self._pending - self._paced >= _GRAIN:
                self._pace()
            return len(string)
        self._hand_over()
        if self._pending - self._paced >= _GRAIN:      # not at each of many short lines: it costs as much as they do
            self._pace()
        length: int = super().write(string)
        self._pending += len(string)
        return length

    def _takes_short(self) -> bool:
        """Whether a text may go the short way, past ipykernel's locks: a loop of prints is twice as fast."""
        if threading.get_ident() != self._main or os.getpid() != self._master_pid or self.echo is not None:
            return False
        parent = self.parent_header
        if self._short and parent is not self._short_parent:
            return False
        self._short_parent = parent
        return self.pub_thread is not None

    def _hand_over(self) -> None:
        """Short texts into ipykernel's buffer, before what comes after them."""
        with self._buffer_lock:
            if os.getpid() != self._master_pid:
                self._short.clear()                    # a fork has a copy of what its parent will send
            elif self._short:
                texts = [self._short.popleft() for _ in range(len(self._short))]
                self._buffers[frozenset(self._short_parent.items())].write("".join(texts))

    def _pace(self) -> None:
        self._paced = self._pending
        if self._is_master_process() and threading.current_thread() is not self.pub_thread.thread:
            if self._pending >= _MESSAGE and not self._asked:
                self._asked = True
                self.pub_thread.schedule(self._flush)
            self.flow.wait(self._unsent)

    def _unsent(self) -> int:
        return self._pending

    def _rotate_buffers(self) -> Any:
        self._hand_over()
        self._pending, self._paced, self._asked = 0, 0, False
        return super()._rotate_buffers()

    def _watch_pipe_fd(self) -> None:
        """What native code and child processes write to the descriptor, in a thread of its own.

        The rank's log keeps the end of it: the last words of a process that aborts.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        poller = select.poll()
        poller.register(self._fid, select.POLLIN)
        while self._should_watch:
            if not poller.poll(_WAKE_MS):
                continue
            with self._reading:
                data = os.read(self._fid, _CHUNK_BYTES)
                if not data:
                    return
                self._log(data)
                self.write(decoder.decode(data))

    def _log(self, data: bytes) -> None:
        if self._logged + len(data) > _LOG_BYTES:
            os.ftruncate(self._original_stdstream_copy, 0)
            self._logged = 0
        self._logged += os.write(self._original_stdstream_copy, data)

    def close(self) -> None:
        """A rank has no other output: `sys.stdout.close()` in a cell only flushes."""
        self.flush()

    def drain(self) -> None:
        """Wait until what was written to the descriptor has been read (a child may go on writing: not for long)."""
        end = time.monotonic() + _DRAIN_S
        while self._should_watch and time.monotonic() < end:
            if self._reading.acquire(timeout=0.05):
                self._reading.release()
                if not _waiting(self._fid):
                    return
                time.sleep(0.001)


def _waiting(descriptor: int) -> int:
    """Bytes that can be read from a pipe now."""
    count: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
    return count


class Streams:
    """The two of this rank: drained at the end of a cell, put back where a cell has left something unusable."""

    def __init__(self) -> None:
        self._own = {name: getattr(sys, name) for name in ("stdout", "stderr")}
        self._before = dict(self._own)

    def put_back(self) -> None:
        """Ours again, whatever stands there."""
        for name, own in self._own.items():
            setattr(sys, name, own)

    def begin_cell(self) -> None:
        self._before = {name: getattr(sys, name) for name in self._own}

    def end_cell(self, interrupted: bool) -> list[str]:
        """Returns a sentence for each that was put back.

        `interrupted`: it may have landed in the exit of a `redirect_stdout`; then they are what they were before.
        """
        notes = []
        for name, own in self._own.items():
            if interrupted:
                setattr(sys, name, self._before[name])
            now = getattr(sys, name, None)
            if now is not own and not _usable(now):
                setattr(sys, name, own)
                notes.append(f"sys.{name} was {type(now).__name__}, to which nothing can be written, when the cell "
                             f"ended; it is the notebook's again")
            if isinstance(own, Stream):
                own.drain()
                if now is not own:                     # what the user's own stream passes on belongs to this cell
                    own.flush()
        return notes


def _usable(file: Any) -> bool:
    """Whether this can stand for a stream: it takes text and can be flushed."""
    try:
        file.flush()
    except Exception:
        return False
    return callable(getattr(file, "write", None)) and not getattr(file, "closed", False)
