"""What became of a model: what was cut, what limits it, and where its numbers are not the sequential program's."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from colossal_nb.parallel.handle import Parallel, find, text
from colossal_nb.parallel.layouts import layout_of


def lines(model: nn.Module) -> list[str]:
    """For people: one line per decision about a parallel model. Empty for a model that is not parallel."""
    parallel = find(model)
    if parallel is None:
        return []
    held = parallel.held()
    local = sum(p.numel() for p in held.values())
    total = whole_size(model)
    found = [
        f"{type(model).__name__} under {text(parallel.strategy) or 'one rank'} ({parallel.mesh}): this rank holds "
        f"{local:,} of {total:,} parameters"
    ]
    if parallel.pending:
        found.append("it is split at the first batch: no example input could be made")
    if parallel.pipeline is not None:
        found += parallel.pipeline.report.lines
    if parallel.tensor is not None:
        found += parallel.tensor.lines()
    return found + caveats(parallel)


def whole_size(model: nn.Module) -> int:
    """Numbers in all parameters of a model, also in what other ranks hold; tied ones count once."""
    return sum(_size(p) for p in model.parameters())


def _size(p: nn.Parameter) -> int:
    layout = layout_of(p)
    size = 1
    for length in p.shape if layout is None else layout.global_shape:
        size *= length
    return size


def caveats(parallel: Parallel) -> list[str]:
    """Where a run is not the sequential program by mathematics or by choice."""
    if parallel.mesh.size * parallel.microbatches == 1:
        return []
    modules = list(parallel.model.modules())
    found = []
    if parallel.replicas * parallel.microbatches > 1 and any(isinstance(module, _BatchNorm) for module in modules):
        found.append(
            "batch norm sees one part of the batch at a time: the reference is one rank with the same microbatches"
        )
    return found


def drops(module: nn.Module) -> bool:
    """Whether a module says that it draws what is keyed: a Dropout or RReLU, or an attribute named so, with a
    probability."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RReLU) or "rrelu" in _names_used(module):
        return True
    if "dropout" in _names_used(module) and not any("dropout" in name for name in vars(module)):
        return True  # functional.dropout(x, 0.1, self.training)
    values = (value for name, value in vars(module).items() if "dropout" in name)
    return any(isinstance(value, float) and value > 0 for value in values)


def _names_used(module: nn.Module) -> tuple[str, ...]:
    """The attributes that the code of a forward asks for."""
    code = getattr(type(module).forward, "__code__", None)
    return code.co_names if code is not None else ()
