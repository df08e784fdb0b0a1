"""The plan of the tensor pass: record one forward, apply the rules, prove the outcome, drop what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import torch
from torch import nn

from colossal_nb.parallel.collectives import group_of
from colossal_nb.parallel.structure import leaves, rebuild
from colossal_nb.parallel.tensor.proof import aside, prove
from colossal_nb.parallel.tensor.rules import Rules
from colossal_nb.parallel.tensor.values import Pair, TensorPlan
from colossal_nb.parallel.trace import Trace, evaluating, trace, untouched
from colossal_nb.plan.mesh import Mesh
from colossal_nb.plan.strategy import Strategy

FEW_TOKENS = 3
WRONG_INPUT = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AssertionError)
Example = tuple[tuple[Any, ...], dict[str, Any]]


def plan(model: nn.Module, mesh: Mesh, strategy: Strategy, example: Example) -> TensorPlan:
    """What to shard over `tp`, decided and proved on the whole model, which stays as it is.

    `example` is `(args, kwargs)` of one small forward. Collective over the tp axis (the proof); every rank gets the
    same plan. Raises one ValueError when heads cannot be dealt to the ranks, when the ranks decided differently, or
    when what remains cannot be proved.
    """
    assert strategy.tp_mode == "1d", "the strategy's check refuses the other modes"
    if mesh.axis_size("tp") == 1:
        return TensorPlan(mesh)
    example = _few_samples(model, example)
    found = unproved(model, mesh, example)
    require_agreement(found)
    while True:
        proof = prove(model, found, example)
        if not proof.wrong:
            return replace(proof.plan, share=_share(model, proof.plan))
        found = _without(found, proof.wrong)


def require_agreement(plan: TensorPlan) -> None:
    """Raises ValueError, on all ranks of the axis, unless all of them decided the same. Collective."""
    digest = crc32(repr((plan.pairs, plan.vocabulary, plan.partial)).encode())
    extremes = torch.tensor([digest, -digest])
    with aside():
        group_of(plan.mesh, plan.axis).run("all_reduce", [extremes], reduce="max")
    if int(extremes.sum()):
        raise ValueError(
            f"the ranks of {plan.axis} found different parts to shard: they built different models, or run different "
            "versions of torch"
        )


def unproved(model: nn.Module, mesh: Mesh, example: Example) -> TensorPlan:
    """What the rules say; no communication."""
    # With gradients on: without them some of torch's own layers take a fused road past the linears they hold.
    with evaluating(model), untouched(model), torch.enable_grad():
        rules = Rules(model, _short_trace(model, example), mesh.axis_size("tp"))
    pairs = tuple(rules.pairs)
    plan = TensorPlan(mesh, "tp", pairs, tuple(rules.vocabulary), _copied(model, pairs), tuple(rules.whole.items()))
    return replace(plan, share=_share(model, plan))


def _few_samples(model: nn.Module, example: Example) -> Example:
    """Of a whole batch its first two samples, where the model takes them: the proof costs several forwards."""
    samples = next((x.shape[0] for x in leaves(example) if x.ndim), 0)
    if samples <= 2:
        return example
    few: Example = rebuild(example, lambda x: x[:2] if x.ndim and x.shape[0] == samples else x)
    try:
        with evaluating(model), torch.no_grad():
            trace(model, *few)
    except WRONG_INPUT:
        return example
    return few


def _short_trace(model: nn.Module, example: Example) -> Trace:
    """The record of a forward on few tokens where the model takes that: probing repeats it for every feature."""
    short = rebuild(example, lambda x: x[:, :FEW_TOKENS] if x.ndim == 2 and not x.is_floating_point() else x)
    try:
        return trace(model, *short)
    except WRONG_INPUT:
        return trace(model, *example)


def _copied(model: nn.Module, pairs: tuple[Pair, ...]) -> tuple[str, ...]:
    """Column parameters of which several ranks hold the same features: each has an addend of their gradient."""
    names = [
        f"{name}.{kind}"
        for pair in pairs
        for name, parts in pair.columns
        for kind in ("weight", "bias")
        if sum(len(part) for part in parts) > len(set().union(*parts))
    ]
    own = dict(model.named_parameters())
    return tuple(name for name in names if name in own)


def _share(model: nn.Module, plan: TensorPlan) -> float:
    """The part of the model's parameters of which a rank holds a part only."""
    names = {
        f"{n}.{kind}"
        for pair in plan.pairs
        for n, parts in pair.columns
        for kind in ("weight", "bias")
        if any(len(part) < len(set().union(*parts)) for part in parts)
    }
    names |= {f"{pair.row}.weight" for pair in plan.pairs}
    names |= {f"{n}.{kind}" for v in plan.vocabulary for n in (*v.embeddings, *v.heads) for kind in ("weight", "bias")}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return sum(size for name, size in sizes.items() if name in names) / max(sum(sizes.values()), 1)


def _without(plan: TensorPlan, wrong: dict[str, float]) -> TensorPlan:
    """The plan without the pairs that own or surround what was wrong; if there are none, without any."""
    worst = max(wrong, key=lambda name: wrong[name])
    reason = f"the proof found the gradient of {worst or 'the loss'} wrong by {wrong[worst]:.1e} of its scale"
    guilty = [pair for pair in plan.pairs if any(_about(pair, name) for name in wrong)] or list(plan.pairs)
    if not guilty and not plan.vocabulary:
        raise ValueError(f"nothing is sharded, and yet {reason}: two runs of this model on one input differ")
    whole = dict(plan.whole)
    for pair in guilty:
        whole.update(dict.fromkeys([*(name for name, _ in pair.columns), pair.row], reason))
    vocabulary = plan.vocabulary if guilty else ()
    if not guilty:
        whole.update({name: reason for v in plan.vocabulary for name in (*v.embeddings, *v.heads)})
    return replace(
        plan,
        pairs=tuple(pair for pair in plan.pairs if pair not in guilty),
        vocabulary=vocabulary,
        partial=(),
        whole=tuple(whole.items()),
    )


def _about(pair: Pair, parameter: str) -> bool:
    owner = parameter.rpartition(".")[0]
    return owner in (*(name for name, _ in pair.columns), pair.row) or (
        bool(pair.region) and owner.startswith(pair.region)
    )
