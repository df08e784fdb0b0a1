"""Random numbers that a model draws itself: found in a forward and backward by looking at every operation of torch.

Torch's dropouts and rrelu are keyed by sample (see `dropout`); anything else is drawn by each part of the batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colossal_nb.parallel import objects
from colossal_nb.parallel.world import World

if TYPE_CHECKING:
    from colossal_nb.parallel.handle import Parallel

MOST_NAMED = 4
# Whose frames lie between an operation and the code that asked for it.
OURS, TORCHS = (str(Path(file).parent) for file in (__file__, torch.__file__))
KEYED = str(Path(OURS) / "dropout.py")
Place = tuple[str | None, str]
"""The module's name, None outside of the model; the operation with its place, for people."""


class Draws:
    """What was drawn by a model in the calls that were looked at."""

    def __init__(self) -> None:
        self.places: dict[Place, None] = {}
        self._looked: set[int] = set()
        self._said = 0, 0

    def looking(self, parallel: Parallel) -> AbstractContextManager[None]:
        """Around a forward and backward: in the first call, and where modules have since changed their mode or `p`."""
        if parallel.mesh.size * parallel.microbatches == 1:
            return nullcontext()
        state = hash(tuple((each.training, getattr(each, "p", None)) for each in parallel.model.modules()))
        if state in self._looked:
            return nullcontext()
        return self._look(parallel, state)

    @contextmanager
    def _look(self, parallel: Parallel, state: int) -> Iterator[None]:
        before = _states_elsewhere()
        with _Watch(parallel.model, self.places):
            yield
        self._looked.add(state)
        for name, value in _states_elsewhere().items():
            if before.get(name, value) != value:
                self.places[None, name] = None

    def note(self, parallel: Parallel) -> None:
        """Say what is newly found, where it differs. Collective in the first call, so that every rank says it."""
        unsure = {} if parallel.dropout is None else parallel.dropout.unsure
        found = list(self.places), list(unsure)
        if parallel.calls == 0 and parallel.mesh.size > 1:
            told = objects.all_gather(found, parallel.group(), "draws")
            for places, names in told:
                self.places |= dict.fromkeys(places)
                unsure |= dict.fromkeys(names)
        if self._said != (len(self.places), len(unsure)):
            self._said = len(self.places), len(unsure)
            self._say(parallel, list(unsure))

    def _say(self, parallel: Parallel, unsure: list[str]) -> None:
        places, note = list(self.places), World.current().note
        several = parallel.replicas * parallel.microbatches > 1
        parts = several or parallel.pipeline is not None
        if not parts:
            places = [place for place in places if _is_cut(parallel, place[0])]
        if places:
            note((_DRAWS if parts else _CUT).format(places=_listed([text for _, text in places])))
        if unsure and several:
            note(_UNSURE.format(places=_listed([name or type(parallel.model).__name__ for name in unsure])))


def _is_cut(parallel: Parallel, name: str | None) -> bool:
    """Whether tensor parallel ranks hold parts of what is computed around a module."""
    pairs = () if parallel.tensor is None or name is None else parallel.tensor.plan.pairs
    return any(not pair.region or f"{name}.".startswith(f"{pair.region}.") for pair in pairs)


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_NAMED
    return ", ".join(places[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _states_elsewhere() -> dict[str, Any]:
    """The states of random numbers that are not torch's."""
    numpy = sys.modules.get("numpy.random")
    states: dict[str, Any] = {"Python's random": hash(random.getstate())}
    return states if numpy is None else states | {"numpy.random": hash(str(numpy.get_state()[1:3]))}


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation that moved a random state and was not asked for by us."""

    def __init__(self, model: nn.Module, places: dict[Place, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(module): name for name, module in model.named_modules()}
        self._places = places

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        before = _torch_states(kwargs.get("generator"))
        result = func(*args, **kwargs)
        if any(not torch.equal(*both) for both in zip(before, _torch_states(kwargs.get("generator")), strict=True)):
            place = self._place(func._schema.name.partition("::")[2], sys._getframe(1))
            if place is not None:
                self._places[place] = None
        return result

    def _place(self, drew: str, frame: FrameType | None) -> Place | None:
        """Where the code runs that asked for random numbers; None where that is the keyed dropout."""
        line = ""
        while frame is not None:
            file, module = frame.f_code.co_filename, frame.f_locals.get("self")
            if file == KEYED and not line:
                return None
            if not line and not file.startswith((OURS, TORCHS)):
                line = f"{frame.f_code.co_name}, line {frame.f_lineno}"
            if id(module) in self._names:
                name, kind = self._names[id(module)], type(module).__name__
                inside = ", ".join(part for part in (kind if name else "", line) if part)
                return name, f"{drew} in {name or kind}" + (f" ({inside})" if inside else "")
            frame = frame.f_back
        return None, f"{drew} in {line}" if line else drew


def _torch_states(generator: torch.Generator | None) -> list[Tensor]:
    if generator is not None:
        return [generator.get_state()]
    states = [torch.get_rng_state()]
    on_devices = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [*states, torch.cuda.get_rng_state()] if on_devices else states


_DRAWS = (
    "the model or loss_fn draws random numbers of its own ({places}): every part of the batch draws some, so they need "
    "not be those of one device (those of torch's dropout and rrelu are: they go by sample)"
)
_CUT = (
    "the model draws random numbers of its own in layers that are cut under tp ({places}): a rank draws for the "
    "features that it holds, so they may not be those of one device (those of torch's dropout and rrelu are)"
)
_UNSURE = (
    "what is dropped in {places} does not begin with one row, or some, for each sample: masks go by the sample in dim "
    "0, so these may not be those of one device; give the batch first to what drops"
)
