"""Trained tensors that are no parameters of the model: a temperature, the weights of several losses, a projection.

Known are those in the optimizers that `parallelize` was given and those that the loss function can reach. Their
gradients come to all ranks as those of the whole batch, so that any optimizer moves them alike everywhere: a replica
has its part, of a pipeline the last stage alone, and the ranks of a tp group all have the same. Others that the graph
of a loss leads to are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from colossal_nb.parallel import gradients, objects, outputs
from colossal_nb.parallel.agree import differing
from colossal_nb.parallel.batch import checksum, ranks_text
from colossal_nb.parallel.graph import Node, leaves_below, nodes_of
from colossal_nb.parallel.handle import Parallel, holds
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.reachable import trained_tensors
from colossal_nb.parallel.structure import leaves


def of_optimizers(parallel: Parallel) -> list[Tensor]:
    """Those that the model's optimizers hold, in their order."""
    own = {id(p) for p in parallel.parameters.values()}
    held = (p for each in parallel.optimizers for group in each.param_groups for p in group["params"])
    return list({id(p): p for p in held if id(p) not in own}.values())


def known(parallel: Parallel, loss_fn: Any) -> dict[str, Tensor]:
    """All that can be told apart on every rank, by what messages call them."""
    own = {id(p) for p in parallel.parameters.values()}
    found = {id(p): (name, p) for name, p in trained_tensors(loss_fn).items() if id(p) not in own}
    for number, p in enumerate(of_optimizers(parallel)):
        found.setdefault(id(p), (f"tensor {number} in the optimizer that is outside the model", p))
    return {name: p for name, p in found.values() if _is_whole(p, parallel.rank) or _is_cut_alike(p, parallel)}


def _is_whole(p: Tensor, rank: int) -> bool:
    """Also a parameter of another parallel model, where no axis cuts it."""
    layout = layout_of(p)
    return layout is None or (holds(p, rank) and layout.local_shape(rank) == layout.global_shape)


def _is_cut_alike(p: Tensor, parallel: Parallel) -> bool:
    """A parameter of another parallel model, whose ranks along tp all take part in this one's loss."""
    layout = layout_of(p)
    return layout is not None and layout.mesh == parallel.mesh and parallel.pipeline is None


@dataclass(eq=False)
class Outside:
    """Those of one forward_backward. `tensors`: the known ones, among them `given`: leaves in the batch itself that
    want a gradient. `parts`: into how many a batch is cut.

    `strays`: leaves that the loss leads to and nobody knows; `inside`: those that the model's own forward uses.
    `deep`: whether the graph of the model is looked at, too.
    """

    parallel: Parallel
    tensors: dict[str, Tensor]
    given: list[Tensor]
    parts: int
    deep: bool
    strays: dict[int, Tensor] = field(default_factory=dict)
    inside: dict[int, Tensor] = field(default_factory=dict)
    _before: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    @classmethod
    def of(cls, parallel: Parallel, loss_fn: Any, batch: Any) -> Outside:
        """None are looked for where one backward of one rank makes the whole gradient, as torch does."""
        parts = parallel.replicas * parallel.microbatches
        if parallel.mesh.size == 1 and parts == 1:
            return cls(parallel, {}, [], parts, deep=False)
        given = [each for each in leaves(batch) if each.requires_grad and each.is_leaf]
        tensors = known(parallel, loss_fn) | {f"tensor {number} of the batch": x for number, x in enumerate(given)}
        return cls(parallel, tensors, given, parts, _kind(parallel, loss_fn) not in parallel.explored)

    def __enter__(self) -> None:
        """Inside are the backwards; an error leaves strays without a gradient of it."""

    def __exit__(self, *_: object) -> None:
        for leaf, grad in self._before:
            leaf.grad = grad

    def look(self, loss: Tensor, output: Any) -> None:
        """At the graph of one part's loss, and in the first steps at that of the model below its output."""
        if not self._is_needed:
            return
        made = leaves(output)
        borders = nodes_of([*made, *(each.local for each in made if hasattr(each, "local"))])
        self._note(leaves_below(nodes_of([loss]), set(borders)), of_model=False)
        if self.deep:
            self._note(leaves_below(borders), of_model=True)

    def look_below(self, nodes: Iterable[Node]) -> None:
        """At the graph of a stage that makes no loss."""
        if self.deep:
            self._note(leaves_below(nodes), of_model=True)

    @property
    def _is_needed(self) -> bool:
        return self.parallel.mesh.size > 1 or self.parts > 1

    def _note(self, found: dict[int, Tensor], of_model: bool) -> None:
        others = {key: leaf for key, leaf in found.items() if key not in self._own and leaf.numel()}
        if of_model and self.parallel.mesh.size > self.parallel.replicas:
            given = {id(x) for x in self.given}
            self.inside |= {key: leaf for key, leaf in others.items() if key not in given}
        if of_model or self.parts > 1 or self.parallel.pipeline is not None:
            known = {id(p) for p in self.tensors.values()}
            for key in others.keys() - known - self.strays.keys():
                leaf = self.strays[key] = others[key]
                self._before.append((leaf, leaf.grad))
                leaf.grad = None

    @cached_property
    def _own(self) -> set[int]:
        return {id(p) for p in self.parallel.parameters.values()}

    def flags(self) -> list[float]:
        """What the ranks add up: who found strays, tensors inside the model; which known ones have a gradient."""
        active = [float(p.grad is not None) for p in self.tensors.values()]
        unseen = 0.0 if self.parallel.is_last else sum(active)  # only the last stage computes the loss
        return [float(len(self.strays)), len(self.inside) + unseen, *active]

    def settle(self, loss_fn: Any, sums: list[float]) -> list[Tensor]:
        """Those that have a gradient on some rank. Raises ValueError on all ranks alike where one cannot be trained.

        Collective.
        """
        strays, inside, *active = sums
        if inside:
            self._refuse(list(self.inside.values()), _INSIDE)
        if strays:
            self._refuse(list(self.strays.values()), _STRAY)
        self.parallel.explored.add(_kind(self.parallel, loss_fn))
        used = {name: p for (name, p), count in zip(self.tensors.items(), active, strict=True) if count}
        met = {id(p) for p in (*self.parallel.outside, *self.given)}
        fresh = {name: p for name, p in used.items() if id(p) not in met}
        if fresh:
            self._require_steps(fresh)
            self._require_equal(fresh)
            self.parallel.outside += fresh.values()
        return list(used.values())

    def _refuse(self, found: list[Tensor], words: str) -> None:
        name_of = {id(p): name for name, p in self.tensors.items()}
        said = [f"{name_of.get(id(p), 'a tensor')} {list(p.shape)}" for p in found]
        said += [name for name, p in self.tensors.items() if p.grad is not None and not self.parallel.is_last]
        told = objects.all_gather(said, self.parallel.group(), "outside")
        every = list(dict.fromkeys(name for each in told for name in each))
        raise ValueError(words.format(what=", ".join(every[:3]), parts=self.parts))

    def _require_steps(self, fresh: dict[str, Tensor]) -> None:
        """fp16 skips steps, which it can only where it knows the optimizer."""
        if self.parallel.precision.scale is None:
            return
        held = {id(p) for p in of_optimizers(self.parallel)}
        lost = [name for name, p in fresh.items() if id(p) not in held]
        if lost:
            raise ValueError(
                f"precision=fp16 skips a step whose gradients are not finite, and {', '.join(lost[:3])}, which the "
                "loss trains, is in no optimizer that parallelize knows: give it all of them, "
                "cnb.parallelize(model, [optimizer, own])"
            )

    def _require_equal(self, fresh: dict[str, Tensor]) -> None:
        whole = [p for p in fresh.values() if _is_whole(p, self.parallel.rank)]
        odd = differing(checksum(whole), self.parallel.group(), "outside")
        if odd:
            raise ValueError(
                f"the loss trains {', '.join(list(fresh)[:3])}, whose values on {ranks_text(odd)} differ from the "
                "others': make it on every rank from one seed (torch.manual_seed(0) before it)"
            )


def finish(parallel: Parallel, used: list[Tensor], count: float) -> None:
    """Bring the sum of the gradients of those who made a part to all ranks, divided by `count`. Collective."""
    place = parallel.place
    counts = parallel.is_last and place["tp"] == place["sp"] == 0
    whole = [p for p in used if _is_whole(p, parallel.rank)]
    cut = [p for p in used if not _is_whole(p, parallel.rank)]  # each rank its own part: dp alone adds them up
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for p in () if counts else whole:
        p.grad = torch.zeros_like(p)
    for tensors, group in ((whole, parallel.group()), (cut, parallel.group("dp"))):
        if group.size > 1 and tensors:
            gradients.sum_over(tensors, group, of="gradients outside the model")
    for p in used:
        if p.grad is not None and count not in (0, 1):
            p.grad.div_(count)


def beside(p: Tensor, value: Tensor) -> Tensor:
    """A value of a state where its parameter is; counts (0-dim) stay on the host."""
    return value.to(p.device) if value.dim() else value


@contextmanager
def lent(tensors: Iterable[Tensor], device: str | None = None) -> Iterator[None]:
    """Inside, the tensors are copies of themselves (on a device) without a gradient; afterwards what they were."""
    before = [(p, p.data, p.grad) for p in tensors]
    for p, data, _ in before:
        p.data, p.grad = data.to(device or data.device, copy=True), None
    try:
        yield
    finally:
        for p, data, grad in before:
            p.data, p.grad = data, grad


def _kind(parallel: Parallel, loss_fn: Any) -> Any:
    return (None if loss_fn is None else outputs.kind(loss_fn)), parallel.model.training


def inside_model(parallel: Parallel, output: Any, given: Any) -> list[Tensor]:
    """What a backward from an output of the model also reaches, beside the model's parameters and leaves of the input.

    Raises ValueError where tp cannot train it.
    """
    own = {id(p) for p in (*parallel.parameters.values(), *leaves(given))}
    found = leaves_below(nodes_of(leaves(output)))
    others = [leaf for key, leaf in found.items() if key not in own]
    if others and parallel.mesh.axis_size("tp") > 1:
        raise ValueError(_INSIDE.format(what=", ".join(f"a tensor {list(each.shape)}" for each in others[:3])))
    return others


_STRAY = (
    "the loss trains {what}, which is no parameter of the model, in no optimizer that parallelize was given and not to "
    "be found from loss_fn, so its gradient would be that of one of {parts} parts of the batch: put it into an "
    "optimizer before parallelize (one may hold it beside the model's parameters), or make it a parameter of the model"
)
_INSIDE = (
    "{what} is trained inside the model's forward without being a parameter of the model, and tp and pp cannot know "
    "which ranks make its gradient: make it one before parallelize (model.name = torch.nn.Parameter(...)), or run "
    "under dp alone"
)
