"""Modules that torch.compile runs: several ranks refuse them, by name, before anything waits."""

from __future__ import annotations

import torch
from torch import nn


def wraps(module: object) -> bool:
    """Whether it is what `torch.compile(module)` returns. By name: importing its class costs seconds."""
    kind = type(module)
    return kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch._dynamo")


def refuse(model: nn.Module, ranks: int) -> None:
    """Raise ValueError where a module of the model is compiled and several ranks share it.

    A compiled module runs code of its own, past what parallelize puts on modules, and is compiled anew in every step,
    for the parts of a batch and for what is measured: tens of seconds each.
    """
    if ranks == 1:
        return
    names = [name or type(model).__name__ for name, module in model.named_modules() if _is_compiled(module)]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"torch.compile is on {', '.join(names[:3])}{more}, and compiled modules do not run on several ranks "
            f"({ranks} here): leave torch.compile out, or run the cell on one device"
        )


def refuse_around(ranks: int) -> None:
    """Raise ValueError where several ranks' model is called from code that torch.compile runs.

    Tracing alone sees `is_compiling`; what it may not trace is called when the traced code runs, and raises there.
    """
    if ranks > 1 and torch.compiler.is_compiling():
        _refuse_around(ranks)


def _refuse_around(ranks: int) -> None:
    raise ValueError(
        "this model is called from what torch.compile made (of the model after parallelize, or of a function around "
        f"it), and compiled code does not run on several ranks ({ranks} here): call the model that parallelize "
        "returned, or run the cell on one device"
    )


# What torch.compiler.disable sets, and it imports all of dynamo, which takes seconds, to do so.
_refuse_around._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or wraps(module)
