"""Full backward hooks on units: they run where the unit runs, around what it makes, and on no other stage.

Torch puts them around a module's call, from where a value that was sent has left already: its gradient would come back
behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import BackwardHook


@dataclass(frozen=True)
class Hooks:
    """Of one module, as they were when the forward began."""

    module: nn.Module
    full: list[Callable[..., Any]]
    before: list[Callable[..., Any]]

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward whose graph calls them."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            both = BackwardHook(self.module, self.full, self.before)
            output = forward(*both.setup_input_hook(args), **kwargs)  # type: ignore[no-untyped-call]
            return both.setup_output_hook(output)  # type: ignore[no-untyped-call]

        return hooked


@contextmanager
def aside(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Hooks]]:
    """Inside, these modules have none; what they had is given."""
    before = [(module, module._backward_hooks, module._backward_pre_hooks) for module in modules if _has(module)]
    taken = {module: Hooks(module, list(full.values()), list(pre.values())) for module, full, pre in before}
    try:
        for module, _, _ in before:
            module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()
        yield taken
    finally:
        for module, full, pre in before:
            module._backward_hooks, module._backward_pre_hooks = full, pre


def refuse_around(model: nn.Module, called: Collection[str], units: Collection[str]) -> None:
    """Raise ValueError, alike on all stages, for a hook on a module around units, whose ends no stage sees both."""
    for name, module in model.named_modules():
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        if name in called and name and name not in units and inside and _has(module):
            raise ValueError(
                f"a full backward hook is on {name}, whose parts are dealt to the stages of a pipeline, so that none "
                f"sees all of it: put hooks on its parts ({inside[0]}, ...), or train without pp"
            )


def _has(module: nn.Module) -> bool:
    full = bool(module._backward_hooks) and module._is_full_backward_hook is True
    return full or bool(module._backward_pre_hooks)
