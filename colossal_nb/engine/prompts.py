"""What needs a person at a rank's keyboard is refused at once instead of waiting for ever."""
from __future__ import annotations

import builtins
import getpass
import sys
from typing import Any, NoReturn

from IPython.core.error import StdinNotImplementedError, UsageError

from colossal_nb.engine import commands, completer


def refuse(what: str) -> NoReturn:
    raise StdinNotImplementedError(
        f"{what} is not possible on a rank: nobody can type there. Ask in a cell without %%colossal and "
        "%colossal push the answer.")


def _input(prompt: object = "") -> NoReturn:
    refuse("input()")


def _password(prompt: str = "Password: ", stream: object = None, **keywords: object) -> NoReturn:
    refuse("getpass()")


def _breakpoint(*args: Any, **keywords: Any) -> NoReturn:
    refuse("breakpoint()")


def _debug(line: str, cell: str | None = None) -> NoReturn:
    raise UsageError("%debug is not possible on a rank: nobody can type there. The traceback of each rank is in "
                     "cnb.last_run.errors; print() shows more, and %colossal pull x brings a variable to the kernel.")


def _colossal(line: str, cell: str | None = None) -> NoReturn:
    raise UsageError("this cell already runs on a rank: %%colossal and %colossal belong in the kernel, in a cell of "
                     "their own.")


class _Exit:
    """What exit and quit are on a rank: a sentence, raised where it is called and shown where it is only named."""

    def __call__(self, *arguments: Any) -> NoReturn:
        raise UsageError(repr(self))

    def __repr__(self) -> str:
        return ("exit() would end this rank and its variables: %colossal stop, in a cell of its own, ends all ranks; "
                "an error leaves a cell early.")


def install(shell: Any) -> None:
    """Refuse input(), breakpoint(), pdb (which asks by input()), getpass, exit, the debugger's magics and our own.

    Shell commands get an empty input, and completion takes no time from the cells.
    """
    shell.user_ns["exit"] = shell.user_ns["quit"] = builtins.exit = builtins.quit = _Exit()  # type: ignore[assignment]
    builtins.input = _input
    getpass.getpass = _password
    commands.install()
    completer.install(shell)
    sys.breakpointhook = _breakpoint
    for name in ("debug", "pdb"):
        shell.register_magic_function(_debug, "line_cell", name)
    shell.register_magic_function(_colossal, "line_cell", "colossal")
