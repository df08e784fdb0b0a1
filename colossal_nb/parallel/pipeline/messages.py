"""What travels between stages: values forwards, their gradients backwards, and the shapes of a batch not yet met.

Sends are eager: they return at once and their tensors are kept until they are through, so that no order of actions
can make two stages wait for each other. Messages between two stages keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from colossal_nb.parallel.group import Group
from colossal_nb.parallel.pipeline.split import Split
from colossal_nb.parallel.pipeline.stage import Spec, Specs
from colossal_nb.parallel.structure import leaves
from colossal_nb.parallel.transports.messages import Mismatch
from colossal_nb.parallel.work import Work
from colossal_nb.parallel.world import World
from colossal_nb.plan.mesh import Mesh

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
MOST_DIMS = 12  # the transport takes no more


class Mail:
    """This rank's messages to and from the other stages of its pipeline."""

    def __init__(self, mesh: Mesh, device: str) -> None:
        self.mesh, self.device = mesh, device
        self.under_way: list[tuple[Work, torch.Tensor]] = []

    @property
    def group(self) -> Group:
        """Found anew at each use: a regroup may have come between."""
        return World.current().group(self.mesh, "pp")

    def send(self, tensor: torch.Tensor, stage: int, of: str) -> None:
        """Give a tensor away; it must not be written into before `settle`."""
        tensor = tensor.detach().contiguous()
        work = self.group.run("send", [tensor], of=of, wait=False, peer=stage, eager=True)
        self.under_way.append((work, tensor))

    def receive(self, spec: Spec, stage: int, of: str) -> torch.Tensor:
        """The next tensor from a stage. Raises ValueError when what comes has another size or dtype."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        try:
            self.group.run("recv", [tensor], of=of, peer=stage)
        except Mismatch as error:
            raise ValueError(
                f"{of} has another size than it had for inputs of the same shapes ({error}). Under pp what passes "
                "between stages may not depend on the data, as rows that a mask picks (a mixture of experts) do: cut "
                "elsewhere (cuts=[...]), put what picks them and puts them back into one module, or take dp or tp"
            ) from error
        return tensor

    def forget(self) -> None:
        """Let go of what is through."""
        waiting = []
        for work, tensor in self.under_way:
            if work.is_completed():
                work.wait()
            else:
                waiting.append((work, tensor))
        self.under_way = waiting

    def settle(self) -> None:
        """Wait until everything sent is through."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way = []

    def send_specs(self, split: Split, specs: Specs, stage: int) -> None:
        """Tell a later stage the shapes of all units before it."""
        numbers: list[int] = []
        for unit in range(_units_before(split, stage)):
            for spec in specs[unit]:
                numbers += [DTYPES.index(spec.dtype), len(spec.shape), *spec.shape, *_rest(len(spec.shape))]
        self.send(torch.tensor(numbers, dtype=torch.int64, device=self.device), stage, "shapes")

    def receive_specs(self, split: Split, stage: int) -> Specs:
        """The shapes of all units before this stage, from the stage before it."""
        units = [leaves(unit.template) for unit in split.units[: _units_before(split, stage)]]
        length = sum(2 + MOST_DIMS for unit in units for _ in unit)
        numbers = iter(self.receive(Spec((length,), torch.int64), stage - 1, "shapes").tolist())
        return {index: tuple(_spec(numbers) for _ in unit) for index, unit in enumerate(units)}


def _rest(dims: int) -> list[int]:
    """Fills a shape up to equal length: a batch may have other dims than the example that was recorded."""
    return [0] * (MOST_DIMS - dims)


def _spec(numbers: Iterator[int]) -> Spec:
    dtype, dims, *shape = (next(numbers) for _ in range(2 + MOST_DIMS))
    return Spec(tuple(shape[:dims]), DTYPES[dtype])


def _units_before(split: Split, stage: int) -> int:
    return sum(at < stage for at in split.stage_of)
