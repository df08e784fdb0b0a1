"""A name that a cell of the kernel lacks and the ranks have: one line under the error says how to get it."""
from __future__ import annotations

from contextlib import suppress
from typing import Any

from colossal_nb.cluster.client import ClusterLost, RankFailed
from colossal_nb.notebook.magics import Notebook, describe_ranks
from colossal_nb.notebook.page import say

LIMIT_S = 2.0


class Elsewhere:
    """IPython calls it after each cell. Errors of `%%colossal` cells have types of their own and do not count."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook

    def __call__(self, result: Any) -> None:
        error = getattr(result, "error_in_exec", None)  # there is no result where a press ended the cell at its start
        if type(error) is not NameError or not error.name:
            return
        with suppress(RankFailed, ClusterLost, TimeoutError):  # the error stands without the hint
            found = self._notebook.ranks_names(LIMIT_S)
            ranks = sorted(rank for rank, variables in found.items() if error.name in variables)
            if ranks:
                which = f" --rank {ranks[0]}" if ranks[0] else ""
                say(self._notebook.page, f"{error.name} lives on {describe_ranks(ranks, len(found))}, not in the "
                                         f"kernel: %colossal pull {error.name}{which}")
