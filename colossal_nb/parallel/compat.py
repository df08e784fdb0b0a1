"""What differs between the versions of torch that we support, and what is private there; nothing else may touch it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Untyped bases: torch's stubs of these lag behind its classes.
ProcessGroup: Any = dist.ProcessGroup
Store: Any = c10d.Store
_dist: Any = dist
_c10d: Any = c10d
_gloo: Any = dist.ProcessGroupGloo

# Texts of gloo's errors when the connection to another rank is gone (as opposed to a call that it refuses).
_DISCONNECTED = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Socket is not connected",
    "Transport endpoint is not connected",
    "Connection refused",
    "Software caused connection abort",
)

# What gloo's collectives carry as it is; the rest travels as bytes or, in a reduction, as a wider type.
GLOO_DTYPES = frozenset(
    (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    )
)


def is_disconnect(error: BaseException) -> bool:
    """Whether a transport's error says that another rank went away."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(part in text for part in _DISCONNECTED)


def make_device(interface: str | None) -> Any:
    """A gloo device: one listening socket and one loop thread, shared by all groups of the process."""
    return _gloo.create_device(interface=interface) if interface else _gloo.create_default_device()


def gloo_options(device: Any, threads: int, timeout: Any) -> Any:
    options = _gloo._Options()
    options._devices, options._threads, options._timeout = [device], threads, timeout
    return options


def all_gather_options() -> Any:
    return _c10d.AllgatherOptions()


def reduce_op(name: str) -> Any:
    """torch's reduction of our name: sum, avg, max, min, product, band, bor, bxor."""
    return getattr(dist.ReduceOp, name.upper())


def put_in_front(name: str, function: Any) -> None:
    """Replace a function of torch.distributed for whoever looks it up from now on."""
    for module in (dist, c10d):
        setattr(module, name, function)


def heal_coalescing() -> None:
    """Forget a coalescing block that an error left open: torch would silently skip every later collective."""
    _c10d._world.pg_coalesce_state.clear()


def local_store() -> Any:
    """A store for one process."""
    return _dist.HashStore()


def top_saved_tensors_hooks() -> Any:
    """(pack, unpack) of the innermost hooks on saved tensors; None without any, or where torch does not say."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


def in_backward() -> bool:
    """Whether this is called from within a backward: there a checkpoint runs its block again."""
    return bool(torch._C._current_graph_task_id() != -1)
