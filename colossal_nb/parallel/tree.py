"""Does the model's module tree still hold the parameters that `parallelize` distributed?

One that is put in later is in nobody's books: under dp its gradient would be that of one part of the batch, under tp
and pp a rank would hold all of it, and nothing would look wrong.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from colossal_nb.parallel.handle import Parallel

_LENDERS = ("torch.nn.utils.stateless", "torch._functorch.functional_call")


def is_known(parallel: Parallel) -> bool:
    """Whether the tree holds the same parameters as ever, in whatever places: their identities, no values."""
    known = set(map(id, parallel.parameters.values()))
    return _held(parallel.model) == known or set(map(id, parallel.model.parameters())) == known


def _held(model: nn.Module) -> set[int]:
    """What `model.parameters()` finds where no class has one of its own, in a tenth of the time: every step asks."""
    seen = {id(model)}
    found: set[int] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        found.update([id(p) for p in module._parameters.values() if p is not None])
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return found


def require_known(parallel: Parallel) -> None:
    """Raise ValueError where a parameter was replaced, added or removed; but for the call for which `functional_call`
    lends the model others."""
    if not is_known(parallel) and not _lent():
        raise ValueError(f"{_change(parallel)}: {_advice(parallel)}")


def is_cut(parallel: Parallel) -> bool:
    """Whether ranks hold parts of the model, so that a second `parallelize` finds no whole one."""
    return parallel.mesh.size > parallel.replicas and not parallel.pending


def _lent() -> bool:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in _LENDERS:
            return True
    return False


def _change(parallel: Parallel) -> str:
    now, known = dict(parallel.model.named_parameters()), parallel.parameters
    mine, theirs = {id(p) for p in now.values()}, {id(p) for p in known.values()}
    fresh = [name for name, p in now.items() if id(p) not in theirs]
    gone = [name for name, p in known.items() if id(p) not in mine]
    if replaced := [name for name in fresh if name in gone]:
        return f"{_names(replaced)} replaced after parallelize, which knows another parameter of that name"
    if fresh:
        return f"{_names(fresh)} added after parallelize, which does not know it"
    return f"{_names(gone)} removed after parallelize, which still knows it"


def _names(names: list[str]) -> str:
    first, *rest = names
    return f"{first} was" if not rest else f"{first} (and {len(rest)} more) was"


def _advice(parallel: Parallel) -> str:
    from colossal_nb.parallel.handle import text

    if is_cut(parallel):
        again = f"; the model is cut ({text(parallel.strategy)}), so parallelize cannot take it up now"
    else:
        again = ", or call it again with a new optimizer: model, optimizer = cnb.parallelize(model, optimizer)"
    return (
        "write new values into the parameter that is there (with torch.no_grad(): p.copy_(new), or load_state_dict "
        f"without assign=True), or build the model as it is to be before parallelize{again}"
    )
