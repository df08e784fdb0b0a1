"""The tensor pass in sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from colossal_nb.parallel.tensor.values import Pair, TensorPlan


def report_lines(plan: TensorPlan) -> list[str]:
    """One line per kind of decision, repeated blocks folded: `blocks.0-3.attention: qkv -> out, 4 groups`."""
    if plan.ranks == 1:
        return [f"{plan.axis}=1: nothing is sharded"]
    lines = [f"{plan.axis}={plan.ranks}: {100 * plan.share:.0f}% of the parameters sharded"]
    lines += _folded([(pair.region, pair_line(pair)) for pair in plan.pairs])
    for shard in plan.vocabulary:
        names = ", ".join((*shard.embeddings, *shard.heads))
        lines.append(f"{names}: {shard.size} rows by vocabulary")
    lines += [f"{name}: gradient summed over {plan.axis}" for name in fold(plan.partial)]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in plan.whole:
        reasons[reason].append(name)
    lines += [f"whole: {', '.join(fold(names))}: {reason}" for reason, names in reasons.items()]
    return lines


def pair_line(pair: Pair) -> str:
    """What a pair does, in the words of its region."""
    start = len(pair.region) + 1 if pair.region else 0
    columns = ", ".join(name[start:] for name, _ in pair.columns)
    changes = [f"{change.attribute} {change.whole} -> {change.local}" for change in pair.changes]
    changes += ["width read from a narrow input"] if pair.narrow else []
    return "; ".join([f"{columns} -> {pair.row[start:]}, {pair.groups} groups", *changes])


def fold(names: Sequence[str]) -> list[str]:
    """Names that differ in their first number alone become one: blocks.0.norm, blocks.1.norm -> blocks.0-1.norm."""
    numbers: dict[tuple[str, str], list[int]] = {}
    order: list[tuple[str, str]] = []
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", name)
        key = (name[: match.start()], name[match.end() :]) if match else (name, "")
        if key not in numbers:
            numbers[key] = []
            order.append(key)
        if match:
            numbers[key].append(int(match.group()))
    return [f"{before}{_runs(numbers[before, after])}{after}" for before, after in order]


def _runs(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _folded(lines: Sequence[tuple[str, str]]) -> list[str]:
    regions: dict[str, list[str]] = defaultdict(list)
    for region, line in lines:
        regions[line].append(region)
    return [f"{', '.join(fold(names)) or 'model'}: {line}" for line, names in regions.items()]
