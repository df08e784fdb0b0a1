"""What a strategy may ask for: every rule that needs no model, in one table, each with the nearest way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from math import isqrt, log, prod
from typing import TYPE_CHECKING

from colossal_nb.plan.mesh import AXES

if TYPE_CHECKING:
    from colossal_nb.plan.strategy import Strategy

# Values whose runtime exists. A field that is not here takes all its values.
BUILT: dict[str, tuple[int | str, ...]] = {
    "schedule": ("1f1b", "gpipe"),
    "sp": (1,),
    "tp_mode": ("1d",),
    "zero": (0,),
    "offload": ("none",),
}


def reasons(strategy: Strategy, engines: int | None, most: int) -> list[str]:
    """Every reason against a strategy, in the order of the rules; empty if it may run."""
    found = [reason for rule in RULES for reason in rule(strategy)]
    if strategy.needs > most:
        found.append(
            f"{_product(strategy)} needs {strategy.needs} engines, more than the {most} that can be started here"
            f"{_nearest(strategy, most)}"
        )
    elif engines is not None and strategy.needs > engines:
        found.append(too_few(strategy, engines))
    return found


def message(found: list[str]) -> str:
    """One text for one ValueError."""
    return found[0] if len(found) == 1 else "\n".join(["this strategy cannot run:", *(f"  - {text}" for text in found)])


def too_few(strategy: Strategy, engines: int) -> str:
    """The reason when a strategy needs more engines than there are."""
    return f"{_product(strategy)} needs {strategy.needs} engines, there are {engines}{_nearest(strategy, engines)}"


def _grid_2d(s: Strategy) -> Iterator[str]:
    if s.tp_mode == "2d" and isqrt(s.tp) ** 2 != s.tp:
        yield f"2d needs tp = q*q; {s.tp} is none: {_squares(s.tp)}{_as_25d(s.tp)}"


def _grid_25d(s: Strategy) -> Iterator[str]:
    if s.tp_mode == "2.5d" and (s.tp % s.depth or isqrt(s.tp // s.depth) ** 2 * s.depth != s.tp):
        near = sorted(_near(s.tp, lambda q: s.depth * q * q))
        options = [f"tp={tp}" for tp in near if tp] + [f"tp={s.tp} depth={d}" for d in _depths(s.tp)]
        yield f"2.5d needs tp = depth*q*q; tp={s.tp} with depth={s.depth} is none: {', or '.join(options)}"


def _grid_3d(s: Strategy) -> Iterator[str]:
    if s.tp_mode == "3d" and round(s.tp ** (1 / 3)) ** 3 != s.tp:
        near = ", or ".join(f"tp={n}" for n in sorted(_near(s.tp, lambda q: q**3)))
        yield f"3d needs tp = q*q*q; {s.tp} is none: {near}"


def _depth(s: Strategy) -> Iterator[str]:
    if s.depth > 1 and s.tp_mode != "2.5d":
        yield f"depth={s.depth} belongs to tp_mode=2.5d; with tp_mode={s.tp_mode} leave it out"


def _chunks(s: Strategy) -> Iterator[str]:
    if s.schedule == "zbv" and s.chunks not in (None, 2):
        yield f"zbv has exactly 2 chunks per rank, not {s.chunks}: leave chunks out"
    if s.schedule in ("1f1b", "gpipe", "zb-h1") and s.chunks not in (None, 1):
        yield f"{s.schedule} has one chunk per rank, not {s.chunks}: leave chunks out, or schedule=interleaved"
    if s.schedule == "interleaved" and s.chunks == 1:
        yield "interleaved has at least 2 chunks per rank: chunks=2, or schedule=1f1b"


def _unused(s: Strategy) -> Iterator[str]:
    if s.pp == 1 and s.schedule in ("interleaved", "zb-h1", "zbv"):
        yield f"schedule={s.schedule} needs a pipeline: pp=2 or more, or leave schedule out"


def _built(s: Strategy) -> Iterator[str]:
    for name, built in BUILT.items():
        value = getattr(s, name)
        if value not in built:
            yield f"{name}={value} is not built yet; built: {', '.join(f'{name}={choice}' for choice in built)}"


RULES: tuple[Callable[[Strategy], Iterator[str]], ...] = (
    _grid_2d, _grid_25d, _grid_3d, _depth, _chunks, _unused, _built,
)  # fmt: skip


def _near(value: int, grid: Callable[[int], int]) -> set[int]:
    """The grid numbers next below and above a value."""
    q = 1
    while grid(q + 1) <= value:
        q += 1
    return {grid(q), grid(q + 1)} if grid(q) <= value else {grid(q)}


def _squares(tp: int) -> str:
    return ", or ".join(f"tp={n}" for n in sorted(_near(tp, lambda q: q * q)))


def _depths(tp: int) -> list[int]:
    return [d for d in range(1, tp) if tp % d == 0 and isqrt(tp // d) ** 2 * d == tp]


def _as_25d(tp: int) -> str:
    return "".join(f", or tp={tp} tp_mode=2.5d depth={d}" for d in _depths(tp)[:1])


def _product(s: Strategy) -> str:
    return " ".join(f"{axis}={size}" for axis, size in _sizes(s).items()) or "dp=1"


def _sizes(s: Strategy) -> dict[str, int]:
    """The axes of more than one rank, in the order in which they are written."""
    sizes = {field.name: getattr(s, field.name) or 1 for field in dataclasses.fields(s) if field.name in AXES}
    return {axis: size for axis, size in sizes.items() if size > 1}


def _nearest(s: Strategy, engines: int) -> str:
    """The sizes closest to the wanted ones that use as many of the engines as they can."""
    if engines < 1:
        return ""
    sizes = _sizes(s)
    wanted = {axis: sizes[axis] for axis in AXES if axis in sizes}  # of two as near, the one with fewer outer ranks
    options = [_candidates(size, engines) for size in wanted.values()]
    fitting = [sizes for sizes in product(*options) if prod(sizes) <= engines]

    def distance(sizes: tuple[int, ...]) -> tuple[int, float]:
        change = sum(log(want / size) ** 2 for want, size in zip(wanted.values(), sizes, strict=True))
        return -prod(sizes), change

    nearest = min(fitting, key=distance)
    best = dict(zip(wanted, nearest, strict=True))
    named = " ".join(f"{axis}={best[axis]}" for axis in sizes if best[axis] > 1)
    return f"; nearest that fits: {named or 'dp=1'}"


def _candidates(size: int, engines: int) -> list[int]:
    """Sizes worth proposing in place of `size`: its divisors, the powers of two, and the whole of the engines."""
    top = min(size, engines)
    return sorted({n for n in range(1, top + 1) if size % n == 0 or n & (n - 1) == 0} | {top})
