"""The graph that autograd keeps of a value: which leaves a backward from it would reach."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from torch import Tensor

Node = Any


def nodes_of(tensors: Iterable[Tensor]) -> list[Node]:
    """Where tensors come from, without those that nothing is known of."""
    return [node for tensor in tensors if (node := tensor.grad_fn) is not None]


def leaves_below(nodes: Iterable[Node], stops: AbstractSet[Node] = frozenset()) -> dict[int, Tensor]:
    """The leaves that a backward from here reaches, by id; not looked for behind `stops`."""
    found: dict[int, Tensor] = {}
    waiting = [node for node in nodes if node not in stops]
    seen = {*waiting, *stops}
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
