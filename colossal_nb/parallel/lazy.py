"""`with cnb.lazy(): model = GPT(...)`: a model without memory, whose weights are those of eager construction.

Inside the block operations are recorded instead of kept (`recipe`); what asks for values while the model is built gets
them. At its end parameters and buffers of modules stay empty, everything else gets its values. `parallelize` fills the
model. Numbers are drawn as eagerly as always, one tensor at a time, so that the random state goes on alike.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.recipe import Place, Random, Recipe, Step, room
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.trace import Storage, storage_of, written
from colossal_nb.parallel.unread import VALUELESS
from colossal_nb.validation import called_as

GIB = 1 << 30
SMALL_BYTES = 4096  # tensors up to this size are simply built
aten = torch.ops.aten
_AFRESH = {aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar}
_PROPERTIES = (
    "is_leaf", "grad", "grad_fn", "retains_grad", "layout", "is_sparse", "is_quantized", "is_meta", "is_nested",
    "nbytes", "itemsize", "_version",
)  # fmt: skip
_METHODS = (
    "requires_grad_", "is_complex", "is_contiguous", "stride", "storage_offset", "nelement", "register_hook",
    "register_post_accumulate_grad_hook",
)  # fmt: skip
_FORM: set[Any] = VALUELESS | {torch.is_complex, torch.is_floating_point}
_FORM |= {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, name) for name in _METHODS}
_FORM |= {getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")}


class Waiting(Tensor):
    """A tensor without values. It becomes its own class again when it gets them."""

    _recipe: Recipe

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__repr__:
            (tensor,) = args
            return f"no values yet: {list(tensor.shape)}, {tensor.dtype}"
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} needs values that this model does not have yet: it was built under "
            "cnb.lazy(). Call model, optimizer = cnb.parallelize(model, optimizer) first, which gives it its weights"
        )


@cache
def _waiting(own: type[Tensor]) -> type[Tensor]:
    return type(f"Waiting{own.__name__}", (Waiting, own), {})


@called_as("with cnb.lazy(): model = GPT(...)")
@contextmanager
def lazy() -> Iterator[None]:
    """Build models inside without memory for their weights, on any number of ranks.

    `parallelize` gives them the weights of eager construction from the same seed, bit for bit. Until then an optimizer
    may be made, shapes may be asked for; a use of values raises RuntimeError. Afterwards random states are as if the
    block had not been there. Tensors of up to 4 KiB, and tensors on other devices than the CPU, are simply built.
    """
    recipe = Recipe()
    try:
        with _Values(recipe), _Recording(recipe):
            yield
    finally:
        _end(recipe)


def fill(model: nn.Module) -> None:
    """Give a model, and what shares memory with it, its values. Nothing happens to one that has them."""
    wanted: dict[Recipe, set[Storage]] = defaultdict(set)
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, Waiting):
            wanted[tensor._recipe].add(_storage(tensor))
    for recipe, storages in wanted.items():
        recipe.fill(storages)
        for reference, own in recipe.waiting:
            waiting = reference()
            if isinstance(waiting, Waiting) and _storage(waiting) in storages:
                del waiting._recipe
                cast("Tensor", waiting).__class__ = own
        recipe.waiting = [(reference, own) for reference, own in recipe.waiting if isinstance(reference(), Waiting)]


def is_waiting(model: nn.Module) -> bool:
    """Whether some of a model's tensors have no values."""
    return any(isinstance(tensor, Waiting) for tensor in (*model.parameters(), *model.buffers()))


def require_room(model: nn.Module, group: Group) -> None:
    """Raise ValueError, on all ranks, when the copies that they are about to build are larger than what is free."""
    each_bytes = sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    free = torch.tensor([free_bytes()])
    group.run("all_reduce", [free], reduce="min", of="free memory")
    if each_bytes * group.size > int(free):
        raise ValueError(
            f"{group.size} ranks are about to build {group.size} copies of this {type(model).__name__} of "
            f"{each_bytes / GIB:.2f} GiB each, {each_bytes * group.size / GIB:.2f} GiB together, and "
            f"{int(free) / GIB:.2f} GiB of this host's memory are free: take fewer ranks, or a smaller model"
        )


def free_bytes() -> int:
    """What the host, and the cgroup where there is one, still has for new memory."""
    found = [sys.maxsize]
    with suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # ValueError: "max", no limit
        folder = Path("/sys/fs/cgroup")
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().splitlines()
        cached = [int(line.split()[1]) for line in lines if line.startswith("inactive_file ")]
        found.append(limit - used + sum(cached))
    return min(found)


def _storage(tensor: Tensor) -> Storage:
    with torch._C.DisableTorchFunctionSubclass():
        return storage_of(tensor)


def _end(recipe: Recipe) -> None:
    """Parameters and buffers of modules wait from here on; other tensors get their values."""
    if not recipe.sizes:
        return
    alive = gc.get_objects()
    found = [each for each in alive if issubclass(type(each), Tensor) and recipe.knows(each)]
    modules = [vars(each) for each in alive if issubclass(type(each), nn.Module)]
    owned = [t for own in modules for kind in ("_parameters", "_buffers") for t in own.get(kind, {}).values()]
    waiting = {storage_of(tensor) for tensor in owned if tensor is not None} & recipe.sizes.keys()
    recipe.fill({storage_of(tensor) for tensor in found} - waiting)
    for tensor in found:
        if storage_of(tensor) in waiting:
            recipe.waiting.append((weakref.ref(tensor), type(tensor)))
            tensor.__class__ = _waiting(cast("Any", type(tensor)))
            cast("Waiting", tensor)._recipe = recipe


class _Values(TorchFunctionMode):
    """What reads or copies memory past torch's operations gets a tensor that has some."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__deepcopy__ and self.recipe.knows(args[0]):
            source, memo = args
            memo[id(source)] = source.detach().clone().requires_grad_(source.requires_grad)
            return memo[id(source)]
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist) and self.recipe.knows(args[0]):
            with _disable_current_modes():
                return _unwritable(func(self.recipe.with_values(args[0].detach()), *args[1:], **kwargs))
        return func(*args, **kwargs)


def _unwritable(value: Any) -> Any:
    """Writing into an array would not reach the tensor."""
    if hasattr(value, "flags"):
        value.flags.writeable = False
    return value


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what tensors are made of, and empties them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recipe = recipe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return self._view(func, args, kwargs)
        targets = written(func, args, kwargs)
        random = _random(func, kwargs)
        if any(self.recipe.knows(each) for each in targets):
            return self._write(func, args, kwargs, targets, random)
        result = func(*self.recipe.with_values(args), **self.recipe.with_values(kwargs))
        fresh = {storage_of(each): each for each in leaves(result) if self._is_large(each)}
        for each in leaves((args, kwargs)):
            fresh.pop(storage_of(each), None)
        if fresh:
            made = tuple(Place.of(each) if storage_of(each) in fresh else None for each in leaves(result))
            reads, (args, kwargs) = self.recipe.keys((args, kwargs)), self.recipe.placed((args, kwargs))
            for each in fresh.values():
                self.recipe.empty(each)
            self.recipe.steps.append(Step(func, args, kwargs, made, reads, frozenset(fresh), random, afresh=True))
        return result

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Torch compares a view with the size of its storage; it gets one for that moment, which nobody touches."""
        keys = {storage_of(each) for each in leaves((args, kwargs))} & self.recipe.sizes.keys()
        try:
            for key in keys:
                self.recipe.storages[key].resize_(self.recipe.sizes[key])
            return func(*args, **kwargs)
        finally:
            for key in keys:
                self.recipe.storages[key].resize_(0)

    def _write(self, func: Any, args: Any, kwargs: Any, targets: list[Tensor], random: Random | None) -> Any:
        """Recorded only, unless numbers are to be drawn or ordinary tensors are written as well."""
        recipe, keys, writes = self.recipe, self.recipe.keys((args, kwargs)), self.recipe.keys(targets)
        afresh = func in _AFRESH and targets[0].numel() * targets[0].element_size() == recipe.sizes[next(iter(writes))]
        given = recipe.placed((args, kwargs))
        if afresh and random is not None:
            (key,) = writes
            func(Place.of(targets[0]).on(room(recipe.sizes[key])), *args[1:], **kwargs)
        elif random is not None or not all(recipe.knows(each) for each in targets):
            func(*recipe.with_values(args), **recipe.with_values(kwargs))
        recipe.steps.append(Step(func, given[0], given[1], (), keys, writes, random, afresh))
        results = targets[: len(func._schema.returns)]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _is_large(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        return tensor.untyped_storage().nbytes() > SMALL_BYTES and not self.recipe.knows(tensor)


def _random(func: Any, kwargs: dict[str, Any]) -> Random | None:
    """The state that an operation draws from."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = kwargs.get("generator") or torch.default_generator
    return generator, generator.get_state()
