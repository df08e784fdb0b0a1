"""A name that is not defined on some ranks alone: what became of it."""
from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from colossal_nb.run import RankError, Run
from colossal_nb.session.copying import Newcomer
from colossal_nb.session.looking import named

_NO_NAME = re.compile(r"name '(\w+)' is not defined")


def explain(run: Run, newcomers: Mapping[int, Newcomer], engines: int) -> None:
    """Add to the errors of ranks that began later why they lack the name that others have."""
    alike: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for rank, error in sorted(run.errors.items()):
        match, newcomer = _NO_NAME.fullmatch(error.evalue), newcomers.get(rank)
        if match is None or newcomer is None or error.ename != "NameError":
            continue
        reason = newcomer.reason(match[1])
        if reason is not None and sum(each.evalue == error.evalue for each in run.errors.values()) < engines:
            alike[match[1], reason, newcomer.replaced].append(rank)
    for (name, reason, replaced), ranks in alike.items():
        came = f"{'were' if ranks[1:] else 'was'} {'replaced' if replaced else 'started later'}"
        why = f" ({name} {reason})" if reason else ""
        said = f"{name} is not on {named(ranks)}, which {came}{why}: run the cell that makes {name} again"
        if not replaced and "parallel" in reason:
            said += ", or begin this cell with the strategy of that one, which may do without them"
        run.errors.update({rank: _saying(run.errors[rank], said) for rank in ranks})


def unexplained(run: Run) -> dict[str, list[int]]:
    """Names that are not defined on some ranks of a cell alone, nobody having said why -> these ranks."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank, error in sorted(run.errors.items()):
        match = _NO_NAME.fullmatch(error.evalue)
        if match is not None and error.ename == "NameError":
            found[match[1]].append(rank)
    return {name: ranks for name, ranks in found.items() if len(ranks) < len(run.ranks)}


def where(run: Run, wanted: Mapping[str, list[int]], names: Mapping[int, Mapping[str, str]]) -> None:
    """Add to these errors which ranks have the name. `names`: what each rank has."""
    for name, lacking in wanted.items():
        having = [rank for rank, found in sorted(names.items()) if name in found]
        if not having or set(having) & set(lacking):
            continue
        said = (
            f"{name} is on {named(having)} alone, as after a cell that ran there alone (a strategy of fewer ranks, the "
            "last one of a comparison, --ranks); begin this cell with that strategy, or run that cell on all ranks"
        )
        run.errors.update({rank: _saying(run.errors[rank], said) for rank in lacking})


def _saying(error: RankError, said: str) -> RankError:
    """The error with more to say, in its traceback too."""
    text = f"{error.evalue}: {said}"
    traceback = [each.replace(error.evalue, text) for each in error.traceback[-1:]]
    return replace(error, evalue=text, traceback=[*error.traceback[:-1], *traceback])
