"""Learning rates, clipping, accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from programs import LR, Lab, Program, adamw, train


def _scheduled(cnb: Any, lab: Lab, make: Any, on_loss: bool = False) -> nn.Module:
    model = lab.model()
    optimizer = adamw(model)
    scheduler = make(optimizer)
    model, optimizer = cnb.parallelize(model, optimizer)
    for inputs, targets in lab.batches(4):
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, lab.loss_fn, inputs, targets)
        optimizer.step()
        scheduler.step(*([loss] if on_loss else []))
        lab.show("loss", loss)
        lab.show("lr", scheduler.get_last_lr()[0])
    return model


def lambda_warm_up(cnb: Any, lab: Lab) -> nn.Module:
    return _scheduled(cnb, lab, lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 3)))


def one_cycle(cnb: Any, lab: Lab) -> nn.Module:
    return _scheduled(cnb, lab, lambda o: lr_scheduler.OneCycleLR(o, max_lr=3 * LR, total_steps=4))


def one_cycle_with_momentum(cnb: Any, lab: Lab) -> nn.Module:
    """The schedule moves the betas of every group as well as its learning rate."""
    model = lab.model()
    bodies = [p for name, p in model.named_parameters() if not name.startswith("head")]
    heads = [p for name, p in model.named_parameters() if name.startswith("head")]
    optimizer = torch.optim.AdamW([{"params": bodies}, {"params": heads, "lr": 2 * LR}], lr=LR, eps=1e-5)
    scheduler = lr_scheduler.OneCycleLR(
        optimizer, max_lr=[3 * LR, LR], total_steps=5, cycle_momentum=True, base_momentum=0.6, max_momentum=0.9
    )
    model, optimizer = cnb.parallelize(model, optimizer)
    for inputs, targets in lab.batches(4):
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
        scheduler.step()
        lab.show("settings", [(group["lr"], *group["betas"]) for group in optimizer.param_groups])
    return model


def cosine(cnb: Any, lab: Lab) -> nn.Module:
    return _scheduled(cnb, lab, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4))


def plateau(cnb: Any, lab: Lab) -> nn.Module:
    return _scheduled(cnb, lab, lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0), on_loss=True)


def sequential_schedules(cnb: Any, lab: Lab) -> nn.Module:
    def make(optimizer: Any) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.ExponentialLR(optimizer, 0.5)], milestones=[2])

    return _scheduled(cnb, lab, make)


def _clipped(cnb: Any, lab: Lab, clip: Any) -> nn.Module:
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        clip(model)
        optimizer.step()
    return model


def _model_and_adamw(lab: Lab) -> tuple[nn.Module, torch.optim.AdamW]:
    model = lab.model()
    return model, adamw(model)


def clip_norm(cnb: Any, lab: Lab) -> nn.Module:
    return _clipped(cnb, lab, lambda m: lab.show("norm", nn.utils.clip_grad_norm_(m.parameters(), 0.1)))


def clip_inf_norm(cnb: Any, lab: Lab) -> nn.Module:
    return _clipped(
        cnb, lab, lambda m: lab.show("norm", nn.utils.clip_grad_norm_(m.parameters(), 0.001, norm_type=float("inf")))
    )


def clip_value(cnb: Any, lab: Lab) -> nn.Module:
    return _clipped(cnb, lab, lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3))


def total_norm(cnb: Any, lab: Lab) -> nn.Module:
    def clip(model: nn.Module) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        lab.show("norm", norm)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)

    return _clipped(cnb, lab, clip)


def clip_in_two_parts(cnb: Any, lab: Lab) -> nn.Module:
    """The head and the rest, each with its own limit."""

    def clip(model: nn.Module) -> None:
        head = [p for name, p in model.named_parameters() if name.startswith("head")]
        rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
        for part, most in ((head, 0.01), (rest, 0.1)):
            lab.show("norm", nn.utils.clip_grad_norm_(part, most))

    return _clipped(cnb, lab, clip)


def accumulate_block(cnb: Any, lab: Lab) -> nn.Module:
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    batches = lab.batches(4)
    for first in (0, 2):
        optimizer.zero_grad()
        with cnb.accumulate(model):
            for inputs, targets in batches[first : first + 2]:
                lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
    return model


def accumulate_by_repeating(cnb: Any, lab: Lab) -> nn.Module:
    """The loss is divided by the number of batches, as in every tutorial."""
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    for step, (inputs, targets) in enumerate(lab.batches(5), 1):
        loss = cnb.forward_backward(model, lambda out, t: lab.loss_fn(out, t) / 2, inputs, targets)
        lab.show("loss", loss)
        if step % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


def gradients_averaged_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """Two batches, then every gradient times a half; one gradient is thrown away."""
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    batches = lab.batches(4)
    for first in (0, 2):
        optimizer.zero_grad()
        for inputs, targets in batches[first : first + 2]:
            lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        model.norm.weight.grad = None
        optimizer.step()
    return model


def zeroed_in_place(cnb: Any, lab: Lab) -> nn.Module:
    """zero_grad(set_to_none=False) keeps the tensors."""
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    for inputs, targets in lab.batches():
        optimizer.zero_grad(set_to_none=False)
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
    model.zero_grad(set_to_none=False)
    return model


def batches_of_all_sizes(cnb: Any, lab: Lab) -> nn.Module:
    """The last ones are smaller than there are parts."""
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    for samples in (5, 2, 1, 3):
        train_one(cnb, lab, model, optimizer, samples)
    return model


def train_one(cnb: Any, lab: Lab, model: nn.Module, optimizer: Any, samples: int) -> None:
    ((inputs, targets),) = lab.batches(1, samples, seed=samples)
    optimizer.zero_grad()
    lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
    optimizer.step()


def early_stopping(cnb: Any, lab: Lab) -> nn.Module:
    model, optimizer = cnb.parallelize(*_model_and_adamw(lab))
    best, bad, (inputs, targets) = float("inf"), 0, lab.batches(1)[0]
    for step in range(6):
        optimizer.zero_grad()
        loss = cnb.forward_backward(model, lab.loss_fn, inputs, targets).item()
        optimizer.step()
        best, bad = (loss, 0) if loss < best - 0.05 else (best, bad + 1)
        if bad == 2:
            lab.show("stopped", step)
            break
    train(cnb, lab, model, optimizer, 1)
    return model


PROGRAMS: list[Program] = [
    lambda_warm_up, one_cycle, one_cycle_with_momentum, cosine, plateau, sequential_schedules, clip_norm, clip_inf_norm,
    clip_value,
    total_norm, clip_in_two_parts, accumulate_block, accumulate_by_repeating, gradients_averaged_by_hand,
    zeroed_in_place, batches_of_all_sizes, early_stopping,
]  # fmt: skip
