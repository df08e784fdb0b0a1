"""Random programs under random strategies: what is drawn, how it is run, what it must equal.

A draw is known by its number: `draw(17)` is the same everywhere. `python tests/random_draws.py 17` prints it.
"""

from __future__ import annotations

import math
import random
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from random_modules import ACTIVATIONS, ATTENTION, KINDS, Layer, Spec, build
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb as cnb

LR = 1e-3
# The gradient of a key's bias is zero in exact arithmetic: its rounding, divided by Adam's usual 1e-8, passes RTOL.
EPS = 1e-6
RTOL = 1e-10
REFUSALS = {
    "heads": r"has \d+ independent groups \(heads\); tp=\d+ does not divide them: take tp=\d+",
    "blocks": r"pp=\d+ is more than the \d+ blocks? of this \w+ \(.*\): pp=\d+ is the largest possible",
}
"""Why a draw may be refused, and what the refusal then says."""


@dataclass(frozen=True)
class Draw:
    """A program: a model, batches, an optimizer, a strategy."""

    number: int
    spec: Spec
    ranks: int
    strategy: str
    batch: int
    steps: int
    clip: float
    decay: float

    @property
    def drops(self) -> bool:
        return self.spec.dropout > 0 or any(layer.dropout > 0 for layer in self.spec.layers)


@dataclass(frozen=True)
class Result:
    """What a program leaves (`output`: in evaluation mode). `refused`: a ValueError's text; the rest is then empty."""

    losses: tuple[float, ...] = ()
    output: Tensor | None = None
    weights: dict[str, Tensor] | None = None
    gradients: dict[str, Tensor] | None = None
    refused: str = ""


def draw(number: int) -> Draw:
    """The draw of this number."""
    chance = random.Random(number)
    ranks = chance.choice([2, 2, 2, 3, 4, 4, 4, 6, 8])
    sizes = _sizes(chance, ranks)
    spec = _spec(chance, sizes["pp"] if chance.random() < 0.9 else 1)
    return Draw(
        number, spec, ranks, _strategy(chance, sizes), batch=chance.randint(1, 9), steps=chance.randint(3, 5),
        clip=chance.choice([0.0, 0.0, 0.5, math.inf]), decay=chance.choice([0.0, 0.01, 0.1]),
    )  # fmt: skip


def _sizes(chance: random.Random, ranks: int) -> dict[str, int]:
    sizes = {"dp": 1, "tp": 1, "pp": 1}
    for factor in {2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}[ranks]:
        sizes[chance.choice(list(sizes))] *= factor
    return sizes


def _strategy(chance: random.Random, sizes: dict[str, int]) -> str:
    words = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    if sizes["pp"] > 1:
        words.append(f"schedule={chance.choice(['gpipe', '1f1b'])}")
    if chance.random() < 0.5:
        words.append(f"microbatches={chance.randint(1, 5)}")
    return " ".join(words)


def _spec(chance: random.Random, least: int) -> Spec:
    length = chance.choice([0, 1, 3, 5, 7, 8])
    size, heads = chance.choice([2, 3, 4]), chance.choice([1, 2, 3, 4, 4, 6, 8])
    # The norm of two or three features is a step: its gradient is rounding.
    hidden = min(24, max(6, size * heads)) + chance.choice([0, 0, 0, 1])
    dropout = chance.random() < 0.3
    layers = tuple(_layer(chance, length, hidden, heads, dropout) for _ in range(max(least, chance.randint(1, 5))))
    tokens = chance.randint(5, 40) if chance.random() < 0.7 else 0
    spec = Spec(
        layers, hidden, size, length, tokens, features=0 if tokens else chance.randint(1, 9),
        positions=bool(length) and chance.random() < 0.5, final_norm=_norm(chance) if chance.random() < 0.7 else "",
        example=chance.random() < 0.6, dropout=chance.choice([0.0, 0.2]) if dropout else 0.0,
        twice=chance.randrange(len(layers)) if chance.random() < 0.1 else -1,
        frozen=chance.randrange(len(layers)) if chance.random() < 0.1 else -1,
    )  # fmt: skip
    if tokens and chance.random() < 0.3:
        return replace(spec, classes=tokens, tied=True)
    if chance.random() < 0.8:
        return replace(spec, classes=chance.randint(2, 37))
    return replace(spec, values=chance.randint(1, 6))


def _norm(chance: random.Random) -> str:
    return chance.choice(["layer", "rms", "group", "scale"])


def _layer(chance: random.Random, length: int, hidden: int, heads: int, dropout: bool) -> Layer:
    kinds = [kind for kind in KINDS if length or kind not in ATTENTION]
    kind = chance.choice([*kinds, *(kind for kind in ATTENTION if length), "plain", "gated"])
    groups = [count for count in range(1, heads + 1) if heads % count == 0]
    return Layer(
        kind, around=chance.choice(["", "pre", "pre", "post"]) if kind != "norm" else "", norm=_norm(chance),
        bias=chance.random() < 0.6, inner=chance.randint(3, 30), act=chance.choice(list(ACTIVATIONS)), heads=heads,
        kv_heads=chance.choice(groups), causal=chance.random() < 0.5,
        dropout=chance.choice([0.1, 0.3, 0.5]) if dropout else 0.0,
    )  # fmt: skip


def run(draw: Draw, strategy: str | None) -> Result:
    """The program; `strategy` None is the same without a word of ours."""
    torch.manual_seed(draw.number)
    model: Any = build(draw.spec).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)  # no weight stays at 0 or 1
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=draw.decay)
    try:
        if strategy is not None:
            model, optimizer = cnb.parallelize(model, optimizer, strategy)
        losses = _train(draw, model, optimizer, parallel=strategy is not None)
    except ValueError as error:
        return Result(refused=f"{error}")
    with torch.no_grad():
        output = model.eval()(batches(draw)[0][0])
    gradients = {name: cnb.full_grad(p) if strategy is not None else p.grad for name, p in model.named_parameters()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return Result(losses, output, weights, {name: g.clone() for name, g in gradients.items() if g is not None})


def _train(draw: Draw, model: nn.Module, optimizer: torch.optim.Optimizer, parallel: bool) -> tuple[float, ...]:
    losses = []
    for inputs, targets in batches(draw):
        optimizer.zero_grad()
        loss_fn = _values if draw.spec.values else _classes
        if parallel:
            loss = cnb.forward_backward(model, loss_fn, inputs, targets)
        else:
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        if draw.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=2.0 if draw.clip == 0.5 else math.inf)
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses)


def _classes(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _values(output: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(output, targets)


def batches(draw: Draw) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(draw.number)
    spec = draw.spec
    shape = (draw.batch, spec.length) if spec.length else (draw.batch,)
    found = []
    for _ in range(draw.steps):
        if spec.tokens:
            inputs = torch.randint(spec.tokens, shape, generator=generator)
        else:
            inputs = torch.randn(*shape, spec.features, generator=generator, dtype=torch.float64)
        if spec.values:
            targets = torch.randn(*shape, spec.values, generator=generator, dtype=torch.float64)
        else:
            targets = torch.randint(spec.classes, shape, generator=generator)
            if spec.length and draw.number % 3 == 0:
                targets[1:, :1] = -100
        found.append((inputs, targets))
    return found


def reason(text: str) -> str:
    """The known reason of a refusal, or "" for one that nobody expected."""
    return next((name for name, pattern in REFUSALS.items() if re.search(pattern, text)), "")


def difference(found: Result, expected: Result, steps: int) -> str:
    """Where two results differ by more than rule L allows; "" for nowhere."""
    assert found.weights is not None and found.gradients is not None and found.output is not None
    assert expected.weights is not None and expected.gradients is not None and expected.output is not None
    if list(found.gradients) != list(expected.gradients):
        return f"gradients of {set(found.gradients) ^ set(expected.gradients)}"
    pairs = {"losses": (torch.tensor(found.losses).double(), torch.tensor(expected.losses).double())}
    pairs |= {"output": (found.output, expected.output)}
    pairs |= {f"weight {n}": (found.weights[n], w) for n, w in expected.weights.items()}
    pairs |= {f"gradient {n}": (found.gradients[n], g) for n, g in expected.gradients.items()}
    for what, (one, other) in pairs.items():
        if one.shape != other.shape:
            return f"{what}: {list(one.shape)} for {list(other.shape)}"
        error = (one - other).abs().max().item() / max(other.abs().max().item(), LR * steps)
        if not error <= RTOL:
            return f"{what} by {error:.1e}"
    return ""


if __name__ == "__main__":
    print("\n".join(str(draw(int(number))) for number in sys.argv[1:]))
