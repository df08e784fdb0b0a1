"""Plan against record: the numbers that must agree. Each check returns what disagrees, in sentences; empty if nothing.

M memory, P pipeline, S sharding, C communication, L losses and values. Tests, views and lessons call the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import product
from math import prod
from typing import ParamSpec

import numpy as np
from numpy.typing import ArrayLike

from colossal_nb.plan import Layout, Replicate, in_flight, schedule
from colossal_nb.plan.layout import Partial, Shard
from colossal_nb.plan.schedule import Action, Orders, inputs
from colossal_nb.record import Record, Slice, group_ranks
from colossal_nb.record.events import CATEGORIES, COLLECTIVES
from colossal_nb.record.measures import PIPELINE_KINDS, step_of, steps, total_bytes
from colossal_nb.record.store import Rows

Args = ParamSpec("Args")
Calls = Mapping[tuple[int, str, str, int], int]  # (rank, kind, group, payload bytes) -> calls
_EXCLUSIVE = ("F", "B", "I", "W", "optimizer")  # a rank does one of these at a time; R runs inside of B


def _findings(check: Callable[Args, Iterator[str]]) -> Callable[Args, list[str]]:
    @wraps(check)
    def listed(*args: Args.args, **kwargs: Args.kwargs) -> list[str]:
        return list(check(*args, **kwargs))

    return listed


# --- M


@_findings
def memory(record: Record, totals: Mapping[tuple[int, float], int] | None = None) -> Iterator[str]:
    """M: no category is negative, and their sum is the ledger's own total: `totals[rank, t]` in bytes, if given."""
    for row, total in zip(record.memory, total_bytes(record.memory).tolist(), strict=True):
        rank, t = int(row["rank"]), float(row["t"])
        yield from (f"rank {rank} holds {row[c]} B of {c} at {t:.6f} s" for c in CATEGORIES if row[c] < 0)
        if totals is not None and totals.get((rank, t), total) != total:
            yield f"rank {rank} at {t:.6f} s: categories sum to {total} B, the total is {totals[rank, t]} B"


@_findings
def adam_state(
    record: Record, tensors: Mapping[int, int], scalar_bytes: int = 4, weight_bytes: int = 4
) -> Iterator[str]:
    """M: Adam's state is twice the rank's parameters plus one scalar for each of its `tensors[rank]` tensors.

    With working weights of 2 bytes two moments and a master of 4 bytes each stand behind every one.
    """
    times = 2 if weight_bytes >= 4 else 3 * 4 // weight_bytes
    for rank, row in _last_samples(record).items():
        expected = times * int(row["parameter"]) + scalar_bytes * tensors[rank]
        if row["optimizer"] != expected:
            yield f"rank {rank}: Adam's state is {row['optimizer']} B, expected {expected} B"


@_findings
def peak(record: Record, allocator: Mapping[int, int], within: float = 0.05) -> Iterator[str]:
    """M: the largest metered sample is within 5% of the allocator's own peak, `allocator[rank]` in bytes."""
    metered = record.memory[(record.memory["basis"] == "metered") & (record.memory["where"] == "device")]
    for rank, actual in allocator.items():
        found = int(total_bytes(metered[metered["rank"] == rank]).max(initial=0))
        if abs(found - actual) > within * actual:
            yield f"rank {rank}: metered peak {found} B, the allocator's {actual} B ({found / actual - 1:+.1%})"


@_findings
def memory_returns(record: Record, base_t: float, categories: tuple[str, ...] = CATEGORIES) -> Iterator[str]:
    """M: at the end each category is back at what it was at `base_t` (after del and collect)."""
    before = _last_samples(record.select(memory=record.memory["t"] <= base_t))
    after = _last_samples(record)
    for rank, row in before.items():
        for category in categories:
            if after[rank][category] != row[category]:
                yield f"rank {rank}: {category} went from {row[category]} B to {after[rank][category]} B"


# --- P


@_findings
def pipeline(record: Record, orders: Orders | None = None, *, clock_error_s: float = 0.0) -> Iterator[str]:
    """P: in every step each stage has the plan's F and B once each, none overlap, inputs come first, peaks agree.

    `orders`: the plan; without it only what the record says by itself is compared. With tp or dp several ranks run
    one stage, and each is compared.
    """
    yield from _overlaps(record)
    step = step_of(record)
    for position, time in enumerate(steps(record)):
        slices = record.slices[(step == position) & np.isin(record.slices["kind"], ("F", "B"))]
        for reason in (*_counts(slices, orders), *_order_in_time(slices, clock_error_s), *_peaks(slices, orders)):
            yield f"step {time.number}: {reason}"


@_findings
def bubble(record: Record, p: int, m: int, name: str = "1f1b", within: float = 1e-9) -> Iterator[str]:
    """P: played with unit times (F=1, B=2), a schedule has the bubble (p-1)/(m+p-1) and its in-flight peaks."""
    slices = record.slices[np.isin(record.slices["kind"], PIPELINE_KINDS)]
    span = slices["t1"].max() - slices["t0"].min()
    found, ideal = 1 - (slices["t1"] - slices["t0"]).sum() / (p * span), (p - 1) / (m + p - 1)
    if abs(found - ideal) > within:
        yield f"bubble {found:.4f}, the formula says {ideal:.4f}"
    yield from _peaks(slices, schedule(name, p, m))


def _overlaps(record: Record) -> Iterator[str]:
    for rank in record.ranks:
        mine = record.slices[(record.slices["rank"] == rank) & np.isin(record.slices["kind"], _EXCLUSIVE)]
        for k in np.flatnonzero(mine["t0"][1:] < np.maximum.accumulate(mine["t1"])[:-1]):
            yield f"rank {rank} begins {_name(mine[k + 1])} at {mine['t0'][k + 1]:.6f} s before another slice ended"


def _counts(slices: Rows, orders: Orders | None) -> Iterator[str]:
    found = Counter(zip(*(slices[column].tolist() for column in ("rank", "kind", "stage", "microbatch")), strict=True))
    if orders is None:
        stages = {(rank, stage) for rank, _, stage, _ in found}
        microbatches = {microbatch for *_, microbatch in found}
        wanted = {(r, kind, s, k) for (r, s), kind, k in product(stages, "FB", microbatches)}
    else:
        home = {(rank, stage) for rank, _, stage, _ in found}
        planned = {action for order in orders for action in order}
        missing = {action.stage for action in planned} - {stage for _, stage in home}
        yield from (f"stage {stage} did not run" for stage in sorted(missing))
        wanted = {(rank, a.kind, a.stage, a.microbatch) for rank, stage in home for a in planned if a.stage == stage}
    for key in sorted(wanted | set(found)):
        times = found[key]
        if times != (key in wanted):
            rank, kind, stage, microbatch = key
            yield f"rank {rank} ran {Action(kind, stage, microbatch)} {times} times, expected {int(key in wanted)}"


def _order_in_time(slices: Rows, clock_error_s: float) -> Iterator[str]:
    """With several ranks per stage the earliest end of an input is compared: none can begin before it."""
    ends: dict[Action, float] = {}
    stages = len(np.unique(slices["stage"]))
    for row in slices:
        action = _action(row)
        ends[action] = min(float(row["t1"]), ends.get(action, np.inf))
    for row in slices:
        for needed in inputs(_action(row), stages):
            if needed in ends and row["t0"] < ends[needed] - clock_error_s:
                yield f"rank {row['rank']} begins {_name(row)} before {needed} has ended"


def _peaks(slices: Rows, orders: Orders | None) -> Iterator[str]:
    if orders is None:
        return
    expected = {order[0].stage: peak for order, peak in zip(orders, in_flight(orders), strict=True) if order}
    for rank in np.unique(slices["rank"]).tolist():
        mine = slices[slices["rank"] == rank]
        mine = mine[np.argsort(mine["t0"], kind="stable")]
        found = int(np.cumsum(np.where(mine["kind"] == "F", 1, -1)).max(initial=0))
        wanted = expected.get(int(mine["stage"].min()))
        if found != wanted:
            yield f"rank {rank} has {found} microbatches in flight at most, the plan says {wanted}"


# --- S


@_findings
def layout(plan: Layout) -> Iterator[str]:
    """S: every element is owned, as often as the replicating axes say (explicit parts may share more)."""
    declared = prod(
        plan.mesh.axis_size(axis)
        for axis, placement in zip(plan.mesh.axes, plan.placements, strict=True)
        if isinstance(placement, Replicate | Partial)
    )
    shared = any(isinstance(p, Shard) and p.parts is not None for p in plan.placements)
    for block, owners in _blocks(plan):
        if owners == 0 or (owners != declared and not (shared and owners > declared)):
            yield f"element {list(block)} is owned by {owners} ranks, declared are {declared}"


@_findings
def sharding(record: Record) -> Iterator[str]:
    """S: the formula's slice is the tensor that the rank has; layout bytes are the rank's parameter bytes."""
    held: dict[tuple[int, str], int] = {}
    for row in record.layouts:
        rank, plan = int(row["rank"]), Layout.from_json(str(row["layout"]))
        shape, size = plan.local_shape(rank), plan.local_bytes(rank)
        if str(row["local_shape"]) != str(list(shape or ())) or row["local_bytes"] != size:
            yield (
                f"rank {rank} has {row['tensor']} as {row['local_shape']} ({row['local_bytes']} B),"
                f" its layout says {list(shape or ())} ({size} B)"
            )
        held[rank, str(row["tensor"])] = int(row["local_bytes"])
    for rank, sample in _last_samples(record).items():
        total = sum(size for (owner, _), size in held.items() if owner == rank)
        if held and total != sample["parameter"]:
            yield f"rank {rank}: layouts sum to {total} B, the ledger has {sample['parameter']} B of parameters"


def _blocks(plan: Layout) -> Iterator[tuple[tuple[int, ...], int]]:
    """One index of each block of elements that the same ranks hold, with the number of these ranks."""
    held = [slices for rank in range(plan.mesh.size) if (slices := plan.slices(rank)) is not None]
    classes: list[dict[tuple[bool, ...], int]] = []
    for dim, size in enumerate(plan.global_shape):
        sets = [frozenset(slices[dim]) for slices in held]
        first: dict[tuple[bool, ...], int] = {}
        for i in range(size):
            first.setdefault(tuple(i in some for some in sets), i)
        classes.append(first)
    for block in product(*(first.items() for first in classes)):
        owners = sum(all(members[k] for members, _ in block) for k in range(len(held)))
        yield tuple(i for _, i in block), owners


# --- C


@_findings
def communication(record: Record, expected: Calls | None = None) -> Iterator[str]:
    """C: each collective is on all ranks of its group alike, each send has its recv, calls equal the plan's exactly."""
    yield from (f"rank {rank} dropped {number} events" for rank, number in record.dropped.items() if number)
    comm = record.slices[record.slices["group"] != ""]
    calls: dict[tuple[str, int], list[tuple[int, str, int]]] = {}
    for piece in map(Slice._make, comm.tolist()):
        call = (piece.rank, piece.kind, piece.payload_bytes)
        calls.setdefault((piece.group, piece.seq), []).append(call)
    for (group, seq), found in sorted(calls.items()):
        kinds = {kind for _, kind, _ in found}
        whole = kinds == {"send", "recv"} or (len(kinds) == 1 and kinds <= set(COLLECTIVES))
        if not whole or sorted(rank for rank, *_ in found) != sorted(group_ranks(group)):
            did = ", ".join(f"rank {rank} {kind}" for rank, kind, _ in sorted(found))
            yield f"call {seq} of {group} is not whole: {did}"
        if len({payload for *_, payload in found}) > 1:
            yield f"call {seq} of {group} has different payloads: {sorted(payload for *_, payload in found)} B"
    if expected is not None:
        yield from _against(expected, counted_calls(record))


def counted_calls(record: Record) -> Counter[tuple[int, str, str, int]]:
    """How often each rank called what: (rank, kind, group, payload bytes) -> calls."""
    comm = record.slices[record.slices["group"] != ""]
    return Counter(zip(*(comm[c].tolist() for c in ("rank", "kind", "group", "payload_bytes")), strict=True))


def _against(expected: Calls, found: Calls) -> Iterator[str]:
    for key in sorted({*expected, *found}):
        if expected.get(key, 0) != found.get(key, 0):
            rank, kind, group, payload = key
            times = f"{found.get(key, 0)} times, planned {expected.get(key, 0)}"
            yield f"rank {rank} called {kind} on {group} with {payload} B {times}"


# --- L


@_findings
def values(name: str, a: ArrayLike, b: ArrayLike, *, rtol: float, lr: float = 0.0, steps: int = 0) -> Iterator[str]:
    """L: `|a - b| <= rtol * max(|b|max, lr * steps)`: b is the sequential program's."""
    found, wanted = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if found.shape != wanted.shape:
        yield f"{name} has the shape {list(found.shape)}, expected {list(wanted.shape)}"
        return
    allowed = rtol * max(float(np.abs(wanted).max(initial=0.0)), lr * steps)
    worst = float(np.abs(found - wanted).max(initial=0.0))
    if not worst <= allowed:
        yield f"{name} differs by {worst:.3g}, allowed are {allowed:.3g}"


def _last_samples(record: Record) -> dict[int, np.void]:
    """Each rank's last sample of device memory."""
    device = record.memory[record.memory["where"] == "device"]
    ranks, from_the_end = np.unique(device["rank"][::-1], return_index=True)
    return {rank: device[len(device) - 1 - at] for rank, at in zip(ranks.tolist(), from_the_end.tolist(), strict=True)}


def _action(row: np.void) -> Action:
    return Action(str(row["kind"]), int(row["stage"]), int(row["microbatch"]))


def _name(row: np.void) -> str:
    return str(_action(row)) if row["microbatch"] >= 0 else str(row["kind"])
