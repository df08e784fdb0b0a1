"""What a wrong tensor looks like: a factor, another rank's part, an addend of the right one, some rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colossal_nb.parallel.handle import group_along
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.state import local_part
from colossal_nb.parallel.world import World
from colossal_nb.plan import Replicate


@dataclass(frozen=True)
class Facts:
    """One rank's part against the sequential program's. `factor`: what it is times that, nan if nothing;
    `like`: another rank whose part it is; `summed`: the axes over which the sum of all replicas is right;
    `rows`: those of dim 0 of the whole tensor that differ; `of`: how many there are; `digest` of its bytes;
    `place`: what the rank holds, equal for replicas."""

    wrong: bool
    factor: float
    like: int | None
    summed: tuple[str, ...]
    rows: tuple[int, ...]
    of: int
    digest: int
    place: str


def facts_of(found: Tensor, whole: Tensor, p: Tensor, close: float) -> Facts:
    """Collective over the axes along which the parameter is replicated; called on the ranks that hold some of it.

    `close`: of the size, as near as this is alike. Rounding is far below, another value far above.
    """
    layout, rank = layout_of(p), World.current().rank
    expected = whole if layout is None else local_part(whole, layout, rank)
    assert expected is not None
    wrong = not near(found, expected, close)
    held = None if layout is None else layout.slices(rank)
    rows: tuple[int, ...] = ()
    if wrong and found.dim():
        bad = ((found - expected).abs() > close * expected.abs().max()).reshape(len(found), -1).any(1)
        rows = tuple(row for row, flag in zip(held[0] if held else range(len(bad)), bad.tolist(), strict=True) if flag)
    return Facts(
        wrong=wrong,
        factor=_factor(found, expected, close),
        like=_like(found, whole, p, close) if wrong and layout is not None else None,
        summed=_summed(found, expected, p, close) if layout is not None else (),
        rows=rows,
        of=whole.shape[0] if whole.dim() else 1,
        digest=zlib.crc32(found.contiguous().view(-1).view(torch.uint8).numpy().data),
        place=str(held),
    )


def near(found: Tensor, expected: Tensor, close: float) -> bool:
    """Alike within what rounding could do at most."""
    if found.shape != expected.shape:
        return False
    size = expected.abs().max().item() if expected.numel() else 0.0
    return not found.numel() or bool((found - expected).abs().max() <= close * size)


def _factor(found: Tensor, expected: Tensor, close: float) -> float:
    length = expected.double().square().sum()
    if not length:
        return float("nan")
    factor = (found.double() * expected.double()).sum() / length
    return factor.item() if near(found.double(), factor * expected.double(), close) else float("nan")


def _like(found: Tensor, whole: Tensor, p: Tensor, close: float) -> int | None:
    layout, own = layout_of(p), World.current().rank
    assert layout is not None
    for rank in range(layout.mesh.size):
        part = local_part(whole, layout, rank) if layout.slices(rank) != layout.slices(own) else None
        if part is not None and part.any() and near(found, part, close):
            return rank
    return None


def _summed(found: Tensor, expected: Tensor, p: Tensor, close: float) -> tuple[str, ...]:
    layout, right = layout_of(p), []
    assert layout is not None
    for axis in layout.mesh.axes:
        if layout.mesh.axis_size(axis) > 1 and isinstance(layout.placement(axis), Replicate):
            total = found.clone(memory_format=torch.contiguous_format)
            group_along(layout.mesh, (axis,)).run("all_reduce", [total], of="verify")
            if near(total, expected, close):
                right.append(axis)
    return tuple(right)


def words(what: str, facts: Mapping[int, Facts]) -> str:
    """What all ranks' facts about one tensor say together."""
    wrong = {rank: each for rank, each in facts.items() if each.wrong}
    apart = _apart(facts)
    if not wrong:
        return f"replicas differ between ranks {_ranks(apart)}" if apart else ""
    pairs = [(a, each.like) for a, each in wrong.items() if each.like is not None and a < each.like]
    exchanged = [(a, b) for a, b in pairs if b in wrong and wrong[b].like is not None]
    if exchanged:
        a, b = exchanged[0]
        return f"ranks {a} and {b} have each other's part ({_rows(wrong[a])} and {_rows(wrong[b])}): slices exchanged"
    axes = set.intersection(*(set(each.summed) for each in wrong.values()))
    if axes and apart:
        return (f"replicas differ between ranks {_ranks(apart)}, and their sum over {min(axes)} is the sequential one: "
                f"a missing all-reduce over {min(axes)}")
    factor = _one([each.factor for each in wrong.values()])
    if factor is not None:
        if factor == 0:
            return f"nothing on ranks {_ranks(list(wrong))} where the sequential program has something"
        moved = "moved" if what == "weight" else "is"
        return f"{moved} {_digits(factor)} times the sequential one on ranks {_ranks(list(wrong))}: a wrong scale"
    if apart:
        return f"replicas differ between ranks {_ranks(apart)}: an exchange between them is missing"
    like = [(rank, each.like) for rank, each in wrong.items() if each.like is not None]
    if like:
        return f"rank {like[0][0]} has the part of rank {like[0][1]}"
    some = next(iter(wrong.values()))
    if len(wrong) == 1 and 0 < len(some.rows) < some.of:
        return f"{_rows(some)} differ"
    return ""


def _one(factors: Sequence[float]) -> float | None:
    """What all factors are within rounding of how far they are from 1, None if they are not alike or unknown."""
    if any(factor != factor for factor in factors):
        return None
    spread = max(factors) - min(factors)
    return factors[0] if spread <= 0.05 * max(abs(factor - 1) for factor in factors) else None


def _digits(factor: float) -> str:
    """Two where they show that it is not 1, else as many as do: 0.5, 1.02, 0.999877."""
    off = float(f"{factor - 1:.3g}")
    return f"{float(f'{factor:.2g}') if abs(off) >= 0.1 else 1 + off:.15g}"


def _apart(facts: Mapping[int, Facts]) -> list[int]:
    """Ranks that hold the same part and have other bytes in it."""
    first: dict[str, tuple[int, Facts]] = {}
    for rank, each in sorted(facts.items()):
        rank_, other = first.setdefault(each.place, (rank, each))
        if other.digest != each.digest:
            return [rank_, rank]
    return []


def _rows(facts: Facts) -> str:
    rows = facts.rows
    if not rows:
        return "its rows"
    return f"rows {rows[0]}..{rows[-1]}" if rows[-1] - rows[0] == len(rows) - 1 else f"{len(rows)} rows"


def _ranks(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))
