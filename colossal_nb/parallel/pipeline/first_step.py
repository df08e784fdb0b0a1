"""The first real step against the proof: what was trained there must be trained here, or somebody must hear of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from colossal_nb.parallel.graph import leaves_below, nodes_of
from colossal_nb.parallel.structure import leaves


class FirstStep:
    """Watches one step for parameters that had a gradient in the proof and get none.

    Two reasons are good ones, and let pass: the loss does not use what the parameter makes (another head of the
    model), or its module was not called in this batch although it can be (an expert that no sample chose).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        expected: frozenset[str],
        called: frozenset[str],
    ) -> None:
        """parameters: the model's, in whose place forwards may see copies; expected: those with a gradient on this
        stage; called: the modules that the record saw called."""
        self.model, self.parameters, self.expected, self.known_calls = model, parameters, expected, called
        self.called: set[nn.Module] = set()
        self.read: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, notes which modules are called."""
        handle = register_module_forward_pre_hook(lambda module, _: self.called.add(module))
        try:
            yield
        finally:
            handle.remove()

    def seeing(self, loss_of: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_of`, which first notes the parameters that the output was made from."""

        def seen(output: Any, number: int) -> Any:
            made = leaves(output)
            self.read |= {*map(id, made), *leaves_below(nodes_of(made))}
            return loss_of(output, number)

        return seen

    def check(self) -> None:
        """Raises RuntimeError naming the parameters that have no gradient for no good reason."""
        lost = [
            name
            for name, parameter in self.parameters.items()
            if name in self.expected
            and parameter.requires_grad
            and parameter.grad is None
            and id(parameter) not in self.read
            and self._caller(name) in self.called
        ]
        if lost:
            raise RuntimeError(
                f"{', '.join(lost[:4])}{f' and {len(lost) - 4} more' if len(lost) > 4 else ''} got no gradient in the "
                f"first step, although the whole model trains {'it' if len(lost) == 1 else 'them'}: the forward reads "
                f"something else in its place. Likely a module keeps a copy of the weight, or a Parameter was replaced "
                f"after parallelize: keep the Parameter itself. If this batch just did not need it, run the step "
                f"again: only the first step is compared"
            )

    def _caller(self, name: str) -> nn.Module:
        """The nearest module around a parameter that forwards do call; lists of parameters are never called."""
        path = name.rpartition(".")[0]
        while path and path not in self.known_calls:
            path = path.rpartition(".")[0]
        return self.model.get_submodule(path)
