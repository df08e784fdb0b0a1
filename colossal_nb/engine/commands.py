"""`!command` on a rank: its output comes as it is written, but nobody can type into it.

IPython runs commands on a pseudo-terminal of their own, where one that asks something waits for ever. Here the input
is empty and there is no controlling terminal to ask by, so it ends; its output still goes to a terminal.
"""
from __future__ import annotations

import codecs
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

import ipykernel.zmqshell as zmqshell
import psutil  # type: ignore[import-untyped]

_ROWS, _COLUMNS = 24, 80
_PERIOD_S = 0.1
_PATIENCE_S = 0.5


def install() -> None:
    """Let the shell run its commands by `run`."""
    module: Any = zmqshell
    module.system = run


def run(command: str) -> int:
    """Run a shell command and print what it writes; its exit code, or minus the signal that ended it.

    It belongs to this process's group, so it ends with the rank. An interrupt goes to all that it has started.
    """
    shell = shutil.which(os.environ.get("SHELL", "sh")) or "/bin/sh"
    screen, end = _terminal()
    try:
        child = subprocess.Popen([shell, "-c", command], stdin=subprocess.DEVNULL, stdout=end, stderr=end)
        os.close(end)
        try:
            _print(screen, child)
        except KeyboardInterrupt:
            _interrupt(child)
            raise
    finally:
        os.close(screen)
    code = child.wait()
    return 128 - code if code > 128 else code          # a shell says 128 + n where signal n ended the command


def _terminal() -> tuple[int, int]:
    """A pseudo-terminal: where its output is read, and the end for a command. Newlines stay single characters."""
    screen, end = os.openpty()
    modes = termios.tcgetattr(end)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(end, termios.TCSANOW, modes)
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    return screen, end


def _print(screen: int, child: subprocess.Popen[bytes]) -> None:
    """Until the command has ended (what it leaves in the background may go on) and all is read."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    ended = False
    while True:
        if select.select([screen], [], [], 0 if ended else _PERIOD_S)[0]:
            try:
                data = os.read(screen, 1 << 16)
            except OSError:                            # how Linux says that nobody can write any more
                data = b""
            sys.stdout.write(decoder.decode(data, final=not data))
            sys.stdout.flush()
            if not data:
                return
        elif ended:
            return
        else:
            ended = child.poll() is not None


def _interrupt(child: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C in a terminal; what does not end by it is killed."""
    try:
        started = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for number in (signal.SIGINT, signal.SIGKILL):
        for process in started:
            if process.is_running():
                process.send_signal(number)
        _, started = psutil.wait_procs(started, timeout=_PATIENCE_S)
