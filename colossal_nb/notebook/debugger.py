"""%debug and `%pdb on` after an error of the ranks: there are no frames here to look into, and it is said so."""
from __future__ import annotations

import sys
from typing import Any

from colossal_nb.notebook.errors import CellError, fail

HINT = ("the last error comes from %%colossal: its frames are on the ranks, where nobody can type. The traceback of "
        "each rank is in cnb.last_run.errors; print() shows more, and %colossal pull x brings a variable here.")


def install(shell: Any) -> None:
    """Keep the shell's debugger out of the errors that our magics raise. `replaces` of what is put there undoes it."""
    usual = shell.debugger

    def debugger(force: bool = False) -> None:
        if not isinstance(getattr(sys, "last_value", None), CellError):
            usual(force)
        elif sys.exc_info()[0] is not None:            # `%pdb on`, while the error itself is shown
            print(f"no debugger: {HINT}", file=sys.stderr)
        elif force or shell.call_pdb:
            fail("UsageError", f"%debug is not possible: {HINT}")
    debugger.replaces = usual  # type: ignore[attr-defined]
    shell.debugger = debugger
