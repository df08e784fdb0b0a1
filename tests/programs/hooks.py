"""Hooks on modules and on parameters, that read or change what passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from programs import VOCABULARY, Lab, Program, adamw, train


def _hooked(cnb: Any, lab: Lab, hook: Any, before: bool = True) -> nn.Module:
    model = lab.model()
    if before:
        hook(model)
    model, optimizer = cnb.parallelize(model, adamw(model))
    if not before:
        hook(model)
    train(cnb, lab, model, optimizer)
    with torch.no_grad():
        lab.show("output", model(lab.batches(1)[0][0]))
    return model


def _change_forwards(model: nn.Module) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 0.5)
    model.blocks[1].register_forward_hook(lambda module, args, out: out + 0.1)
    model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    model.blocks[1].attention.register_forward_hook(lambda module, args, out: out * 2)
    model.register_forward_hook(lambda module, args, out: out * 0.9)


def forward_hooks_change(cnb: Any, lab: Lab) -> nn.Module:
    return _hooked(cnb, lab, _change_forwards)


def forward_hooks_change_added_later(cnb: Any, lab: Lab) -> nn.Module:
    return _hooked(cnb, lab, _change_forwards, before=False)


def _change_backwards(model: nn.Module) -> None:
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5, *into[1:]))
        block.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))


def backward_hooks_change(cnb: Any, lab: Lab) -> nn.Module:
    return _hooked(cnb, lab, _change_backwards)


def backward_hooks_change_added_later(cnb: Any, lab: Lab) -> nn.Module:
    return _hooked(cnb, lab, _change_backwards, before=False)


def inner_backward_hooks(cnb: Any, lab: Lab) -> nn.Module:
    """On a layer inside a block, whose output every rank has whole."""

    def hook(model: nn.Module) -> None:
        for block in model.blocks:
            block.attention.register_full_backward_hook(lambda module, into, out: (into[0] * 2, *into[1:]))

    return _hooked(cnb, lab, hook)


class Stacked(nn.Module):
    """Its blocks run in one call of their list."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens))))


def backward_hook_around_blocks(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model(Stacked)
    model, optimizer = cnb.parallelize(model, adamw(model))
    model.blocks.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))
    train(cnb, lab, model, optimizer)
    return model


def reading_hooks_leave_everything(cnb: Any, lab: Lab) -> nn.Module:
    """What they see is local; that they look changes nothing."""
    seen: list[float] = []

    def hook(model: nn.Module) -> None:
        for module in model.modules():
            module.register_forward_hook(lambda m, args, out: seen.append(float(out.shape[0])))
        for block in model.blocks:
            block.register_full_backward_hook(lambda m, into, out: seen.append(float(out[0].shape[0])))
        for p in model.parameters():
            p.register_hook(lambda g: seen.append(float(g.dim())))

    model = _hooked(cnb, lab, hook)
    lab.show("seen", bool(seen))
    return model


def _clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def _scale_and_clamp(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.register_hook(_clamped if p.dim() > 1 else (lambda g: g * 2))
        if "norm" in name:
            p.register_hook(lambda g: g + 1e-3)


def parameter_hooks(cnb: Any, lab: Lab) -> nn.Module:
    """Gradients are clamped one by one: what a hook sees is the gradient of the whole batch."""
    return _hooked(cnb, lab, _scale_and_clamp)


def parameter_hooks_added_later(cnb: Any, lab: Lab) -> nn.Module:
    return _hooked(cnb, lab, _scale_and_clamp, before=False)


def hooks_that_go(cnb: Any, lab: Lab) -> nn.Module:
    """Added, used for two steps, removed."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    handles = [p.register_hook(_clamped) for p in model.parameters()]
    handles.append(model.blocks[0].register_forward_hook(lambda module, args, out: out * 0.5))
    train(cnb, lab, model, optimizer, 2)
    for handle in handles:
        handle.remove()
    train(cnb, lab, model, optimizer, 2, seed=8)
    return model


def hooks_with_repeated_batches(cnb: Any, lab: Lab) -> nn.Module:
    """Each batch's gradient is clamped by itself and added; the sum is there for the hook behind the addition."""
    model = lab.model()
    sums: list[int] = []
    for p in model.parameters():
        p.register_hook(_clamped)
    model, optimizer = cnb.parallelize(model, adamw(model))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad is not None and p.grad.mul_(0.9).dim()))
    for inputs, targets in lab.batches(4):
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
    optimizer.step()
    return model


def normed_by_hooks(cnb: Any, lab: Lab) -> nn.Module:
    """Each gradient gets the length 1: no part of it is enough for that."""

    def hook(model: nn.Module) -> None:
        for p in model.parameters():
            p.register_hook(lambda g: g / (g.norm() + 1e-3))

    return _hooked(cnb, lab, hook)


def frozen_by_zeros(cnb: Any, lab: Lab) -> nn.Module:
    """Rows of positions are frozen by a hook that makes their gradient 0: the mask is as large as the weight."""
    model = lab.model()
    weight = {"vit": "positions", "llama": "token.weight"}.get(lab.kind, "position.weight")
    p = model.get_parameter(weight)
    rows = torch.arange(p.shape[-2]) % 2 == 0
    p.register_hook(lambda gradient: gradient * rows[:, None].to(gradient.dtype))
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer)
    return model


PROGRAMS: list[Program] = [
    forward_hooks_change, forward_hooks_change_added_later, inner_backward_hooks, reading_hooks_leave_everything,
    normed_by_hooks, frozen_by_zeros, backward_hooks_change, backward_hooks_change_added_later,
    backward_hook_around_blocks, parameter_hooks, parameter_hooks_added_later, hooks_that_go,
    hooks_with_repeated_batches,
]  # fmt: skip
ONLY: dict[Program, str] = {backward_hook_around_blocks: "gpt"}
