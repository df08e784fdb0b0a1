"""Files that several ranks wrote in one cell: said afterwards, with the way to write them once."""
from __future__ import annotations

from collections import defaultdict
from os.path import basename

from colossal_nb.notebook.fold import named
from colossal_nb.run import Run

MOST_NAMED = 3


def written_together(run: Run) -> str:
    """One sentence on the files that more than one rank wrote; empty if there are none."""
    states = run.record.states
    ranks: dict[str, set[int]] = defaultdict(set)
    for row in states[states["state"] == "writes"]:
        ranks[str(row["reason"])].add(int(row["rank"]))
    shared = {path: found for path, found in ranks.items() if len(found) > 1}
    if not shared:
        return ""
    names = ", ".join(basename(path) for path in list(shared)[:MOST_NAMED])
    more = f" and {len(shared) - MOST_NAMED} more" if len(shared) > MOST_NAMED else ""
    who = named(sorted(set.union(*shared.values())))
    return (f"{who} wrote the same file{'s' * (len(shared) > 1)} {names}{more}: write it on one rank, in a function "
            "under @cnb.once or in a block `with cnb.once() as mine:` where `if mine:`")
