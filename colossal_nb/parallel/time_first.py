"""Sequences that were cut along their time: torch's attention, transformer and recurrent layers take time first by
default, while the batch is cut along dim 0. Looked for in the first step alone, where a batch is cut.

A layer whose sequence has as many entries as a part has samples may owe that to chance. So the part is run once more
with one more sample: where the sequence grows with it, it *is* the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel import objects
from colossal_nb.parallel.batch import cut
from colossal_nb.parallel.handle import Parallel
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.trace import untouched, wrapped_forwards

_LAYERS = (
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.MultiheadAttention,
    nn.RNN,
    nn.LSTM,
    nn.GRU,
)  # fmt: skip
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[[Parallel, tuple[Any, ...], dict[str, Any]], Any]
_LOOKED = "time first"  # in `Parallel.explored`


class TimeFirst:
    """What is looked at in the forwards of one batch of `samples`, of which this rank runs parts of `sizes`.

    `parts`: into how many it is cut, on all ranks alike.
    """

    def __init__(self, parallel: Parallel, inputs: Inputs, samples: int, sizes: set[int], parts: int) -> None:
        self.parallel, self.inputs, self.samples, self.parts = parallel, inputs, samples, parts
        self.sizes = {size for size in sizes if 0 < size < samples}
        self.looking = parts > 1 and _LOOKED not in parallel.explored
        self._lengths: defaultdict[str, set[int]] = defaultdict(set)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around forwards: notes the length of every sequence."""
        with wrapped_forwards(self.parallel.model, self._wrap) if self.looking else nullcontext():
            yield

    def _wrap(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
        if not isinstance(module, _LAYERS):
            return None

        def seen(*args: Any, **kwargs: Any) -> Any:
            first = next(iter((*args, *kwargs.values())), None)
            if isinstance(first, Tensor) and not first.is_nested and _is_sequence_in_dim_0(module, first):
                self._lengths[name].add(len(first))
            return forward(*args, **kwargs)

        return seen

    def flags(self) -> list[float]:
        """What the ranks add up: who saw a sequence as long as its part of the batch. Empty after the first step."""
        return [float(any(self.sizes & seen for seen in self._lengths.values()))] if self.looking else []

    def settle(self, sums: list[float], forward: Forward) -> None:
        """Raises ValueError on all ranks alike where a sequence is the batch. Collective."""
        if any(sums):
            found = self._grown(forward) if self.sizes else []
            told = objects.all_gather(found, self.parallel.group(), "time first")
            for text in (text for texts in told for text in texts):
                raise ValueError(text)
        if self.looking:
            self.parallel.explored.add(_LOOKED)

    def _grown(self, forward: Forward) -> list[str]:
        """What to say of a layer whose sequence has one more entry when this rank's part has one more sample."""
        parallel, before, more = self.parallel, self._lengths, max(self.sizes) + 1
        self._lengths = defaultdict(set)
        args, kwargs = cut(self.inputs, self.samples, 0, more)
        keyed = parallel.dropout if parallel.dropout is not None and parallel.model.training else None
        with untouched(parallel.model), torch.no_grad(), self.watched(), keyed.running() if keyed else nullcontext():
            if keyed:
                keyed.begin(parallel.calls, 0, more)
            forward(parallel, args, kwargs)
        grown = {name for name, seen in self._lengths.items() if more in seen and self.sizes & before[name]}
        found = [(name, module) for name, module in parallel.model.named_modules() if name in grown]
        return [self._text(name, module) for name, module in found[:1]]

    def _text(self, name: str, module: nn.Module) -> str:
        given = ", ".join(str(list(x.shape)) for x in leaves(self.inputs) if x.dim() and len(x) == self.samples)
        what = type(module).__name__
        return (
            f"dim 0 of inputs {given} is the batch, and it was cut there into {self.parts} parts; but "
            f"{name or 'the model'} ({what}) reads dim 0 of what it is given as a sequence, so that each part would "
            "see a piece of the sequence, and the numbers would be others than on one device. Give inputs as (batch, "
            f"time, ...), and {what} batch_first=True, or let the model turn them: x.transpose(0, 1) before {what}"
        )


def _is_sequence_in_dim_0(module: nn.Module, x: Tensor) -> bool:
    """An input without a batch dim is one sequence, whatever `batch_first` says."""
    layer = getattr(module, "self_attn", module)
    return x.dim() == 2 or (x.dim() == 3 and not getattr(layer, "batch_first", True))
