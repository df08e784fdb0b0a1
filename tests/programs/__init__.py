"""Training programs as people write them: each is one text, run on one device in plain torch and on many ranks.

A program is `def name(cnb, lab) -> model`. `cnb` is either the package under a strategy or `Plain`, the same words in
plain torch. What the program shows with `lab.show`, the weights and the gradients at its end must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import colossal_nb
from colossal_nb.models import BERT, GPT, Llama, ViT

LR = 1e-3
VOCABULARY = 67
LENGTH = 6
RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}
Batch = tuple[Any, Tensor]


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Plain:
    """The package's words in plain torch."""

    def parallelize(self, model: nn.Module, optimizer: Any = None) -> Any:
        return model if optimizer is None else (model, optimizer)

    def forward_backward(
        self, model: nn.Module, loss_fn: Any, inputs: Any, targets: Any = None, return_output: bool = False
    ) -> Any:
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = loss_fn(output, targets) if loss_fn is not None else output["loss"]
        loss.backward()
        return (loss.detach(), output) if return_output else loss.detach()

    @contextmanager
    def accumulate(self, model: nn.Module) -> Iterator[None]:
        yield

    def full(self, p: Tensor) -> Tensor:
        return p.detach().clone()

    def full_grad(self, p: Tensor) -> Tensor | None:
        return None if p.grad is None else p.grad.clone()

    def output(self, model: nn.Module, inputs: Tensor) -> Any:
        """While training."""
        return model(inputs)

    def generate(self, model: nn.Module, tokens: Tensor, new_tokens: int) -> Tensor:
        """Greedy, as everybody writes it."""
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for _ in range(new_tokens):
                tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
        model.train(was_training)
        return tokens


class InParts(Plain):
    """On one rank, the parts of a batch one after another: what a model that computes over the batch is compared with.

    `parts` of a batch in forward_backward, `replicas` in `model(x)`.
    """

    def __init__(self, parts: int, replicas: int) -> None:
        self.parts, self.replicas = parts, replicas

    def forward_backward(
        self, model: nn.Module, loss_fn: Any, inputs: Any, targets: Any = None, return_output: bool = False
    ) -> Any:
        losses = []
        for x, y in zip(inputs.tensor_split(self.parts), targets.tensor_split(self.parts), strict=True):
            if len(x):
                losses.append(loss_fn(model(x), y) * len(x) / len(inputs))
                losses[-1].backward()
        return torch.stack(losses).sum().detach()

    def output(self, model: nn.Module, inputs: Tensor) -> Any:
        return torch.cat([model(x) for x in inputs.tensor_split(self.replicas) if len(x)])


class Under(Plain):
    """The package under one strategy."""

    def __init__(self, strategy: str) -> None:
        self.strategy = strategy
        for name in ("forward_backward", "accumulate", "full", "full_grad", "generate"):
            setattr(self, name, getattr(colossal_nb, name))

    def parallelize(self, model: nn.Module, optimizer: Any = None) -> Any:
        return colossal_nb.parallelize(model, optimizer, self.strategy)


HIDDEN = 32
MODELS: dict[str, partial[nn.Module]] = {
    "gpt": partial(GPT, VOCABULARY, layers=2, hidden=HIDDEN, heads=4, max_length=16),
    "llama": partial(Llama, VOCABULARY, layers=2, hidden=HIDDEN, heads=4, kv_heads=2, max_length=16),
    "bert": partial(BERT, VOCABULARY, layers=2, hidden=HIDDEN, heads=4, max_length=16),
    "vit": partial(ViT, 8, 4, classes=10, layers=2, hidden=HIDDEN, heads=4, channels=1),
}
OUTPUTS = {"gpt": VOCABULARY, "llama": VOCABULARY, "bert": VOCABULARY, "vit": 10}


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    """Those inside, by name, in the order of the module."""
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}


@dataclass
class Lab:
    """What a program is given: a model of some kind, batches, a loss; and where it puts what it shows."""

    kind: str = "gpt"
    dtype: torch.dtype = torch.float64
    shown: list[tuple[str, Any]] = field(default_factory=list)

    def model(self, make: Callable[[], nn.Module] | None = None, **options: Any) -> nn.Module:
        """The same weights at every call, none of them 0 or 1."""
        torch.manual_seed(0)
        model = (make() if make is not None else MODELS[self.kind](**options)).to(self.dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.05)
        return model

    def extended(self, mixin: type) -> Callable[[], nn.Module]:
        """A model of this kind whose class is what `mixin` makes of it, as users subclass a model."""
        base = MODELS[self.kind]
        assert isinstance(base.func, type)
        return partial(type(mixin.__name__, (mixin, base.func), {}), *base.args, **base.keywords)

    def batches(self, count: int = 3, samples: int = 6, seed: int = 7) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self._batch(samples, generator) for _ in range(count)]

    def _batch(self, samples: int, generator: torch.Generator) -> Batch:
        if self.kind == "vit":
            images = torch.rand(samples, 1, 8, 8, generator=generator, dtype=torch.float64).to(self.dtype)
            return images, torch.randint(10, (samples,), generator=generator)
        text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
        targets = text[:, 1:].clone()
        lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
        lengths[0] = LENGTH
        targets[torch.arange(LENGTH) >= lengths] = -100
        return text[:, :-1], targets

    def loss_fn(self, output: Tensor, targets: Tensor) -> Tensor:
        return text_loss(output, targets)

    def show(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone()
        self.shown.append((name, value))


Program = Callable[[Any, Lab], nn.Module]


@dataclass
class Outcome:
    """What a program showed, whole weights and whole gradients at its end; or the sentence that refused it."""

    shown: list[tuple[str, Any]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    refused: str = ""


def run(program: Program, kind: str, strategy: str | Plain, dtype: torch.dtype = torch.float64) -> Outcome:
    """One program under a strategy, or without a word of ours."""
    cnb, lab = Under(strategy) if isinstance(strategy, str) else strategy, Lab(kind, dtype)
    model = program(cnb, lab)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: cnb.full_grad(p) for name, p in model.named_parameters()}
    return Outcome(lab.shown, weights, {name: g for name, g in gradients.items() if g is not None})


def train(cnb: Any, lab: Lab, model: nn.Module, optimizer: Any, count: int = 3, seed: int = 7) -> None:
    """The usual loop."""
    for inputs, targets in lab.batches(count, seed=seed):
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """Over what trains; eps as large as float32 needs (see equivalence.py)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, **{"lr": LR, "eps": 1e-5, **options})


def differences(found: Outcome, expected: Outcome, dtype: torch.dtype) -> list[str]:
    """What is not equal by rule L, in words; empty for equal programs."""
    wrong = []
    if [name for name, _ in found.shown] != [name for name, _ in expected.shown]:
        return [f"shown {[name for name, _ in found.shown]} for {[name for name, _ in expected.shown]}"]
    for number, ((name, a), (_, b)) in enumerate(zip(found.shown, expected.shown, strict=True)):
        wrong += _difference(f"shown {number} {name}", a, b, dtype)
    for what, mine, theirs in (
        ("weight", found.weights, expected.weights), ("gradient", found.gradients, expected.gradients)
    ):  # fmt: skip
        if list(mine) != list(theirs):
            wrong.append(f"{what}s of {sorted(set(mine) ^ set(theirs))} are not on both sides (or not in order)")
            continue
        for name, value in theirs.items():
            wrong += _difference(f"{what} {name}", mine[name], value, dtype)
    return wrong


def _difference(name: str, a: Any, b: Any, dtype: torch.dtype) -> list[str]:
    if isinstance(b, int | str | bool | list | tuple | None):
        return [] if a == b else [f"{name}: {a} for {b}"]
    x, y = torch.as_tensor(a), torch.as_tensor(b)
    if x.shape != y.shape:
        return [f"{name}: shape {list(x.shape)} for {list(y.shape)}"]
    if not y.is_floating_point():
        return [] if torch.equal(x, y) else [f"{name}: {x} for {y}"]
    if x.isnan().any():
        return [f"{name}: nan"]
    error = (x.double() - y.double()).abs().max().item() if y.numel() else 0.0
    floor = max(y.double().abs().max().item() if y.numel() else 0.0, LR)
    return [] if error <= RTOL[dtype] * floor else [f"{name}: off by {error:.2e} of {floor:.2e}"]
