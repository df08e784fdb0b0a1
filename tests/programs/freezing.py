"""Frozen, unused, shared and added parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from colossal_nb.models import GPT
from programs import HIDDEN, LR, MODELS, OUTPUTS, VOCABULARY, Lab, Program, adamw, linears, train


def _freeze(model: nn.Module, *starts: str, trains: bool = False) -> None:
    for name, p in model.named_parameters():
        if name.startswith(starts):
            p.requires_grad_(trains)


def frozen_embedding(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model()
    _freeze(model, "token", "position")
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def frozen_beginning(cnb: Any, lab: Lab) -> nn.Module:
    """All of the first stage."""
    model = lab.model()
    _freeze(model, "token", "position", "blocks.0", "patches", "class_token", "segment")
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def frozen_end(cnb: Any, lab: Lab) -> nn.Module:
    """All of the last stage."""
    model = lab.model()
    _freeze(model, "blocks.1", "norm", "head")
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def only_the_head(cnb: Any, lab: Lab) -> nn.Module:
    """Linear probing; the optimizer holds everything."""
    model = lab.model()
    _freeze(model, *[name for name, _ in model.named_parameters() if not name.startswith("head")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer)
    train(cnb, lab, model, optimizer)
    return model


def only_biases(cnb: Any, lab: Lab) -> nn.Module:
    """And norms: what has one dim."""
    model = lab.model()
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def frozen_afterwards(cnb: Any, lab: Lab) -> nn.Module:
    """After parallelize, and the gradient that is there is kept out of the update."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer, 2)
    optimizer.zero_grad()
    _freeze(model, "token", "blocks.0")
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


def unfrozen_later(cnb: Any, lab: Lab) -> nn.Module:
    """Frozen before parallelize: the blocks and what every rank has whole; then all trains."""
    model = lab.model()
    _freeze(model, "token", "position", "blocks", "norm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model, optimizer = cnb.parallelize(model, optimizer)
    train(cnb, lab, model, optimizer, 2)
    model.requires_grad_(True)
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


def thawed_stage(cnb: Any, lab: Lab) -> nn.Module:
    """The beginning is frozen, with a plain evaluation in between, then trains, then is frozen again."""
    model = lab.model()
    start = ("token", "position", "blocks.0", "patches", "class_token", "segment")
    _freeze(model, *start)
    model, optimizer = cnb.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR))
    for trains, seed in ((False, 1), (True, 2), (False, 3)):
        optimizer.zero_grad()
        _freeze(model, *start, trains=trains)
        train(cnb, lab, model, optimizer, 2, seed=seed)
        with torch.no_grad():
            lab.show("evaluated", model(lab.batches(1)[0][0]))
    return model


def tied(cnb: Any, lab: Lab) -> nn.Module:
    """By hand, as most people do it."""

    def make() -> nn.Module:
        model = MODELS[lab.kind]()
        _outer(model).weight = model.token.weight
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    lab.show("tied", _outer(model).weight is model.token.weight)
    return model


def _outer(model: nn.Module) -> nn.Module:
    """The last linear, which makes the logits."""
    return list(linears(model).values())[-1]


class Spares:
    """A parameter and a layer that nobody uses, and a layer that is used for other batches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        outputs = _outer(self).out_features
        self.spare = nn.Parameter(torch.ones(3, 3))
        self.other_head = nn.Linear(HIDDEN, 5)
        self.extra = nn.Linear(outputs, outputs)
        self.use_extra = False

    def forward(self, *inputs: Tensor) -> Tensor:
        out = super().forward(*inputs)
        return out + self.extra(out) if self.use_extra else out


def unused_parameters(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model(lab.extended(Spares))
    model, optimizer = cnb.parallelize(model, adamw(model, weight_decay=0.1))
    train(cnb, lab, model, optimizer)
    return model


def used_later(cnb: Any, lab: Lab) -> nn.Module:
    """A flag of the model makes a layer take part."""
    model = lab.model(lab.extended(Spares))
    model, optimizer = cnb.parallelize(model, adamw(model, weight_decay=0.1))
    train(cnb, lab, model, optimizer, 2)
    model.use_extra = True
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


class Twice(GPT):
    """Every block is called twice, and the last one three times."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, layers=2, hidden=HIDDEN, heads=4, max_length=16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in (*self.blocks, *self.blocks, self.blocks[1]):
            x = block(x)
        return self.head(self.norm(x))


def blocks_called_twice(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model(Twice)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def one_block_in_two_places(cnb: Any, lab: Lab) -> nn.Module:
    """blocks[1] is blocks[0]."""

    def make() -> nn.Module:
        model = MODELS[lab.kind](layers=3)
        model.blocks[2] = model.blocks[0]
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


class LoRALinear(nn.Module):
    """A frozen linear and two small matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class LoRAMatrices(nn.Module):
    """The same with bare parameters, as most people write it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(base.in_features, rank) * 0.1)
        self.b = nn.Parameter(torch.zeros(rank, base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a @ self.b) * 0.5


def _lora(cnb: Any, lab: Lab, kind: type[nn.Module], adapts: Callable[[str], bool]) -> nn.Module:
    def make() -> nn.Module:
        model = MODELS[lab.kind]().requires_grad_(False)
        for block in model.blocks:
            for name, linear in linears(block).items():
                if adapts(name):
                    holder, _, last = name.rpartition(".")
                    setattr(block.get_submodule(holder), last, kind(linear))
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    lab.show("trains", [name for name, p in model.named_parameters() if p.requires_grad])
    return model


def lora_of_linears(cnb: Any, lab: Lab) -> nn.Module:
    return _lora(cnb, lab, LoRALinear, lambda name: name.startswith("attention"))


def lora_of_matrices(cnb: Any, lab: Lab) -> nn.Module:
    return _lora(cnb, lab, LoRAMatrices, lambda name: name != "attention.out")


class LowRank(nn.Module):
    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, into) * 0.1), nn.Parameter(torch.zeros(out, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def _widens(block: nn.Module) -> nn.Linear:
    """The first linear behind the attention."""
    return next(each for name, each in linears(block).items() if not name.startswith("attention"))


def lora_as_parametrization(cnb: Any, lab: Lab) -> nn.Module:
    def make() -> nn.Module:
        model = MODELS[lab.kind]().requires_grad_(False)
        for block in model.blocks:
            widens = _widens(block)
            parametrize.register_parametrization(widens, "weight", LowRank(*widens.weight.shape))
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def weight_norm(cnb: Any, lab: Lab) -> nn.Module:
    def make() -> nn.Module:
        model = MODELS[lab.kind]()
        parametrizations.weight_norm(_widens(model.blocks[0]))
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


def new_head(cnb: Any, lab: Lab) -> nn.Module:
    """Fine-tuning: another head is put on, the rest frozen but for the last block."""

    def make() -> nn.Module:
        model = MODELS[lab.kind]().requires_grad_(False)
        model.blocks[1].requires_grad_(True)
        model.head = nn.Sequential(nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, OUTPUTS[lab.kind]))
        return model

    model = lab.model(make)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


PROGRAMS: list[Program] = [
    frozen_embedding, frozen_beginning, frozen_end, only_the_head, only_biases, frozen_afterwards, unfrozen_later,
    thawed_stage, tied, unused_parameters, used_later, blocks_called_twice, one_block_in_two_places, lora_of_linears,
    lora_of_matrices, lora_as_parametrization, weight_norm, new_head,
]  # fmt: skip
ONLY: dict[Program, str] = {tied: "gpt llama bert", blocks_called_twice: "gpt"}
"""Models that a program is for, where not for all."""
