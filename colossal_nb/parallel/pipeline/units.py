"""Which module calls are units: what runs whole on one stage. What happens between them is glue: every stage runs it.

No module class is known here. A call is opened when it holds a chain of blocks (several calls of children of one
ModuleList or Sequential); what is then still too heavy for one stage is opened further, heaviest first.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from colossal_nb.parallel.trace import Call, Trace

CHAIN_SHARE = 0.3  # a chain lighter than this part of one stage is not worth a cut
HEAVY_SHARE = 1.3  # a unit heavier than this part of one stage is opened


def choose_units(model: nn.Module, record: Trace, stages: int, cuts: list[str] | None = None) -> list[Call]:
    """The calls of one forward that may be dealt to stages, in call order; `cuts` names modules to be among them.

    Raises ValueError when there are fewer blocks (or, in a model without blocks, parts with parameters) than stages.
    """
    units = list(record.root.children)
    share = record.root.flops / stages
    _open_chains(model, units, CHAIN_SHARE * share)
    for name in cuts or ():
        _open_towards(units, name)
    if not cuts:
        _check_blocks(model, units, stages)
        _open_heavy(units, HEAVY_SHARE * share, stages)
    parts = [call for call in units if call.has_parameters]
    _require(len(parts) >= stages, model, stages, parts, "part", " with parameters")
    return units


def is_block(model: nn.Module, call: Call) -> bool:
    """Whether the called module is an element of a ModuleList or Sequential."""
    parent = call.name.rpartition(".")[0]
    return call.name != "" and isinstance(model.get_submodule(parent), nn.ModuleList | nn.Sequential)


def _check_blocks(model: nn.Module, units: list[Call], stages: int) -> None:
    """Where blocks do most of the work, a stage without a block would only wait."""
    blocks = [call for call in units if call.has_parameters and is_block(model, call)]
    blocks_lead = 2 * sum(call.flops for call in blocks) > sum(call.flops for call in units)
    for call in [call for call in blocks if _has_chain(model, call)]:
        blocks.remove(call)
        blocks += [inside for inside in call.descendants() if inside.has_parameters and is_block(model, inside)]
    _require(len(blocks) >= stages or not blocks_lead, model, stages, blocks, "block")


def _require(
    enough: bool, model: nn.Module, stages: int, parts: list[Call], kind: str, which: str = ""
) -> None:
    if enough:
        return
    if not parts:
        raise ValueError(f"pp={stages}: this {type(model).__name__} calls no modules that stages could share: pp=1")
    several = "s" if len(parts) > 1 else ""
    named = ", ".join(call.name for call in parts)
    raise ValueError(
        f"pp={stages} is more than the {len(parts)} {kind}{several}{which} of this {type(model).__name__} ({named}): "
        f"pp={len(parts)} is the largest possible"
    )


def _open_chains(model: nn.Module, units: list[Call], least_flops: float) -> None:
    while True:
        opened = next(
            (
                call
                for call in units
                if call.flops > least_flops and not is_block(model, call) and _has_chain(model, call)
            ),
            None,
        )
        if opened is None:
            return
        _open(units, opened)


def _open_heavy(units: list[Call], most_flops: float, stages: int) -> None:
    while True:
        heavy = [call for call in units if call.has_parameters]
        divisible = [call for call in heavy if sum(child.has_parameters for child in call.children) > 1]
        if not divisible:
            return
        opened = max(divisible, key=lambda call: call.flops)
        if opened.flops <= most_flops and len(heavy) >= stages:
            return
        _open(units, opened)


def _open_towards(units: list[Call], name: str) -> None:
    """Opens what stands around the module `name` until it is a unit itself (or there is nothing left to open)."""
    while not any(call.name == name or call.name.startswith(name + ".") for call in units):
        around = next((call for call in units if call.children and name.startswith(call.name + ".")), None)
        if around is None:
            return
        _open(units, around)


def _open(units: list[Call], call: Call) -> None:
    position = units.index(call)
    units[position : position + 1] = call.children


def _has_chain(model: nn.Module, call: Call) -> bool:
    """Several calls of elements of one list, parameters in them, somewhere inside."""
    elements: dict[str, int] = defaultdict(int)
    for inside in call.descendants():
        if inside.has_parameters and is_block(model, inside):
            elements[inside.name.rpartition(".")[0]] += 1
    return any(count > 1 for count in elements.values())
