"""Gradients between the backward and the optimizer: kept apart from older ones, summed over dp, divided once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from colossal_nb.parallel import memory, parameter_hooks, state
from colossal_nb.parallel.group import Group
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.world import World

BUCKET_BYTES = 25 * 2**20


@contextmanager
def kept_apart(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, `.grad` begins as None; afterwards what was there before is added. An error brings it back as it was.

    The user's hooks on parameters see what is in `.grad` at the end, and what it is after the addition.
    """
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    hooked = parameter_hooks.of_users(parameters)
    for p, _ in before:
        p.grad = None
    try:
        with parameter_hooks.aside(hooked):
            yield
        for each in hooked:
            if each.changes and each.p.grad is not None:
                each.p.grad = _changed(each, each.p.grad)
    except BaseException:
        for p in parameters:
            p.grad = None
        for p, old in before:
            p.grad = old
        raise
    fresh = {id(p) for p in parameters if p.grad is not None}
    for p, old in before:
        if p.grad is not None:
            old.add_(p.grad)
        p.grad = old
    for each in hooked:
        if id(each.p) in fresh:
            each.accumulated()


def _changed(hooks: parameter_hooks.Aside, gradient: Tensor) -> Tensor:
    """What the user's hooks make of a gradient, which they see as on one device: whole."""
    layout = layout_of(hooks.p)
    if layout is None or tuple(hooks.p.shape) == layout.global_shape:
        return hooks.changed(gradient)
    whole = hooks.changed(state.joined(gradient, layout, of="gradient for a hook"))
    part = state.local_part(whole, layout, World.current().rank)
    assert part is not None
    return part


def finish(parallel: Parallel, active: dict[str, bool], count: float) -> None:
    """Sum the gradients of this rank's parameters over dp and divide them by `count`.

    A parameter that is `active` had a gradient somewhere: where it has none, its part of the batch did not reach it.
    """
    used = [p for name, p in parallel.held().items() if p.grad is not None or active.get(name)]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    group = parallel.group("dp")
    if group.size == 1 or parallel.accumulating:
        sums = [p.grad for p in used if p.grad is not None]
    else:
        sums = sum_over(used, group)
        memory.buckets(sums)
    if count not in (0, 1):
        for total in sums:
            total.div_(count)


def settle(parallel: Parallel) -> None:
    """Sum over dp what several calls have left in `.grad`: they were divided already."""
    held = parallel.held()
    flags = torch.tensor([float(p.grad is not None) for p in held.values()])
    parallel.group("dp").run("all_reduce", [flags], of="gradients")
    finish(parallel, dict(zip(held, (flags > 0).tolist(), strict=True)), 1)


def sum_over(parameters: Sequence[Tensor], group: Group, of: str = "gradients") -> list[Tensor]:
    """All-reduce `.grad` of the parameters in flat buckets; returns these, and each `.grad` is a view of one."""
    works = []
    for bucket in buckets(parameters):
        grads = [p.grad for p in bucket if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        works.append((group.run("all_reduce", [flat], of=of, wait=False), bucket, flat))
    for work, bucket, flat in works:
        work.wait()
        for p, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            p.grad = part.view(p.shape)
    return [flat for _, _, flat in works]


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of one dtype whose gradients have at most BUCKET_BYTES (or one larger one)."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p in parameters:
        by_type.setdefault((p.dtype, p.device), []).append(p)
    for same in by_type.values():
        bucket: list[Tensor] = []
        size_bytes = 0
        for p in same:
            if bucket and size_bytes + bytes_of(p) > BUCKET_BYTES:
                yield bucket
                bucket, size_bytes = [], 0
            bucket.append(p)
            size_bytes += bytes_of(p)
        yield bucket


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
