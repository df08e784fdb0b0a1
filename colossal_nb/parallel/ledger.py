"""Whose bytes are where: every tensor that the runtime knows, by category, keyed by its storage.

States (parameters, gradients, optimizer) are told; activations are what autograd saves for the backward, seen by
hooks on saved tensors, which cost nothing measurable. Temporaries inside an operation are not seen here.
"""

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_on_all

from colossal_nb.parallel.compat import top_saved_tensors_hooks
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.parallel.parameter_hooks import ours
from colossal_nb.record.events import CATEGORIES
from colossal_nb.record.recorder import Recorder

WHERE = ("device", "host", "nvme")
# A sample for each peak that is this much higher than the last one recorded.
_HIGHER = 1.01


class OutOfDeviceMemory(MemoryError):
    """A tensor passed the capacity of this rank's device: `rank`, `category`, `name`, and sizes in bytes."""

    def __init__(self, rank: int, category: str, name: str, size_bytes: int, used_bytes: int, capacity_bytes: int):
        self.rank, self.category, self.name = rank, category, name
        self.size_bytes, self.used_bytes, self.capacity_bytes = size_bytes, used_bytes, capacity_bytes
        super().__init__(rank, category, name, size_bytes, used_bytes, capacity_bytes)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is out of device memory: {self.category} {self.name} needs {mib(self.size_bytes)}, "
            f"{mib(self.used_bytes)} of {mib(self.capacity_bytes)} are in use"
        )


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Memory:
    """Bytes by category at one instant."""

    parameter: int = 0
    gradient: int = 0
    optimizer: int = 0
    activation: int = 0
    buffer: int = 0
    communication: int = 0
    temporary: int = 0
    unknown: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_category().values())

    def by_category(self) -> dict[str, int]:
        return {category: getattr(self, category) for category in CATEGORIES}


@dataclass(frozen=True)
class Held:
    """One storage that is alive."""

    category: str
    name: str
    where: str
    size_bytes: int


class _Entry(weakref.ref[Any]):
    """A weak reference to a storage, with what is known of it."""

    __slots__ = ("category", "key", "name", "shape", "size", "where")
    key: int
    category: str
    name: str
    shape: torch.Size | None
    where: str
    size: int

    def held(self) -> Held:
        name = self.name if self.shape is None else f"{self.name} {list(self.shape)}"
        return Held(self.category, name, self.where, self.size)


class Ledger:
    """What is alive on this rank. Any thread may ask; tensors leave by themselves when they are freed."""

    def __init__(self, rank: int, recorder: Recorder, capacity_bytes: int | None = None) -> None:
        self.rank, self.recorder, self.capacity_bytes = rank, recorder, capacity_bytes
        self._held: dict[int, _Entry] = {}
        self._bytes = {where: dict.fromkeys(CATEGORIES, 0) for where in WHERE}
        self._total = dict.fromkeys(WHERE, 0)
        self._peak = dict.fromkeys(WHERE, 0)
        self._sampled = dict.fromkeys(WHERE, 0)
        self._looks_away = False
        self._lock = threading.RLock()  # a storage may be freed while we write
        self._modules: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._inside: list[str] = []
        self._graded: dict[int, weakref.ref[Tensor]] = {}

    def track(self, tensor: Tensor, category: str, name: str, where: str = "device") -> None:
        """Count a tensor's storage once, whatever views it; again with another category moves it there.

        Raises OutOfDeviceMemory where the device's total passes the capacity.
        """
        storage = tensor.untyped_storage()
        known = self._held.get(storage._cdata)
        if known is not None:
            if known.size == storage.nbytes() and known.category == category and known.where == where:
                return
            with self._lock:
                self._forget(known)
        self._add(storage, category, name, None, where)

    def _add(self, storage: Any, category: str, name: str, shape: torch.Size | None, where: str) -> None:
        if self._looks_away:
            return
        entry = _Entry(storage, self._freed)
        entry.key, entry.size = storage._cdata, storage.nbytes()
        entry.category, entry.name, entry.shape, entry.where = category, name, shape, where
        size = entry.size
        with self._lock:
            total = self._total[where] + size
            if where == "device" and self.capacity_bytes is not None and total > self.capacity_bytes:
                self._write(where)
                name = entry.held().name
                raise OutOfDeviceMemory(self.rank, category, name, size, total - size, self.capacity_bytes)
            self._held[entry.key] = entry
            self._bytes[where][category] += size
            self._total[where] = total
            if total > self._peak[where]:
                self._peak[where] = total
                if total > _HIGHER * self._sampled[where]:
                    self._write(where)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, what is new is not counted: it is no part of the user's run."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def _freed(self, entry: _Entry) -> None:
        with self._lock:
            if self._held.get(entry.key) is entry:
                self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._held[entry.key]
        self._bytes[entry.where][entry.category] -= entry.size
        self._total[entry.where] -= entry.size

    def watch(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        prefix: str = "",
        masters: Container[int] = (),
    ) -> None:
        """Count a model's parameters and buffers, its gradients as they come, and the optimizer's states.

        Again after parameters were replaced or cut: what is known already stays as it is. `masters`: the ids of
        parameters that the optimizer alone works on, while forwards have copies of lower precision.
        """
        for name, module in model.named_modules(prefix=prefix):
            self._modules[id(module)] = weakref.ref(module), name or type(model).__name__
        for name, parameter in model.named_parameters(prefix=prefix):
            layout = layout_of(parameter)
            if layout is None or layout.local_shape(self.rank) is not None:  # else the placeholder of another stage
                self.track(parameter, "optimizer" if id(parameter) in masters else "parameter", name)
            self._watch_gradient(parameter, name)
        for name, buffer in model.named_buffers(prefix=prefix):
            self.track(buffer, "buffer", name)
        if optimizer is not None:
            self.watch_states(optimizer, model, prefix)

    def _watch_gradient(self, parameter: Tensor, name: str) -> None:
        if parameter.grad is not None:
            self.track(parameter.grad, "gradient", name)
        hooked = self._graded.get(id(parameter))
        if parameter.requires_grad and (hooked is None or hooked() is not parameter):
            self._graded[id(parameter)] = weakref.ref(parameter)
            hook = _gradient_hook(weakref.ref(self), name)
            parameter.register_post_accumulate_grad_hook(ours(hook))  # type: ignore[no-untyped-call]

    def watch_states(self, optimizer: torch.optim.Optimizer, model: nn.Module, prefix: str = "") -> None:
        """Count what the optimizer keeps; call after its step (states are made in the first one)."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters(prefix=prefix)}
        for parameter, state in optimizer.state.items():
            for field, value in state.items():
                if isinstance(value, Tensor):
                    self.track(value, "optimizer", f"{names.get(parameter, 'unnamed')} {field}")

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Count what autograd saves inside, named by the module that was running."""
        with self._naming(), torch.autograd.graph.saved_tensors_hooks(self._saved, _as_it_is):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Count what is saved of a forward that a checkpoint runs again, whose own hooks go on."""
        inner = top_saved_tensors_hooks()
        if inner is None:
            yield
            return
        pack, unpack = inner
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: pack(self._saved(tensor)), unpack):
            yield

    def _saved(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            inside = self._inside[-1] if self._inside else "outside modules"
            self._add(storage, "activation", inside, tensor.shape, "device")
        return tensor

    @contextmanager
    def _naming(self) -> Iterator[None]:
        depth = len(self._inside)
        enter = hooks_on_all.register_module_forward_pre_hook(self._enter)
        leave = hooks_on_all.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()
            del self._inside[depth:]

    def _enter(self, module: nn.Module, args: Any) -> None:
        known = self._modules.get(id(module))
        if known is not None and known[0]() is module:
            self._inside.append(known[1])
        else:
            self._inside.append(self._inside[-1] if self._inside else type(module).__name__)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside:
            self._inside.pop()

    def totals(self, where: str = "device") -> Memory:
        """Bytes by category now."""
        with self._lock:
            return Memory(**self._bytes[where])

    def peak_bytes(self, where: str = "device") -> int:
        """The highest total since the beginning or `reset_peak`."""
        return self._peak[where]

    def reset_peak(self) -> None:
        """Begin to look for the peak anew, from what is alive."""
        with self._lock:
            self._peak, self._sampled = dict(self._total), dict(self._total)

    def held(self, where: str = "device") -> list[Held]:
        """Every storage that is alive, largest first."""
        with self._lock:
            found = [entry.held() for entry in self._held.values() if entry.where == where]
        return sorted(found, key=lambda held: -held.size_bytes)

    def sample(self) -> None:
        """Write the bytes of every place that holds any into the record (at the end of a forward or a backward)."""
        with self._lock:
            for where in WHERE:
                if self._total[where] or self._sampled[where]:
                    self._write(where)

    def _write(self, where: str) -> None:
        self._sampled[where] = max(self._sampled[where], self._total[where])
        self.recorder.memory(where, self._bytes[where])


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _gradient_hook(ledger: "weakref.ref[Ledger]", name: str) -> Callable[[Tensor], None]:
    def came(parameter: Tensor) -> None:
        alive = ledger()
        if alive is not None and parameter.grad is not None:
            alive.track(parameter.grad, "gradient", name)

    return came
