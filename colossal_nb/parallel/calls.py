"""Each operation of the gate: what is checked before it, in which form it travels, what is done when it arrived.

The checks answer for what gloo does not: it refuses some dtypes, wants equal sizes and contiguous tensors, and
meets some wrong calls with a wrong value or an abort of the process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel.forms import (
    WIDER,
    added,
    bytes_of,
    can_reduce,
    copy_back,
    describe,
    land,
    movable,
    movable_numel,
    reducible,
    room_for,
    same_dtype,
)
from colossal_nb.parallel.transports.gloo import Gloo, Handle

# Up to this much an all-reduce goes in one exchange.
_AT_ONCE_BYTES = 1 << 19


@dataclass(frozen=True)
class Call:
    """One operation, ready to go: `issue` starts it, `finish` puts what arrived where the caller wants it.

    For the comparison between ranks: `compared` and `detail` must be alike on all; `got[i]` elements are taken from
    rank i, `given[i]` go to it (empty where `compared` says it all).
    """

    payload_bytes: int
    issue: Callable[[Gloo], list[Handle]]
    finish: Callable[[], None] | None = None
    compared: Sequence[Tensor] = ()
    detail: str = ""
    got: Sequence[int] = ()
    given: Sequence[int] = ()


def _one(issue: Callable[[Gloo], Handle]) -> Callable[[Gloo], list[Handle]]:
    return lambda wire: [issue(wire)]


def all_reduce(tensors: Sequence[Tensor], size: int, reduce: str = "sum") -> Call:
    """Reduce each tensor in place on every rank."""
    for each in tensors:
        can_reduce(each, reduce)
    forms = [reducible(each) for each in tensors]
    if reduce == "sum" and size > 2 and size * bytes_of(*forms) <= _AT_ONCE_BYTES:
        return _all_reduce_at_once(tensors, forms, size)

    def finish() -> None:
        for original, form in zip(tensors, forms, strict=True):
            copy_back(original, form)

    return Call(
        bytes_of(*tensors),
        lambda wire: [wire.all_reduce(form, reduce) for form in forms],
        finish if any(a is not b for a, b in zip(tensors, forms, strict=True)) else None,
        tensors,
        reduce,
    )


def _all_reduce_at_once(tensors: Sequence[Tensor], forms: list[Tensor], size: int) -> Call:
    """Everyone sends its small tensors to everyone and adds what comes, in rank order: the same bits on all ranks.

    One exchange instead of a ring's 2 (n-1): on CPU the wake-ups cost more than the bytes.
    """
    rooms = [form.new_empty(size * form.numel()) for form in forms]

    def finish() -> None:
        for original, form, room in zip(tensors, forms, rooms, strict=True):
            form.copy_(added(room.view(size, -1)).view(form.shape))
            copy_back(original, form)

    def issue(wire: Gloo) -> list[Handle]:
        pairs = zip(rooms, forms, strict=True)
        return [wire.all_to_all(room, form.reshape(-1).repeat(size), [], []) for room, form in pairs]

    return Call(bytes_of(*tensors), issue, finish, tensors, "sum")


def reduce(tensors: Sequence[Tensor], size: int, reduce: str = "sum", root: int = 0) -> Call:
    """Reduce one tensor in place on the root; what the others hold afterwards is not defined."""
    (x,) = tensors
    can_reduce(x, reduce)
    form = reducible(x).clone()
    issue = _one(lambda wire: wire.reduce(form, reduce, root))
    return Call(bytes_of(x), issue, lambda: copy_back(x, form), tensors, f"{reduce}, root {root}")


def broadcast(tensors: Sequence[Tensor], size: int, root: int = 0) -> Call:
    """Give each of the root's tensors to every rank."""
    forms = [movable(each) for each in tensors]

    def finish() -> None:
        for original, form in zip(tensors, forms, strict=True):
            land(original, form)

    def issue(wire: Gloo) -> list[Handle]:
        return [wire.broadcast(form, root) for form in forms]

    return Call(bytes_of(*tensors), issue, finish, tensors, f"root {root}")


def all_gather(tensors: Sequence[Tensor], size: int) -> Call:
    """[out, x] (out holds every x in turn, flat) or [*outs, x] (one out per rank; sizes may differ)."""
    *outs, x = tensors
    given = movable(x).reshape(-1)
    if len(outs) == 1 and size != 1:
        (out,) = outs
        same_dtype("all_gather", out, x)
        if out.numel() != size * x.numel():
            raise ValueError(
                f"all_gather: {size} ranks give {describe(x)} each, {size * x.numel()} elements; "
                f"the output {describe(out)} has {out.numel()}"
            )
        room = room_for(out)
        return Call(bytes_of(out), _one(lambda wire: wire.all_gather(room, given)), lambda: land(out, room), [x])
    return _all_gather_parts(outs, x, given, size)


def _all_gather_parts(outs: list[Tensor], x: Tensor, given: Tensor, size: int) -> Call:
    if len(outs) != size:
        raise ValueError(f"all_gather: a group of {size} ranks needs {size} outputs, not {len(outs)}")
    for out in outs:
        same_dtype("all_gather", out, x)
    sizes = [movable_numel(out) for out in outs]
    longest = max(*sizes, given.numel())
    padded = given if given.numel() == longest else torch.cat([given, given.new_zeros(longest - given.numel())])
    room = given.new_empty(size * longest)

    def finish() -> None:
        for index, out in enumerate(outs):
            start = index * longest
            land(out, room[start : start + sizes[index]])

    issue = _one(lambda wire: wire.all_gather(room, padded))
    return Call(bytes_of(*outs), issue, finish, outs, got=sizes, given=[given.numel()] * size)


def reduce_scatter(tensors: Sequence[Tensor], size: int, reduce: str = "sum") -> Call:
    """[out, x] (x holds one part per rank, flat) or [out, *parts] (sizes may differ from rank to rank).

    All-to-all of the parts, added in rank order by their owner: the bytes of a ring reduce-scatter, and on CPU
    several times faster than gloo's own.
    """
    out, *parts = tensors
    whole = parts[0] if len(parts) == 1 and size != 1 else None
    if whole is not None:
        if whole.numel() != size * out.numel():
            raise ValueError(
                f"reduce_scatter: {size} ranks take {describe(out)} each, {size * out.numel()} elements; "
                f"the input {describe(whole)} has {whole.numel()}"
            )
        parts = list(whole.reshape(size, -1))
    if len(parts) != size:
        raise ValueError(f"reduce_scatter: a group of {size} ranks needs {size} parts, not {len(parts)}")
    for part in parts:
        same_dtype("reduce_scatter", out, part)
    can_reduce(out, reduce)
    if reduce not in _FOLDS:
        raise ValueError(f"reduce_scatter has {', '.join(_FOLDS)}, not {reduce}")
    splits = [movable_numel(part) for part in parts]
    given = torch.cat([movable(part).reshape(-1) for part in parts]) if whole is None else movable(whole).reshape(-1)
    got = [movable_numel(out)] * size
    room = given.new_empty(sum(got))

    def finish() -> None:
        stack = (room if room.dtype == out.dtype else room.view(out.dtype)).view(size, -1)
        stack = stack.to(WIDER.get(out.dtype, out.dtype))
        out.copy_(_FOLDS[reduce](stack).reshape(out.shape))

    issue = _one(lambda wire: wire.all_to_all(room, given, got, splits))
    return Call(bytes_of(*parts), issue, finish, parts, reduce, got, splits)


_FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": added,
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0, dtype=stack.dtype),
}


def all_to_all(
    tensors: Sequence[Tensor], size: int, got: Sequence[int] | None = None, given: Sequence[int] | None = None
) -> Call:
    """[out, x]: rank i's j-th part of x becomes rank j's i-th part of out; parts are rows of dim 0.

    `got` and `given` are the rows of out and x per rank (None: equal parts). Or [*outs, *xs], one of each per rank.
    """
    if len(tensors) == 2 * size and size != 1:
        return _all_to_all_parts(tensors[:size], tensors[size:])
    out, x = tensors
    same_dtype("all_to_all", out, x)
    form, room = movable(x).reshape(-1), room_for(out)
    got_sizes = _row_sizes("output", out, room.numel(), got, size)
    given_sizes = _row_sizes("input", x, form.numel(), given, size)
    issue = _one(lambda wire: wire.all_to_all(room, form, got_sizes, given_sizes))
    detail = str(x.dtype).removeprefix("torch.")
    return Call(bytes_of(x), issue, lambda: land(out, room), (), detail, got_sizes, given_sizes)


def _all_to_all_parts(outs: Sequence[Tensor], parts: Sequence[Tensor]) -> Call:
    for out, part in zip(outs, parts, strict=True):
        same_dtype("all_to_all", out, part)
    form = torch.cat([movable(part).reshape(-1) for part in parts])
    got, given = [movable_numel(out) for out in outs], [movable_numel(part) for part in parts]
    room = form.new_empty(sum(got))

    def finish() -> None:
        for out, arrived in zip(outs, torch.split(room, got), strict=True):
            land(out, arrived)

    issue = _one(lambda wire: wire.all_to_all(room, form, got, given))
    return Call(bytes_of(*parts), issue, finish, (), str(form.dtype).removeprefix("torch."), got, given)


def _row_sizes(what: str, x: Tensor, elements: int, rows: Sequence[int] | None, size: int) -> list[int]:
    total = x.shape[0] if x.dim() else 1
    if rows is None or not len(rows):
        if total % size:
            raise ValueError(f"all_to_all: the {what} {describe(x)} has {total} rows, no multiple of {size} ranks")
        rows = [total // size] * size
    if len(rows) != size or sum(rows) != total:
        raise ValueError(f"all_to_all: {what} parts {list(rows)} for {size} ranks do not add up to {total} rows")
    per_row = elements // total if total else 0
    return [count * per_row for count in rows]


def gather(tensors: Sequence[Tensor], size: int, root: int = 0, index: int = 0) -> Call:
    """On the root [*outs, x], elsewhere [x]."""
    *outs, x = tensors
    form = movable(x).reshape(-1)
    sizes = [movable_numel(out) for out in outs] or [0] * size
    if index == root and len(outs) != size:
        raise ValueError(f"gather: the root of {size} ranks needs {size} outputs, not {len(outs)}")
    room = form.new_empty(sum(sizes))
    given = [form.numel() if other == root else 0 for other in range(size)]

    def finish() -> None:
        for out, part in zip(outs, torch.split(room, sizes), strict=False):
            land(out, part)

    issue = _one(lambda wire: wire.all_to_all(room, form, sizes, given))
    return Call(size * bytes_of(x), issue, finish, [x], f"root {root}", sizes, given)


def scatter(tensors: Sequence[Tensor], size: int, root: int = 0, index: int = 0) -> Call:
    """On the root [out, *parts], elsewhere [out]."""
    out, *parts = tensors
    if index == root and len(parts) != size:
        raise ValueError(f"scatter: the root of {size} ranks needs {size} parts, not {len(parts)}")
    room = room_for(out)
    forms = [movable(part).reshape(-1) for part in parts]
    given = torch.cat(forms) if forms else room.new_empty(0)
    sizes = [form.numel() for form in forms] or [0] * size
    got = [room.numel() if other == root else 0 for other in range(size)]
    issue = _one(lambda wire: wire.all_to_all(room, given, got, sizes))
    return Call(size * bytes_of(out), issue, lambda: land(out, room), [out], f"root {root}", got, sizes)


def barrier(tensors: Sequence[Tensor], size: int) -> Call:
    """Everyone is here before anyone goes on."""
    return Call(0, _one(lambda wire: wire.barrier()))
