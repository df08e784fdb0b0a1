"""One forward, recorded: which operations touched which storages, inside which module calls.

Pipelines and tensor parallelism both reason on this record and on nothing else. A tensor is known by its *storage*, so
views and in-place operations need no special care: `x.view(...)` and `x.add_(...)` keep the key of `x`.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from colossal_nb.parallel.structure import leaves, rebuild

Storage = int


@dataclass(eq=False)
class Call:
    """One call of one module. `args`, `kwargs` and `output` hold the tensors of the recorded run, without their graph.

    `nth` counts the calls of the same module in this forward; `flops` includes the calls inside and counts 1 for
    every operation besides the multiplications and additions of the known ones.
    """

    index: int
    name: str
    module: nn.Module
    nth: int
    parent: Call | None
    has_parameters: bool
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    children: list[Call] = field(default_factory=list)
    flops: int = 0

    def descendants(self) -> Iterator[Call]:
        """The calls inside this one, at any depth, in call order."""
        for child in self.children:
            yield child
            yield from child.descendants()

    def __repr__(self) -> str:
        return f"Call({self.name or '(model)'}, {type(self.module).__name__}, nth={self.nth}, flops={self.flops})"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: the storages it read, those of its results, and those of its inputs that it wrote into."""

    call: Call | None
    func: Any
    inputs: tuple[Storage, ...]
    outputs: tuple[Storage, ...]
    mutated: tuple[Storage, ...]


@dataclass(frozen=True, slots=True)
class Enter:
    """A module call begins; `inputs` are the storages of the tensors handed to it."""

    call: Call
    inputs: tuple[Storage, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """A module call returns; `outputs` are the storages of its tensors, in the order of `structure.leaves`."""

    call: Call
    outputs: tuple[Storage, ...]


@dataclass(eq=False)
class Trace:
    """What one forward did. Holds the tensors of that run, so that storages stay distinct: drop it when done."""

    log: list[Op | Enter | Exit]
    calls: list[Call]
    parameters: dict[Storage, str]
    buffers: dict[Storage, str]
    inputs: tuple[Storage, ...]
    outputs: tuple[Storage, ...]
    output: Any
    alive: list[Any]

    @property
    def root(self) -> Call:
        """The call of the model itself."""
        return self.calls[0]

    def named(self, name: str) -> list[Call]:
        """The calls of the module with this path, in order."""
        return [call for call in self.calls if call.name == name]


def storage_of(tensor: torch.Tensor) -> Storage:
    """The key of a tensor's storage, 0 for the few kinds of tensors that have none (sparse, nested)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def trace(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """Runs `model(*args, **kwargs)` once and records it; model, inputs and random states are left as they were.

    Gradients are on as the caller has them, so that `requires_grad` of the recorded outputs is true to a training
    step. Raises whatever the model's own forward raises.
    """
    args, kwargs = rebuild((args, dict(kwargs or {})), _own_copy)
    recorder = _Recorder()
    with untouched(model), wrapped_forwards(model, recorder.wrap), recorder:
        output = model(*args, **kwargs)
    for call in recorder.calls:
        call.args, call.kwargs, call.output = rebuild((call.args, call.kwargs, call.output), _without_graph)
    return Trace(
        log=recorder.log,
        calls=recorder.calls,
        parameters=_storages(model.named_parameters()),
        buffers=_storages(model.named_buffers()),
        inputs=tuple(storage_of(tensor) for tensor in leaves((args, kwargs))),
        outputs=tuple(storage_of(tensor) for tensor in leaves(output)),
        output=rebuild(output, _without_graph),
        alive=recorder.alive,
    )


def wrapped_forwards(
    model: nn.Module, wrap: Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any] | None]
) -> AbstractContextManager[None]:
    """Inside the block each module runs `wrap(name, module, forward)` in the place of its forward, unless that is None.

    A forward that somebody else has already put on a module is wrapped in its turn and stands there again afterwards.
    """
    wrapped = ((module, wrap(name, module, module.forward)) for name, module in model.named_modules())
    return replaced_forwards([(module, forward) for module, forward in wrapped if forward is not None])


@contextmanager
def replaced_forwards(replacements: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside the block each of the modules runs another forward, which keeps the signature of its own."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, forward in replacements:
            before.append((module, module.__dict__.get("forward")))
            own = module.forward
            module.__dict__["forward"] = forward if inspect.ismethod(forward) else functools.wraps(own)(forward)
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block dropout is off in every module; afterwards each is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """What runs inside leaves no trace: buffers, attributes of the modules and random states are put back."""
    attributes = [(module, dict(module.__dict__)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    indices = sorted(device.index or 0 for device in devices if device.type == "cuda")
    with torch.random.fork_rng(devices=indices):
        try:
            yield
        finally:
            for module, before in attributes:
                module.__dict__.clear()
                module.__dict__.update(before)
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.data.copy_(value)  # of no version: a graph made before may still read the buffer


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, and every forward through `wrap`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[Op | Enter | Exit] = []
        self.calls: list[Call] = []
        self.alive: list[Any] = []
        self._stack: list[Call] = []
        self._times: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        flops = 1 + _flops_of(func, args, kwargs, result)
        for call in self._stack:
            call.flops += flops
        operation = Op(
            self._stack[-1] if self._stack else None,
            func,
            self._keys((args, kwargs)),
            self._keys(result),
            tuple(storage_of(tensor) for tensor in written(func, args, kwargs)),
        )
        self.log.append(operation)
        return result

    def wrap(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that notes its call. The same module under two names is one module with its first name."""
        has_parameters = next(module.parameters(), None) is not None

        def recorded(*args: Any, **kwargs: Any) -> Any:
            parent = self._stack[-1] if self._stack else None
            call = Call(len(self.calls), name, module, self._times[name], parent, has_parameters, args, kwargs)
            self._times[name] += 1
            self.calls.append(call)
            if parent is not None:
                parent.children.append(call)
            self._stack.append(call)
            self.log.append(Enter(call, self._keys((args, kwargs))))
            try:
                call.output = forward(*args, **kwargs)
            finally:
                self._stack.pop()
            self.log.append(Exit(call, self._keys(call.output)))
            return call.output

        return recorded

    def _keys(self, value: Any) -> tuple[Storage, ...]:
        """The storages inside `value`. They are kept alive: a freed address would be given to another tensor."""
        tensors = leaves(value)
        keys = tuple(storage_of(tensor) for tensor in tensors)
        self.alive.extend(tensor.untyped_storage() for tensor, key in zip(tensors, keys, strict=True) if key)
        return keys


def _flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    if count is None:
        return 0
    try:
        return int(count(*args, **kwargs, out_val=result))
    except (TypeError, ValueError, AssertionError):
        return 0  # a formula that does not know this overload: the operation counts as one


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensor arguments that the operation's schema declares as written."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += leaves(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def _storages(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[Storage, str]:
    found: dict[Storage, str] = {}
    for name, tensor in tensors:
        found.setdefault(storage_of(tensor), name)
    return found


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A forward may write into its inputs; the caller's stay as they are."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
