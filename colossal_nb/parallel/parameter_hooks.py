"""Hooks on parameters: the user's see the gradient of the whole batch, ours run while it is put together.

A backward makes the gradient of one part of the batch, not divided yet. A hook that clamps, or an optimizer that steps
as soon as a gradient is there, must not see that: the user's hooks are put aside, and called at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Hook = TypeVar("Hook", bound=Callable[..., Any])
Hooks = OrderedDict[int, Callable[..., Any]]
_MARK = "_colossal"


def ours(hook: Hook) -> Hook:
    """Mark a hook that belongs to how gradients are put together."""
    hook.__dict__[_MARK] = True
    return hook


def register_first(p: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """One of ours, before all hooks that are there. Torch walks the dict itself, not the order that it keeps."""
    p.register_hook(ours(hook))  # type: ignore[no-untyped-call]
    hooks: Hooks = p._backward_hooks  # type: ignore[assignment]
    items = sorted(hooks.items(), key=lambda item: not hasattr(item[1], _MARK))
    hooks.clear()
    hooks.update(items)


@dataclass(frozen=True)
class Aside:
    """The user's hooks of one parameter: on its gradient, and behind the addition to `.grad`."""

    p: Tensor
    on_gradient: Hooks | None
    on_accumulated: Hooks | None

    def take(self) -> None:
        if self.on_gradient:
            self.p._backward_hooks = _split(self.on_gradient, own=True)
        if self.on_accumulated:
            self.p._post_accumulate_grad_hooks = _split(self.on_accumulated, own=True)

    def put_back(self) -> None:
        if self.on_gradient:
            self.p._backward_hooks = self.on_gradient
        if self.on_accumulated:
            self.p._post_accumulate_grad_hooks = self.on_accumulated

    @property
    def changes(self) -> bool:
        """Whether any is on the gradient."""
        return bool(_split(self.on_gradient, own=False))

    def changed(self, gradient: Tensor) -> Tensor:
        """What those on the gradient make of it."""
        for hook in _split(self.on_gradient, own=False).values():
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient

    def accumulated(self) -> None:
        """Call those behind the addition."""
        for hook in _split(self.on_accumulated, own=False).values():
            hook(self.p)


def of_users(parameters: Iterable[Tensor]) -> list[Aside]:
    """The parameters that have hooks of the user."""
    found = (Aside(p, p._backward_hooks, p._post_accumulate_grad_hooks) for p in parameters)  # type: ignore[arg-type]
    return [each for each in found if _split(each.on_gradient, own=False) or _split(each.on_accumulated, own=False)]


def of_user(hooks: Hooks | None) -> list[Callable[..., Any]]:
    """Those of the user, in their order."""
    return list(_split(hooks, own=False).values())


@contextmanager
def aside(hooked: list[Aside]) -> Iterator[None]:
    """Inside, none of these hooks is called."""
    for each in hooked:
        each.take()
    try:
        yield
    finally:
        for each in hooked:
            each.put_back()


def _split(hooks: Hooks | None, *, own: bool) -> Hooks:
    return OrderedDict((key, hook) for key, hook in (hooks or {}).items() if hasattr(hook, _MARK) == own)
