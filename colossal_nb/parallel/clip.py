"""`torch.nn.utils.clip_grad_norm_`, unedited, on a parallel model's parameters: the norm of the whole gradient.

torch computes the norm of the gradients it finds on this rank in one inner function, however the user imported the
outer one. Ours stands in front of it and, for gradients of parallel parameters, adds up over the mesh what each rank
counts: a shard everywhere, a whole or copied parameter once, so too those of the loss that are trained with the model.
"""

from __future__ import annotations

import math
import weakref
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from colossal_nb.parallel import trouble
from colossal_nb.parallel.handle import Parallel, require_whole
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.plan import On, Replicate, Shard

_INNER, _PUBLIC = "_get_total_norm", "get_total_norm"


def install(parallel: Parallel) -> None:
    """From now on norms of this model's gradients are global."""
    norm = getattr(clip_grad, _INNER)
    if not isinstance(norm, TotalNorm):
        norm = TotalNorm(norm)
        setattr(clip_grad, _INNER, norm)
        setattr(nn.utils, _PUBLIC, norm)
    norm.models.append(weakref.ref(parallel))


class TotalNorm:
    """Stands for torch's inner function; gradients of no parallel model go to the one it replaced."""

    def __init__(self, local: Any) -> None:
        self.local = local
        self.models: list[weakref.ref[Parallel]] = []

    def __call__(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        parallel = self._owner(given)
        if parallel is None:
            result: Tensor = self.local(given, norm_type, error_if_nonfinite, foreach)
            return result
        trouble.look(parallel)
        if given and all(p.grad is None for p in (*parallel.parameters.values(), *parallel.outside)):
            given = []  # the look has dropped what some ranks had alone, and these are here with nothing
        return total_norm(parallel, given, float(norm_type), error_if_nonfinite)

    def _owner(self, given: list[Tensor]) -> Parallel | None:
        """The parallel model whose gradients these are. A rank whose stage has none of them follows the newest."""
        self.models = [model for model in self.models if model() is not None]
        alive = [found for model in self.models if (found := model()) is not None and found.mesh.size > 1]
        if not given:
            return alive[-1] if alive and alive[-1].pipeline is not None else None
        ids = {id(tensor) for tensor in given}
        for parallel in reversed(alive):
            trained = (*parallel.parameters.values(), *parallel.outside)
            if any(id(p.grad) in ids for p in trained if p.grad is not None):
                return parallel
        return None


def total_norm(parallel: Parallel, grads: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """The norm of the whole gradient behind these local ones, the same bits on every rank of the mesh."""
    require_whole(parallel)
    own = {id(p.grad): p for p in parallel.parameters.values() if p.grad is not None}
    counted = (_counted(grad, own.get(id(grad)), parallel) for grad in grads)
    powers = [_power(grad, norm_type) for grad in counted if grad is not None]
    largest = math.isinf(norm_type)
    total = torch.stack(powers).max() if largest and powers else sum(powers, torch.zeros((), dtype=torch.float64))
    row = total.cpu().reshape(1)
    parallel.group().run("all_reduce", [row], of="gradient norm", reduce="max" if largest else "sum")
    norm = row[0] if largest or norm_type == 0 else row[0] ** (1.0 / norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped (error_if_nonfinite=True)"
        )
    like = grads[0] if grads else next(iter(parallel.parameters.values()))
    return norm.to(dtype=like.dtype, device=like.device)


def _power(grad: Tensor, norm_type: float) -> Tensor:
    """What adds up over tensors: the sum of |g|^p in float64; for infinity the maximum, which does not add but wins."""
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).cpu()
    return norm if math.isinf(norm_type) or norm_type == 0 else torch.pow(norm, norm_type)


def _counted(grad: Tensor, p: Tensor | None, parallel: Parallel) -> Tensor | None:
    """What of a gradient this rank counts: every element of the whole one is counted on the first rank that has it."""
    place, layout = parallel.place, None if p is None else layout_of(p)
    for axis in parallel.mesh.axes:
        placement = Replicate() if layout is None else layout.placement(axis)
        counts_at = placement.coordinate if isinstance(placement, On) else 0
        if place[axis] != counts_at and isinstance(placement, Replicate | On):
            return None
        if isinstance(placement, Shard) and placement.parts is not None:
            fresh = _not_before(placement, place[axis])
            if fresh is not None:
                grad = grad.index_select(placement.dim, torch.tensor(fresh, dtype=torch.int64, device=grad.device))
    return grad if grad.numel() else None


@cache
def _not_before(shard: Shard, index: int) -> tuple[int, ...] | None:
    """The places in a rank's part that no earlier rank holds too (a key/value head may lie on several); None: all."""
    assert shard.parts is not None
    earlier = set().union(*shard.parts[:index])
    fresh = tuple(place for place, number in enumerate(shard.parts[index]) if number not in earlier)
    return None if len(fresh) == len(shard.parts[index]) else fresh
