"""Before training: one microbatch through all stages, in this process, against the whole model.

What a stage does not have is NaN there, so a tensor that should have crossed and did not cannot hide. Stages run as
they will run in training: the model is pruned, by the same function and on the same Parameter objects, and gets its
values back afterwards. No hook of the user fires, no `.grad` changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossal_nb.parallel.pipeline.dataflow import Value
from colossal_nb.parallel.pipeline.pruned import gradients_aside, pruned, take_gradients
from colossal_nb.parallel.pipeline.split import Split
from colossal_nb.parallel.pipeline.stage import Made, Spec, Specs, Stage
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.trace import untouched

# Largest difference, as a part of max(own size, FLOOR * the largest gradient of the model): a gradient that is zero in
# exact arithmetic (the bias of a key projection) is noise and must not be compared with its own size.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
COARSE_TOLERANCE = 5e-2  # half precision: sums over stages are rounded
FLOOR = 1e-3
SEED = 20_231  # of the random states at the borders of units, equal in both programs


@dataclass(frozen=True)
class Proof:
    """How close the split model came to the whole one, as parts of the sizes.

    used: the parameters with a gradient in the whole model; reached[k]: those with one on stage k.
    """

    output_difference: float
    gradient_difference: float
    used: frozenset[str]
    reached: tuple[frozenset[str], ...]


def prove(model: nn.Module, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proof:
    """Compares the outputs and, for one weighted sum of them, the gradients. Raises ValueError naming what differs."""
    with untouched(model), gradients_aside(model), torch.enable_grad():
        whole = _whole(model, split, args, kwargs)
    with untouched(model), gradients_aside(model), torch.enable_grad():
        staged = _staged(model, split, args, kwargs, whole)
    if any(module.training for module in model.modules()):
        _prove_evaluation(model, split, args, kwargs)
    return Proof(
        _compare_outputs(split, whole, staged),
        _compare_gradients(whole, staged),
        frozenset(whole.gradients),
        tuple(frozenset(gradients) for gradients in staged.parts),
    )


def _prove_evaluation(model: nn.Module, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """In eval mode a forward may go another way: its outputs are compared as well."""
    with untouched(model), gradients_aside(model), torch.no_grad():
        model.eval()
        try:
            whole = _whole(model, split, args, kwargs)
            _compare_outputs(split, whole, _staged(model, split, args, kwargs, whole))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"in eval mode {error}") from error


@dataclass(frozen=True)
class _Result:
    outputs: list[torch.Tensor]
    parts: list[dict[str, torch.Tensor]]  # gradients by name, per stage

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        total: dict[str, torch.Tensor] = {}
        for part in self.parts:
            for name, gradient in part.items():
                total[name] = total[name] + gradient if name in total else gradient
        return total


def _whole(model: nn.Module, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
    output = Stage(model, split, None).run(args, kwargs, {}, {}, _seed).output
    loss = _scalar(leaves(output), leaves(output))
    if loss.requires_grad:
        torch.autograd.backward(loss)
    return _Result([leaf.detach() for leaf in leaves(output)], [take_gradients(model)])


def _staged(model: nn.Module, split: Split, args: tuple[Any, ...], kwargs: dict[str, Any], whole: _Result) -> _Result:
    values: dict[Value, torch.Tensor] = {}
    runs: list[tuple[Stage, Made]] = []
    specs = recorded_specs(split)
    for number in range(split.stages):
        stage = Stage(model, split, number)
        received = {value: values[value].detach().clone() for value in split.needs[number]}
        with pruned(model, split, number):
            made = stage.run(args, kwargs, received, specs, _seed)
        _refuse_missing(split, number, made, values)
        values.update(made.values)
        runs.append((stage, made))
    outputs = leaves(runs[-1][1].output)
    if len(outputs) != len(whole.outputs):
        raise ValueError(
            f"pp={split.stages} would be wrong: the last stage returns {len(outputs)} tensors, the whole model "
            f"{len(whole.outputs)}: some are collected on other stages. Ask the model for fewer outputs"
        )
    loss = _scalar(outputs, whole.outputs)
    parts = _backward(model, split, runs, loss) if torch.is_grad_enabled() else []
    return _Result([leaf.detach() for leaf in outputs], parts)


def _backward(
    model: nn.Module, split: Split, runs: list[tuple[Stage, Made]], loss: torch.Tensor
) -> list[dict[str, torch.Tensor]]:
    """The gradients that each stage gives to the parameters that it holds."""
    back: dict[Value, list[torch.Tensor]] = {}
    parts: list[dict[str, torch.Tensor]] = []
    for number, (stage, made) in reversed(list(enumerate(runs))):
        mine = {value: given for value, given in back.items() if value in made.edges}
        with pruned(model, split, number):  # the graph knows a weight by its Parameter, not by its value then
            for value, gradient in stage.backward(made, loss if stage.is_last else None, mine).items():
                back.setdefault(value, []).append(gradient)
        parts.insert(0, {n: g for n, g in take_gradients(model).items() if number in split.holders[n]})
    return parts


def _seed(site: int) -> None:
    torch.manual_seed(SEED + site)


def _scalar(outputs: list[torch.Tensor], like: list[torch.Tensor]) -> torch.Tensor:
    """A number in which every element has a weight of its own, those left out that are not finite in `like`."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf, reference in zip(outputs, like, strict=True):
        if leaf.is_floating_point() and leaf.numel():
            weights = torch.linspace(-7, 7, leaf.numel(), dtype=torch.float64, device=leaf.device).sin() + 0.1
            kept = torch.where(torch.isfinite(reference), leaf, torch.zeros_like(leaf)).double()
            total = total + ((kept * weights.view_as(kept)).sum() / leaf.numel() ** 0.5).cpu()
    return total


def recorded_specs(split: Split) -> Specs:
    """The shapes of the recorded run."""
    return {
        index: tuple(Spec(tuple(leaf.shape), leaf.dtype) for leaf in leaves(unit.template))
        for index, unit in enumerate(split.units)
    }


def _refuse_missing(split: Split, number: int, made: Made, earlier: dict[Value, torch.Tensor]) -> None:
    """The first tensor that is NaN although nothing received was: this stage reads something it does not have."""
    if any(_has_nan(value) for value in earlier.values()):
        return
    for value, tensor in made.values.items():
        if _has_nan(tensor):
            raise ValueError(
                f"pp={split.stages} would be wrong: {split.label(value)} is NaN on stage {number}, so it reads a "
                f"tensor of another stage that the recorded dataflow does not show. Other cuts may work: cuts=[...]"
            )


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def _compare_outputs(split: Split, whole: _Result, staged: _Result) -> float:
    worst = 0.0
    for index, (expected, found) in enumerate(zip(whole.outputs, staged.outputs, strict=True)):
        if expected.numel() == 0:
            continue
        finite = torch.isfinite(expected)
        size = _largest(expected[finite].double())
        difference = _largest(found[finite].double() - expected[finite].double()) / (size or 1.0)
        if not difference <= _tolerance(whole.outputs[index].dtype):
            raise ValueError(
                f"pp={split.stages} would be wrong: output {index} differs from the whole model's by "
                f"{difference:.1e} of its size"
                + (" (NaN: it depends on a tensor of another stage in a way that the recorded dataflow does not show)"
                   if difference != difference else "")
                + ". Other cuts may work: cuts=[...]"
            )  # fmt: skip
        worst = max(worst, difference)
    return worst


def _compare_gradients(whole: _Result, staged: _Result) -> float:
    all_expected, all_found = whole.gradients, staged.gradients
    largest = max((_largest(gradient) for gradient in all_expected.values()), default=0.0)
    worst = 0.0
    for name in {**all_expected, **all_found}:
        if name not in all_found:
            raise ValueError(
                f"the split would train wrong: {name} has a gradient in the whole model and none on the stages that "
                f"hold it. Other cuts may work: cuts=[...]"
            )
        found = all_found[name]
        expected = all_expected.get(name, torch.zeros_like(found))
        difference = _largest(found - expected) / (max(_largest(expected), FLOOR * largest) or 1.0)
        if not difference <= _tolerance(expected.dtype):
            raise ValueError(
                f"the split would train wrong: the gradient of {name} differs from the whole model's by "
                f"{difference:.1e} of its size (allowed {_tolerance(expected.dtype):.0e}). "
                f"Other cuts may work: cuts=[...]"
            )
        worst = max(worst, difference)
    return worst


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)
