"""Dropout whose masks are keyed by (seed, call, site, global sample, element): equal under every strategy.

So are the slopes of rrelu, and the dropout between the layers of a recurrent module (not of packed sequences).

A site is a module and which of its dropouts in this forward. Each sample's mask is drawn from a generator of its own,
in the shape that the whole model has there; a rank that holds some features or heads takes its part of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from colossal_nb.parallel.compat import in_backward
from colossal_nb.parallel.masks import Fill, Masks, attention_by_name

if TYPE_CHECKING:
    from colossal_nb.parallel.handle import Parallel

Site = tuple[str, int]
Features = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""Per sharded region its name and, per rank, the features that its row-parallel linear reads there."""
MOST_STATES = 4096  # of forwards whose backward may be to come
Part = tuple[Any, int, int]


class KeyedDropout:
    """Active while the model runs in training mode. `sites`: the shapes that the whole model has at its sites.

    Torch's seed says whose samples are under way and which dropouts they have passed: a checkpointed block, which runs
    again when other samples may be under way, finds both again with the random state that torch restores for it.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.sites: dict[Site, torch.Size] | None = None
        self.features: Features = ()
        self.index = 0
        self._recording = self._active = False
        self._again: ExitStack | None = None
        self._inside: list[str] = []
        self._modules = dict(model.named_modules())
        self._calls: Counter[str] = Counter()
        self._begun: list[tuple[str, int, Counter[str]]] = []
        self._passed: dict[tuple[str, int], Counter[str]] = {}  # what a module's nth call in a forward drops where
        self._states: dict[int, tuple[Part, dict[str, int]]] = {}
        self._forwards = (0, 0)
        self.unsure: dict[str, None] = {}  # modules that drop where dim 0 does not look like the batch
        self._named = attention_by_name(model)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(_Enter(self, name))
            module.register_forward_hook(_Leave(self), always_call=True)

    @staticmethod
    def forget(model: nn.Module) -> None:
        """Take an earlier one's hooks off."""
        for module in model.modules():
            every = (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called)
            keys = [key for hooks in every for key, hook in hooks.items() if isinstance(hook, _Enter | _Leave)]
            for hooks in every:
                for key in keys:
                    hooks.pop(key, None)

    def entered(self, name: str) -> None:
        """A module's call begins; in a backward it may be a checkpointed block whose first run was keyed."""
        if not self._active and not self._inside and in_backward() and torch.initial_seed() in self._states:
            self._again = ExitStack()
            self._again.enter_context(self._replaced())
        self._inside.append(name)
        if self._recording:
            self._begun.append((name, self._calls[name], self._counts()))
            self._calls[name] += 1

    def left(self) -> None:
        """It ends."""
        if self._inside:
            self._inside.pop()
        if self._recording and self._begun:
            name, nth, before = self._begun.pop()
            self._passed[name, nth] = self._counts() - before
        if not self._inside and self._again is not None:
            self._again.close()
            self._again = None

    def begin(self, call: Any, start: int, stop: int) -> None:
        """The samples `start` to `stop` - 1 of the call's global batch are next."""
        self._inside.clear()
        self._become(_number(self.seed, call, start, stop), (call, start, stop), {})

    def _become(self, key: int, part: Part, counts: dict[str, int]) -> None:
        torch.manual_seed(key)
        self._states[key] = part, counts
        if len(self._states) > MOST_STATES:
            self._states.pop(next(iter(self._states)))

    def _counts(self) -> Counter[str]:
        return Counter(self._states[torch.initial_seed()][1])

    def passed(self, name: str, nth: int) -> None:
        """Another pipeline stage runs the module's nth call: its dropouts are counted here too."""
        seed, counts = torch.initial_seed(), self._counts()
        for site, number in self._passed.get((name, nth), Counter[str]()).items():
            module = self._modules[site]
            counts[site] += number * (module.training and getattr(module, "p", 1) > 0)
        self._become(_number(seed, "passed", name, nth), self._states[seed][0], dict(counts))

    def place(self) -> str:
        """The module that is running, for `again`."""
        return self._inside[-1] if self._inside else ""

    @contextmanager
    def again(self, name: str) -> Iterator[None]:
        """Inside, a part of a forward runs a second time, in a backward, with the random state of its first time."""
        before, self._inside = self._inside, [name]
        try:
            with nullcontext() if self._active else self._replaced():
                yield
        finally:
            self._inside = before

    @contextmanager
    def forward(self, step: int, start: int, stop: int) -> Iterator[None]:
        """For a forward outside of forward_backward, whose backward comes later: the next one of this step."""
        self._forwards = (step, self._forwards[1] + 1 if self._forwards[0] == step else 1)
        state = torch.get_rng_state()
        try:
            with self._replaced():
                self.begin(("forward", *self._forwards), start, stop)
                yield
        finally:
            torch.set_rng_state(state)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, dropout is keyed; torch's random state is afterwards what it was."""
        state = torch.get_rng_state()
        try:
            with self._replaced():
                yield
        finally:
            torch.set_rng_state(state)
            self._states.clear()

    def record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the whole model once in training mode and note the shapes at its sites; model and states stay."""
        modes = [(module, module.training) for module in model.modules()]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self.sites, self._recording = {}, True
        self._calls.clear()
        self._begun.clear()
        model.train()
        try:
            with torch.no_grad(), self.running():
                self.begin(0, 0, 1)
                model(*args, **kwargs)
        finally:
            self._recording = False
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        active, self._active = self._active, True
        try:
            with Masks(self._drawn, self._time_first).installed(self._named):
                yield
        finally:
            self._active = active

    def _time_first(self, x: Tensor) -> bool:
        """Whether the batch is dim 1 by what torch's transformer layers say; their attention drops batch first."""
        above = self._modules.get(self.place().rpartition(".")[0])
        if not isinstance(above, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            return False
        return x.dim() == 3 and not above.self_attn.batch_first

    def _drawn(self, shape: torch.Size, like: Tensor, fill: Fill) -> Tensor:
        """This rank's part of what `fill` makes of each sample's row."""
        (call, start, stop), site = self._site(shape[0] if shape else 1)
        if self._recording:
            assert self.sites is not None
            self.sites[site] = shape
        count = stop - start
        rows = shape[0]
        if not self._recording and not self._by_sample(site[0], shape, count):
            self.unsure[site[0]] = None
        tail = [rows // count, *shape[1:]] if rows % count == 0 else list(shape)
        held = self._held(site, shape)
        if held is not None:
            dim, whole, indices = held
            tail[dim] = whole
        drawn = torch.empty(count if rows % count == 0 else 1, *tail)
        for sample in range(len(drawn)):
            generator = torch.Generator().manual_seed(_number(self.seed, call, *site, start + sample))
            fill(drawn[sample], generator)
        if held is not None:
            drawn = drawn.index_select(dim if dim < 0 else dim + 1, torch.tensor(indices))
        return drawn.reshape(shape).to(device=like.device)

    def _by_sample(self, name: str, shape: torch.Size, count: int) -> bool:
        """Whether dim 0 looks like the samples, or like some rows for each. Torch's attention drops in (batch x heads,
        length, length)."""
        second = len(shape) > 1 and shape[1] == count and not isinstance(self._modules.get(name), nn.MultiheadAttention)
        return shape[0] == count or (shape[0] % count == 0 and not second)

    def _site(self, rows: int) -> tuple[Part, Site]:
        """Whose samples these are; the innermost module and the number of this dropout among those of its calls."""
        name, seed = self._inside[-1] if self._inside else "", torch.initial_seed()
        part, counts = self._states.get(seed, ((0, 0, rows), {}))
        number = counts.get(name, 0)
        self._become(_number(seed, name, number), part, counts | {name: number + 1})
        return part, (name, number)

    def _held(self, site: Site, shape: torch.Size) -> tuple[int, int, list[int]] | None:
        """The dim of a sample's mask that is cut on this rank, its whole length, and what this rank has of it.

        Heads are dim 1 of four, features the last dim of fewer; a batch may have other dims than the example had.
        """
        whole_shape = (self.sites or {}).get(site)
        if not self.features or not whole_shape or not shape:
            return None
        dim = 1 if len(shape) == len(whole_shape) == 4 else -1
        whole, local = whole_shape[dim], shape[dim]
        for region, parts in self.features:
            if whole == local or not (not region or site[0] == region or site[0].startswith(f"{region}.")):
                continue
            each, rest = divmod(len(set().union(*parts)), whole)
            mine = parts[self.index]
            if not rest and each and local * each == len(mine):
                return dim, whole, [feature // each for feature in mine[::each]]
        return None


def pass_by(parallel: Parallel, site: int) -> None:
    """At a border of a stage's forward: the dropouts of a call that another stage ran are counted here too."""
    if parallel.dropout is None or parallel.pipeline is None or not parallel.model.training or site == 0 or site % 2:
        return
    split, number = parallel.pipeline.split, site // 2 - 1
    if split.stage_of[number] != parallel.place["pp"]:
        parallel.dropout.passed(split.units[number].name, split.units[number].nth)


@dataclass(frozen=True)
class _Enter:
    """A pre-hook: a module begins. Objects, so that a copy of the model tells a copy of the KeyedDropout."""

    dropout: KeyedDropout
    name: str

    def __call__(self, *_: Any) -> None:
        self.dropout.entered(self.name)


@dataclass(frozen=True)
class _Leave:
    """A hook: the innermost module ends."""

    dropout: KeyedDropout

    def __call__(self, *_: Any) -> None:
        self.dropout.left()


def _number(*key: Any) -> int:
    """63 bits of a key."""
    text = "/".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
