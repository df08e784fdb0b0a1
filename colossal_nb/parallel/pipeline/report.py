"""What the split did, in lines for people."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from colossal_nb.parallel.pipeline.proof import Proof
from colossal_nb.parallel.pipeline.split import Split


@dataclass(frozen=True)
class Report:
    """Lines for `%colossal report`."""

    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


def report_on(model: nn.Module, split: Split, proof: Proof) -> Report:
    """One line per stage, then what is held twice and how the split was proved."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    lines = [f"pipeline: {type(model).__name__} in {split.stages} stages"]
    for stage in range(split.stages):
        held = sum(sizes[name] for name, holders in split.holders.items() if stage in holders)
        lines.append(
            f"  stage {stage}: {_units(split, stage)} | {split.share(stage):.0%} of the FLOPs, "
            f"{held:,} parameters{_receives(split, stage)}"
        )
    lines += _shared(split)
    lines.append(
        f"  proved on an example: outputs within {proof.output_difference:.0e}, "
        f"gradients within {proof.gradient_difference:.0e} of the whole model"
    )
    return Report(tuple(lines))


def _units(split: Split, stage: int) -> str:
    names = [str(split.units[index]) for index in split.owned(stage)]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} units)"


def _receives(split: Split, stage: int) -> str:
    if not split.needs[stage]:
        return ""
    return " | receives " + ", ".join(split.label(value) for value in sorted(split.needs[stage]))


def _shared(split: Split) -> list[str]:
    lines = []
    for stages in sorted({holders for holders in split.holders.values() if len(holders) > 1}):
        names = [name for name, holders in split.holders.items() if holders == stages]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"  held by stages {', '.join(map(str, stages))}, gradients summed: {shown}")
    return lines
