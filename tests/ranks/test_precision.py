"""precision=bf16 and fp16: one rank does bit for bit what a loop written by hand does; every strategy what it does."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from small_gpt import loss_fn
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb
from colossal_nb.models import BERT, GPT, Llama, ViT

pytestmark = pytest.mark.ranks
STEPS, LR, VOCABULARY = 3, 1e-3, 37
LOSS, COSINE = 2e-2, 0.999
Make = Callable[[], nn.Module]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def gpt() -> GPT:
    return GPT(VOCABULARY, layers=2, hidden=16, heads=4, max_length=16)


def tied() -> GPT:
    return GPT(VOCABULARY, layers=2, hidden=16, heads=4, max_length=16, tied=True)


def llama() -> Llama:
    return Llama(VOCABULARY, layers=2, hidden=16, heads=4, kv_heads=2, max_length=16)


def bert() -> BERT:
    return BERT(VOCABULARY, layers=2, hidden=16, heads=4, max_length=16)


def vit() -> ViT:
    return ViT(8, 4, classes=10, layers=2, hidden=16, heads=4, channels=1)


def normed() -> nn.Module:
    """Batch statistics, and a table that is no parameter."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), Table(144), nn.Linear(144, 10))


class Table(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.table


def batches(make: Make, samples: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(STEPS):
        if make in (vit, normed):
            images = torch.randn(samples, 1, 8, 8, generator=generator)
            found.append((images, torch.randint(10, (samples,), generator=generator)))
        else:
            text = torch.randint(VOCABULARY, (samples, 9), generator=generator)
            found.append((text[:, :-1], text[:, 1:]))
    return found


def fresh(make: Make) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    dtypes: set[torch.dtype]


def by_hand(make: Make, data: list[tuple[Tensor, Tensor]], precision: str) -> Outcome:
    """What people write: a low copy of the model computes, the fp32 model is what the optimizer has."""
    low, scale = DTYPES[precision], 2.0**16 if precision == "fp16" else 1.0
    model, optimizer = fresh(make)
    copied = copy.deepcopy(model).to(low)
    for module, own in zip(copied.modules(), model.modules(), strict=True):
        if isinstance(own, nn.BatchNorm2d):
            module.float()
    losses, gradients = [], []
    for inputs, targets in data:
        for p, master in zip(copied.parameters(), model.parameters(), strict=True):
            p.data.copy_(master.data)
            p.grad = None
        given = inputs.to(low) if inputs.is_floating_point() else inputs
        loss = loss_fn(copied(given).float(), targets)
        (loss * scale).backward()
        for p, master in zip(copied.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float() / scale
        optimizer.step()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return Outcome(losses, [], gradients, {name: p.detach() for name, p in model.named_parameters()}, set())


def train(make: Make, data: list[tuple[Tensor, Tensor]], strategy: str, clip: float | None = None) -> Outcome:
    model, optimizer = cnb.parallelize(*fresh(make), strategy)
    losses, norms, gradients = [], [], []
    for inputs, targets in data:
        optimizer.zero_grad()
        losses.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        whole = {name: cnb.full_grad(p) for name, p in model.named_parameters()}
        gradients.append({name: grad for name, grad in whole.items() if grad is not None})
        optimizer.step()
    kinds = {t.dtype for p in model.parameters() for t in (p, p.grad) if t is not None}
    kinds |= {v.dtype for state in optimizer.state.values() for v in state.values()}
    weights = {name: cnb.full(p) for name, p in model.named_parameters()}
    return Outcome(losses, norms, gradients, weights, kinds)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [gpt, tied, llama, bert, vit, normed])
def test_one_rank_is_the_loop_written_by_hand(ranks: Any, make: Make, precision: str) -> None:
    (found,) = ranks(1).run(train, make, batches(make), f"precision={precision}")
    (expected,) = ranks(1).run(by_hand, make, batches(make), precision)
    assert found.losses == expected.losses
    assert found.dtypes == {torch.float32}
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    for step, gradients in enumerate(expected.gradients):
        for name, value in gradients.items():
            assert torch.equal(found.gradients[step][name], value), name


GPT_CASES = [
    (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2"), (4, "tp=2 pp=2"), (8, "dp=2 tp=2 pp=2"),
]  # fmt: skip
CASES = [
    *((gpt, "bf16", count, strategy) for count, strategy in GPT_CASES),
    *((gpt, "fp16", count, strategy) for count, strategy in GPT_CASES),
    (tied, "bf16", 4, "tp=2 pp=2"), (tied, "fp16", 4, "dp=2 pp=2"),
    (llama, "bf16", 4, "tp=2 pp=2"), (llama, "bf16", 2, "tp=2"),
    (bert, "bf16", 4, "dp=2 tp=2"), (bert, "bf16", 2, "pp=2"),
    (vit, "bf16", 4, "tp=2 pp=2"), (vit, "fp16", 4, "dp=2 tp=2"),
    (gpt, "bf16", 2, "dp=2 microbatches=3"),
]  # fmt: skip


@cache
def on_one_rank(ranks: Any, make: Make, precision: str) -> Outcome:
    found: Outcome = ranks(1).run(train, make, batches(make, 7), f"precision={precision}", 0.5)[0]
    return found


@pytest.mark.parametrize(("make", "precision", "count", "strategy"), CASES)
def test_every_strategy_does_what_one_rank_does(
    ranks: Any, make: Make, precision: str, count: int, strategy: str
) -> None:
    outcomes = ranks(count).run(train, make, batches(make, 7), f"{strategy} precision={precision}", 0.5)
    expected = on_one_rank(ranks, make, precision)
    for found in outcomes:
        assert found.losses == outcomes[0].losses
        assert found.norms == outcomes[0].norms
        assert found.dtypes == {torch.float32}
        torch.testing.assert_close(found.losses, expected.losses, rtol=LOSS, atol=0)
        torch.testing.assert_close(found.norms, expected.norms, rtol=LOSS, atol=0)
        every = zip(found.gradients, outcomes[0].gradients, expected.gradients, strict=True)
        for mine, first, theirs in every:
            assert list(mine) == list(theirs)
            for name, value in theirs.items():
                assert torch.equal(mine[name], first[name])
                alike = functional.cosine_similarity(mine[name].flatten(), value.flatten(), 0)
                assert alike > COSINE, f"{name}: {alike}"
