"""Low-precision work on fp32 weights: the Parameters stay the masters, forwards compute with copies of them.

While a forward or a backward runs, each module finds the low copy of its Parameter, whose graph leads to the Parameter:
everything that the user keeps (`p`, `p.grad`, hooks, optimizers, `state_dict`) is fp32, and gradients add up there.
Inputs are cast on the way in, outputs to fp32 on the way out, so that the loss is computed in fp32. The loss scale of
fp16 is put on at the outputs and taken off at Parameters and inputs: a backward alone sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossal_nb.parallel.absent import absent
from colossal_nb.parallel.counting import LOSSES
from colossal_nb.parallel.scaled import scaled
from colossal_nb.parallel.structure import rebuild
from colossal_nb.parallel.tensor.vocabulary import ShardedLogits, wrap
from colossal_nb.parallel.world import World
from colossal_nb.plan import Strategy

if TYPE_CHECKING:
    from colossal_nb.parallel.handle import Parallel

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16


@dataclass(eq=False)
class LossScale:
    """The factor on gradients of fp16, and what was found of the gradients that are there now.

    good, skipped, in_row: steps since the scale changed, skipped ones, skipped ones without a good one between.
    overflow: a backward here made a gradient that is not finite. open: no step has asked about these gradients yet.
    """

    value: float = FIRST_SCALE
    good: int = 0
    skipped: int = 0
    in_row: int = 0
    overflow: bool = False
    open: bool = False
    skips: bool = False


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a module keeps a tensor, and what stands there while the model runs."""

    holder: dict[str, Any]
    key: str
    own: Tensor
    low: Tensor


@dataclass(eq=False)
class Precision:
    """Of one model. `low` is None under fp32, where nothing here does anything.

    weights: the low copies by id of their Parameter. lasting: buffers that the model writes into, which stay fp32.
    """

    low: torch.dtype | None = None
    scale: LossScale | None = None
    weights: dict[int, Tensor] = field(default_factory=dict)
    lasting: set[str] = field(default_factory=set)
    _places: list[_Place] = field(default_factory=list)
    _flat: list[nn.RNNBase] = field(default_factory=list)
    _installed: bool = False

    @classmethod
    def of(cls, strategy: Strategy) -> Precision:
        """What a strategy asks for."""
        low = LOW.get(strategy.precision)
        return cls(low, LossScale() if low is torch.float16 else None)

    def twin(self) -> Precision:
        """For a copy of the model."""
        fresh = Precision(self.low, None if self.scale is None else LossScale())
        fresh.go_on(self.position())
        return fresh

    def moved(self, strategy: Strategy) -> Precision:
        """For the same model under another strategy."""
        fresh = Precision.of(strategy)
        fresh.go_on(self.position())
        return fresh

    def position(self) -> list[float] | None:
        """Where the loss scale stands, as plain numbers."""
        return None if self.scale is None else [self.scale.value, self.scale.good]

    def go_on(self, position: list[float] | None) -> None:
        """Stand there; without a scale on either side nothing happens."""
        if self.scale is not None and position is not None:
            self.scale = LossScale(float(position[0]), int(position[1]))

    def dtype_of(self, p: Tensor) -> torch.dtype:
        """In which a forward sees a parameter."""
        low = self.weights.get(id(p))
        return p.dtype if low is None else low.dtype

    def lower(self, value: Any) -> Any:
        """Inputs as the model sees them."""
        return value if self.low is None else rebuild(value, lambda x: self._lower(x, self.low))

    def raised(self, value: Any) -> Any:
        """Outputs as the loss and the user see them."""
        return value if self.low is None else rebuild(value, self._raise)

    def _lower(self, x: Tensor, dtype: torch.dtype | None) -> Tensor:
        if not x.is_floating_point():
            return x
        if self.scale is not None and x.requires_grad:
            x = scaled(x, 1 / self.scale.value)
        return x if dtype is None else x.to(dtype)

    def _raise(self, x: Tensor) -> Tensor:
        if isinstance(x, ShardedLogits):
            return wrap(self._raise(x.local), x.rows, x.class_dim)
        if not x.is_floating_point():
            return x
        x = x.float() if x.dtype in LOW.values() else x
        return scaled(x, self.scale.value) if self.scale is not None and x.requires_grad else x

    @contextmanager
    def working(self, parallel: Parallel) -> Iterator[None]:
        """Around forwards and backwards: the copies are made anew, since anybody may have written into the weights."""
        if self.low is None:
            yield
            return
        self.refresh(parallel)
        versions = [-1 if place.low.is_inference() else place.low._version for place in self._places]
        try:
            yield
        finally:
            self._keep_buffers(parallel, versions)
            self._places, self._flat = [], []
            for p, low in self.weights.items():
                self.weights[p] = low.detach()  # the memory stays, the graph goes

    def refresh(self, parallel: Parallel) -> None:
        """Make the low copies from the weights of now; one old copy at a time gives way."""
        if self.low is None:
            return
        fresh: dict[int, Tensor] = {}
        held = {id(p) for p in parallel.held().values()}
        modules = dict(parallel.model.named_modules())
        self._flat = [module for module in modules.values() if isinstance(module, nn.RNNBase)]
        self._places = []
        for prefix, module in modules.items():
            self._places += self._weights_of(module, fresh, held)
            self._places += self._buffers_of(module, prefix)
        self.weights = {p: low for p, low in fresh.items() if p in held and low.dtype == self.low}
        ledger = World.current().ledger
        for name, p in parallel.parameters.items():
            if id(p) in self.weights:
                ledger.track(self.weights[id(p)], "parameter", name)
        if self.scale is not None:
            self.scale.open = True

    def _weights_of(self, module: nn.Module, fresh: dict[int, Tensor], held: set[int]) -> Iterator[_Place]:
        assert self.low is not None
        dtype = None if _has_statistics(module) else self.low
        for key, p in module._parameters.items():
            if p is not None and p.is_floating_point():
                if id(p) not in fresh:
                    self.weights.pop(id(p), None)
                    fresh[id(p)] = self._lower(p, dtype) if id(p) in held else absent(p.shape, self.low, p.device)
                yield _Place(module._parameters, key, p, fresh[id(p)])

    def _buffers_of(self, module: nn.Module, prefix: str) -> Iterator[_Place]:
        for key, buffer in () if _has_statistics(module) else module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and f"{prefix}.{key}" not in self.lasting:
                yield _Place(module._buffers, key, buffer, buffer.detach().to(self.low))

    def _keep_buffers(self, parallel: Parallel, versions: list[int]) -> None:
        """A buffer whose copy was written into gets the new values, and is left in fp32 from now on."""
        names = {id(buffer): name for name, buffer in parallel.model.named_buffers()}
        for place, version in zip(self._places, versions, strict=True):
            if id(place.own) in names and version >= 0 and place.low._version != version:
                with torch.no_grad():
                    place.own.copy_(place.low)
                prefix, _, key = names[id(place.own)].rpartition(".")
                self.lasting.add(f"{prefix}.{key}")

    @contextmanager
    def installed(self, low: bool = True) -> Iterator[None]:
        """Inside `working`: whether modules find the low copies (for the model) or the masters (for the loss)."""
        before = self._installed
        self._install(low)
        try:
            yield
        finally:
            self._install(before)

    @property
    def places(self) -> tuple[list[_Place], list[nn.RNNBase]]:
        """What a forward that runs again in a backward needs for `again`."""
        return self._places, self._flat

    @contextmanager
    def again(self, places: tuple[list[_Place], list[nn.RNNBase]]) -> Iterator[None]:
        """Inside, modules find the copies that they found in a forward, also where its `working` has ended."""
        if self._installed:
            yield
            return
        before, (self._places, self._flat) = self.places, places
        try:
            with self.installed():
                yield
        finally:
            self._places, self._flat = before

    def _install(self, low: bool) -> None:
        if low == self._installed:
            return
        for place in self._places:
            place.holder[place.key] = place.low if low else place.own
        for module in self._flat:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
        self._installed = low

    def own_losses(self) -> Any:
        """Around a forward that computes its own loss: torch's losses are computed in fp32."""
        return nullcontext() if self.low is None else _LossesInFp32()


def _has_statistics(module: nn.Module) -> bool:
    """Batch norms: their kernels take low inputs, and weights in fp32 beside the statistics in fp32."""
    return getattr(module, "running_mean", None) is not None


class _LossesInFp32(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            args, kwargs = rebuild((args, kwargs), lambda x: x.float() if x.dtype in LOW.values() else x)
        return func(*args, **kwargs)


def raise_masters(parallel: Parallel) -> None:
    """Weights that came in low precision, and states that an optimizer has of them, become fp32."""
    if parallel.precision.low is None:
        return
    for p in parallel.parameters.values():
        if p.dtype in LOW.values():
            p.data = p.data.float()
            p.grad = None
    for optimizer in parallel.optimizers:
        for state in optimizer.state.values():
            state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in LOW.values()})
