"""Completion on a rank: from the values that are there, in milliseconds.

Jedi, IPython's usual way, infers types from the sources of the libraries: seconds of the main thread for each module
that it has not read yet, while the user types and the next cell waits. The ranks have the values themselves.
"""
from __future__ import annotations

from typing import Any


def install(shell: Any) -> None:
    """Let IPython's completer look at values alone."""
    shell.Completer.use_jedi = False
