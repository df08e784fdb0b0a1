"""The user's hooks on parameters run on the copies too, as functions of their own with copies of what they keep.

So a hook that is right leaves both programs equal, one that acts by rank is found, and neither program nor the user's
own sees what a hook has kept in the other (a running mean of gradients, a count).
"""

from __future__ import annotations

import copy
import dis
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from colossal_nb.parallel import parameter_hooks
from colossal_nb.parallel.handle import Parallel, find
from colossal_nb.parallel.reachable import is_of_user
from colossal_nb.parallel.verify.twins import Twin
from colossal_nb.parallel.work import Released

Key = tuple[str, str, int]  # the parameter, on what of it the hook is, its number there
Failures = dict[Key, str]
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


@dataclass
class Scope:
    """Copies of what hooks reach, made once each, so that hooks share what they shared. `memo`: what is known to
    stand for what, by id."""

    memo: dict[int, Any]
    names: dict[int, dict[str, Any]] = field(default_factory=dict)

    def value(self, value: Any) -> Any:
        """The copy of a value; the value itself where it is no state, or cannot be copied."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value) if is_of_user(value) else value
        if isinstance(value, types.ModuleType | type | types.BuiltinFunctionType) or find(value) is not None:
            return value
        try:
            return copy.deepcopy(value, self.memo)
        except Exception:
            return value

    def _function(self, own: types.FunctionType) -> types.FunctionType:
        names = self.names.setdefault(id(own.__globals__), dict(own.__globals__))
        cells = [self.memo.setdefault(id(cell), types.CellType()) for cell in own.__closure__ or ()]
        twin = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, tuple(cells))
        self.memo[id(own)] = twin
        for cell, before in zip(cells, own.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self.value(before.cell_contents)
            except ValueError:  # not filled yet
                continue
        twin.__defaults__ = None if own.__defaults__ is None else tuple(map(self.value, own.__defaults__))
        twin.__kwdefaults__ = {key: self.value(each) for key, each in (own.__kwdefaults__ or {}).items()}
        for name in _globals_in(own.__code__):
            if name in own.__globals__ and names.get(name) is own.__globals__[name]:
                names[name] = self.value(own.__globals__[name])
        return twin


def attach(parallel: Parallel, twin: Twin, failures: Failures) -> None:
    """Give the copies copies of the hooks, but those that have failed; one that fails does nothing from then on."""
    hooked = {id(each.p): each for each in parameter_hooks.of_users(parallel.parameters.values())}
    if not hooked:
        return
    scope = Scope(_known(parallel, twin))
    for name, p in parallel.parameters.items():
        own, other = hooked.get(id(p)), twin.parallel.parameters[name]
        if own is None or not other.requires_grad:
            continue
        for kind, hooks, register in (
            ("gradient", own.on_gradient, other.register_hook),
            ("accumulated", own.on_accumulated, other.register_post_accumulate_grad_hook),
        ):
            for number, hook in enumerate(parameter_hooks.of_user(hooks)):
                key = name, kind, number
                if key not in failures:  # torch's functions that register hooks have no types
                    register(_guarded(scope.value(hook), key, failures))  # type: ignore[no-untyped-call]


def note(failures: Iterable[Failures]) -> list[str]:
    """What the verdict says of hooks that could not run."""
    found = {key: why for each in failures for key, why in each.items()}
    if not found:
        return []
    names = list(dict.fromkeys(name for name, _, _ in found))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [
        f"left out are hooks on {', '.join(names[:3])}{more}, which cannot run on copies ({next(iter(found.values()))})"
    ]


def _known(parallel: Parallel, twin: Twin) -> dict[int, Any]:
    """What stands for what of the user's in a program."""
    pairs: list[tuple[Any, Any]] = [(p, twin.parallel.parameters[name]) for name, p in parallel.parameters.items()]
    pairs += zip(parallel.optimizers, twin.optimizers, strict=False)
    modules, buffers = dict(twin.model.named_modules()), dict(twin.model.named_buffers())
    pairs += [(module, modules[name]) for name, module in parallel.model.named_modules() if name in modules]
    pairs += [(buffer, buffers[name]) for name, buffer in parallel.model.named_buffers() if name in buffers]
    return {id(own): other for own, other in pairs}


def _guarded(hook: Callable[[Any], Any], key: Key, failures: Failures) -> Callable[[Any], Any]:
    def called(value: Any) -> Any:
        if key in failures:
            return None
        try:
            found = hook(value)
            return found if key[1] == "gradient" else None  # torch wants none of the others
        except Released:
            raise
        except Exception as error:
            failures[key] = f"{type(error).__name__}: {error}"
            return None

    return called


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Of a function, and of those that are made inside."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _GLOBALS)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_in(inner)
