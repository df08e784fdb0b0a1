"""What may be dealt to ranks, found by perturbation: push one output feature of the columns, see which input features
of the row move. No layout table is needed: heads, key/value groups, fused qkv and gate/up couples all come out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel.structure import rebuild
from colossal_nb.parallel.trace import Call, Trace

PUSHES = (1.0, -1.0, 10.0, -10.0, 100.0, -100.0)  # a dead ReLU needs a larger push, in the right direction
ROWS_AT_ONCE = 256


class _Arrived(BaseException):
    """The row's input is there: the rest of the forward is not needed."""


@dataclass(frozen=True)
class Region:
    """The module that leads from the columns to the row, ready to be run with other column outputs.

    `values` are the recorded outputs of the columns, `constants` those of the calls that end before the first column.
    """

    call: Call
    columns: tuple[str, ...]
    row: str
    values: dict[str, Tensor]
    constants: dict[str, list[Any]]

    @property
    def owners(self) -> Tensor:
        """For each output feature of the columns, counted through, the number of its column."""
        sizes = torch.tensor([value.shape[-1] for value in self.values.values()])
        return torch.arange(len(sizes)).repeat_interleave(sizes)

    def run(self, values: dict[str, Tensor], change: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """What arrives at the row when the columns give `values`; `change` maps each other tensor that enters."""
        arrived: list[Tensor] = []

        def stop(input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
            arrived.append(input)
            raise _Arrived

        forwards: dict[str, Callable[..., Any]] = {self.row: stop}
        for name, value in values.items():
            forwards[name] = lambda *_, _value=value, **__: _value.clone()
        for name, outputs in self.constants.items():
            left = iter(outputs)
            forwards[name] = lambda *_, _left=left, **__: rebuild(next(_left), change)
        args, kwargs = rebuild((self.call.args, self.call.kwargs), change)
        with replaced_forwards(self.call.module, self.call.name, forwards):
            try:
                self.call.module(*args, **kwargs)
            except _Arrived:
                return arrived[0]
        raise RuntimeError(f"{self.row} was not reached again")


@contextmanager
def replaced_forwards(top: nn.Module, prefix: str, forwards: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside the block the named modules below `top` (itself named `prefix`) run these forwards."""
    start = len(prefix) + 1 if prefix else 0
    modules = [top.get_submodule(name[start:]) for name in forwards]
    before = [module.__dict__.get("forward") for module in modules]
    try:
        for module, forward in zip(modules, forwards.values(), strict=True):
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own


def region_of(record: Trace, columns: Sequence[str], row: str) -> Region:
    """The innermost recorded call that contains the columns and the row."""
    row_call = record.named(row)[0]
    call = row_call.parent
    while call is not None:
        inside = {inner.name: inner for inner in reversed(list(call.descendants())) if inner.index < row_call.index}
        if all(name in inside for name in columns):
            break
        call = call.parent
    assert call is not None, "columns reach the row, so the model's own call contains both"
    first = min(inside[name].index for name in columns)
    constants: dict[str, list[Any]] = {}
    for early in call.children:
        if early.index < first and not any(inner.index >= first for inner in (early, *early.descendants())):
            constants.setdefault(early.name, []).append(early.output)
    values = {name: inside[name].output.detach() for name in columns}
    later = {inner.name for inner in call.descendants() if inner.index >= first}
    constants = {name: outputs for name, outputs in constants.items() if name not in later}
    return Region(call, tuple(columns), row, values, constants)


def reach(region: Region) -> Tensor:
    """(row's input features, columns' output features) bool: which feature of the columns moves which of the row."""
    features = [(name, i) for name, value in region.values.items() for i in range(value.shape[-1])]
    try:
        return _reach(region, features, ROWS_AT_ONCE)
    except _RowsMixError:
        return _reach(region, features, 1)


class _RowsMixError(Exception):
    """Samples of one batch meet each other here: probe one feature per run."""


def _reach(region: Region, features: list[tuple[str, int]], at_once: int) -> Tensor:
    base = region.run(region.values).detach()
    found = torch.zeros(base.shape[-1], len(features), dtype=torch.bool)
    left = list(range(len(features)))
    generator = torch.Generator().manual_seed(0)
    for push in PUSHES:
        for start in range(0, len(left), at_once):
            numbers = left[start : start + at_once]
            found[:, numbers] |= _moved(region, base, [features[i] for i in numbers], push, generator, at_once > 1)
        left = [i for i in left if not found[:, i].any()]
    return found


def _moved(
    region: Region, base: Tensor, pushed: list[tuple[str, int]], push: float, generator: torch.Generator, batched: bool
) -> Tensor:
    """Per pushed feature the row's features that move. Batched: one sample each, an untouched one at either end."""
    samples = next(iter(region.values.values())).shape[0]
    rows = len(pushed) + 2

    def spread(tensor: Tensor) -> Tensor:
        same = batched and tensor.ndim > 0 and tensor.shape[0] == samples
        return (tensor[:1].expand(rows, *tensor.shape[1:]) if same else tensor).detach().clone()

    values = {name: spread(value) for name, value in region.values.items()}
    for name, value in values.items():
        own = [(row, feature) for row, (owner, feature) in enumerate(pushed, start=1) if owner == name]
        if own:
            at = tuple(torch.tensor(own).T) if batched else (slice(None), torch.tensor([feature for _, feature in own]))
            place = (at[0], ..., at[1])
            value[place] += push * (0.5 + torch.rand(value[place].shape, generator=generator)).to(value)
    try:
        arrived = region.run(values, spread).detach()
    except (RuntimeError, ValueError, IndexError):
        if batched:
            raise _RowsMixError from None
        raise
    if not batched:
        return ((arrived - base).abs() > _noise(base)).reshape(-1, base.shape[-1]).any(0).unsqueeze(1)
    if arrived.shape[0] != rows:
        raise _RowsMixError
    moved = ((arrived - base[:1]).abs() > _noise(base)).reshape(rows, -1, base.shape[-1]).any(1)
    if moved[0].any() or moved[-1].any():
        raise _RowsMixError
    return moved[1:-1].T


def _noise(base: Tensor) -> float:
    """Below this a difference may be rounding: samples of one batch need not take the same path through a kernel."""
    return 1e-5 * max(float(base.abs().max()), 1e-3)
