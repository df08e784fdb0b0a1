"""recompute=full, selective: to the last bit the numbers of recompute=none, fewer activations, all on record."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recorded import record_of
from small_gpt import loss_fn
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import BERT, GPT, Llama, ViT
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
STEPS, VOCABULARY = 2, 37
Make = Callable[[], nn.Module]


def gpt() -> GPT:
    return GPT(VOCABULARY, layers=4, hidden=16, heads=4, max_length=16, dropout=0.25)


def llama() -> Llama:
    return Llama(VOCABULARY, layers=4, hidden=16, heads=4, kv_heads=2, max_length=16)


def bert() -> BERT:
    return BERT(VOCABULARY, layers=4, hidden=16, heads=4, max_length=16, dropout=0.25)


def vit() -> ViT:
    return ViT(8, 4, classes=10, layers=4, hidden=16, heads=4, channels=1, dropout=0.25)


class Odd(nn.Module):
    """Blocks with batch statistics, dropout that is a function of their own forward, and one that is called twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

        def forward(self, x: Tensor, *, times: float) -> Tensor:
            return x + nn.functional.dropout(self.norm(self.linear(x)), 0.3, self.training) * times

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd.Block() for _ in range(4))
        self.head = nn.Linear(16, 10)
        self.dropout = 0.3

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, times=0.5)
        return self.head(x)


def batches(make: Make) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shapes = {vit: (8, 1, 8, 8), Odd: (8, 16)}
    found = []
    for _ in range(STEPS):
        if make in shapes:
            inputs = torch.randn(shapes[make], generator=generator)
            found.append((inputs, torch.randint(10, (8,), generator=generator)))
        else:
            text = torch.randint(VOCABULARY, (8, 9), generator=generator)
            found.append((text[:, :-1], text[:, 1:]))
    return found


@dataclass
class Outcome:
    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    hooked: int
    again: Counter[tuple[int, int, str]]
    activation_bytes: int


def train(make: Make, data: list[tuple[Tensor, Tensor]], strategy: str) -> Outcome:
    torch.manual_seed(0)
    model: Any = make()
    hooked = []
    model.blocks[0].register_forward_hook(lambda *_: hooked.append(1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    losses = []
    World.current().recorder.drain()
    for inputs, targets in data:
        optimizer.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        optimizer.step()
    record = record_of(World.current().recorder.drain())
    again = record.slices[record.slices["kind"] == "R"]
    for one in again:  # inside of the B of its stage and microbatch
        own = record.slices[(record.slices["kind"] == "B") & (record.slices["microbatch"] == one["microbatch"])]
        assert any(b["t0"] <= one["t0"] and one["t1"] <= b["t1"] and b["stage"] == one["stage"] for b in own)
    gradients = {name: cnb.full_grad(p) for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        model(data[0][0])
    return Outcome(
        losses,
        {name: value.clone() for name, value in model.state_dict().items()},
        {name: grad for name, grad in gradients.items() if grad is not None},
        len(hooked),
        Counter((int(one["stage"]), int(one["microbatch"]), str(one["of"])) for one in again),
        int(record.memory["activation"].max(initial=0)),
    )


CASES = [
    *((gpt, count, strategy) for count, strategy in [
        (1, "dp=1 microbatches=2"), (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2"), (4, "tp=2 pp=2"),
        (8, "dp=2 tp=2 pp=2"),
    ]),
    (llama, 4, "tp=2 pp=2"), (bert, 2, "pp=2"), (bert, 2, "tp=2"), (vit, 4, "dp=2 tp=2"), (Odd, 1, "microbatches=2"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "count", "strategy"), CASES)
def test_bit_for_bit_the_same_with_fewer_activations(ranks: Any, make: Make, count: int, strategy: str) -> None:
    kinds = ("none", "selective", "full")
    runs = [ranks(count).run(train, make, batches(make), f"{strategy} recompute={kind}") for kind in kinds]
    for none, selective, full in zip(*runs, strict=True):
        for found in (selective, full):
            assert found.losses == none.losses
            assert found.hooked == none.hooked
            assert all(torch.equal(found.state[name], value) for name, value in none.state.items())
            assert all(torch.equal(found.gradients[name], value) for name, value in none.gradients.items())
        assert not none.again
        assert full.again
        assert {name.split(".")[0] for *_, name in full.again} == {"blocks"}
        assert full.activation_bytes < none.activation_bytes
        if make is not Odd:
            assert {name for *_, name in selective.again} == {"scaled_dot_product_attention"}
            assert full.activation_bytes < selective.activation_bytes < none.activation_bytes
