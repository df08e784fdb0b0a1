"""What passes change on modules and parameters, noted while they do it, so that it can be taken back.

Notes are by name: they hold for a copy of the model too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

_TREE = ("_parameters", "_buffers", "_modules")  # passes put parts under the same objects
_ABSENT = object()


@dataclass
class Changes:
    """By module name: the class before and after; by (module, attribute): the value before and after, or the keys of
    hooks that were added. By parameter name: keys of hooks that were added."""

    classes: dict[str, tuple[type[nn.Module], type[nn.Module]]] = field(default_factory=dict)
    attributes: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    hooks: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    on_parameters: dict[str, set[int]] = field(default_factory=dict)

    def undo(self, model: nn.Module) -> None:
        """Take it all back, but for what somebody has changed again since."""
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        for name, (before, after) in self.classes.items():
            if type(modules[name]) is after:
                modules[name].__class__ = before
        for (name, attribute), (old, new) in self.attributes.items():
            own = modules[name].__dict__
            if old is _ABSENT:
                own.pop(attribute, None)
            elif own.get(attribute) is new or (isinstance(new, int) and own.get(attribute) == new):
                own[attribute] = old
        for (name, attribute), keys in self.hooks.items():
            for key in keys:
                modules[name].__dict__[attribute].pop(key, None)
        for name, keys in self.on_parameters.items():
            for key in keys:
                (parameters[name]._backward_hooks or {}).pop(key, None)


    def moved(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> Changes:
        """For a copy of the model: `copy.deepcopy` copies no hook on a parameter, so they are put there."""
        hooks = {}
        for name, keys in self.on_parameters.items():
            held = before[name]._backward_hooks or {}
            hooks[name] = {after[name].register_hook(held[key]).id for key in sorted(keys) if key in held}  # type: ignore[no-untyped-call]
        return replace(self, on_parameters=hooks)


@contextmanager
def noted(model: nn.Module) -> Iterator[Changes]:
    """Inside passes run; afterwards, also after an error, the notes say what they have changed."""
    changes = Changes()
    modules = {name: (type(module), _attributes(module), _hooks(module)) for name, module in model.named_modules()}
    parameters = {name: set(p._backward_hooks or {}) for name, p in model.named_parameters()}
    try:
        yield changes
    finally:
        for name, module in model.named_modules():
            kind, attributes, hooks = modules[name]
            if type(module) is not kind:
                changes.classes[name] = kind, type(module)
            for key, value in _attributes(module).items():
                if attributes.get(key, _ABSENT) is not value:
                    changes.attributes[name, key] = attributes.get(key, _ABSENT), value
            for key, keys in _hooks(module).items():
                if keys - hooks.get(key, set()):
                    changes.hooks[name, key] = keys - hooks.get(key, set())
        for name, p in model.named_parameters():
            added = set(p._backward_hooks or {}) - parameters[name]
            if added:
                changes.on_parameters[name] = added


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _TREE and not _holds_hooks(key, value)}


def _hooks(module: nn.Module) -> dict[str, set[int]]:
    return {key: set(value) for key, value in module.__dict__.items() if _holds_hooks(key, value)}


def _holds_hooks(key: str, value: Any) -> bool:
    return "_hooks" in key and isinstance(value, dict)
