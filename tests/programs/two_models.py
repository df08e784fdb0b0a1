"""Two parallel models in one loss: a teacher that only answers, a critic that is trained in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from programs import OUTPUTS, Lab, Program, adamw


def parallel_teacher(cnb: Any, lab: Lab) -> nn.Module:
    """The student learns from labels, all of which count, and from a frozen teacher, which loss_fn asks."""
    student, teacher = lab.model(), lab.model().requires_grad_(False)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(1.1)
    teacher = cnb.parallelize(teacher.eval())
    student, optimizer = cnb.parallelize(student, adamw(student))

    def distilled(output: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = targets
        with torch.no_grad():
            wanted = teacher(inputs)
        return lab.loss_fn(output, labels.clamp(min=0)) + 0.5 * functional.mse_loss(output, wanted)

    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(student, distilled, inputs, (inputs, targets)))
        optimizer.step()
    return student


def adversarial(cnb: Any, lab: Lab) -> nn.Module:
    """A critic tells what the model made from noise; the model's loss goes through it and leaves gradients in it."""
    model = lab.model()
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(OUTPUTS[lab.kind], 8), nn.Tanh(), nn.Linear(8, 1)).to(lab.dtype)
    model, optimizer = cnb.parallelize(model, adamw(model))
    critic, own = cnb.parallelize(critic, torch.optim.SGD(critic.parameters(), lr=0.1))

    def fooled(output: Tensor, _: Tensor) -> Tensor:
        return (critic(output) - 1).pow(2).mean()

    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, fooled, inputs, targets))
        optimizer.step()
        lab.show("left in the critic", cnb.full_grad(critic[0].weight))
        own.zero_grad()
        with torch.no_grad():
            made = cnb.output(model, inputs)
        both = torch.cat([made, torch.randn_like(made)])
        marks = torch.cat([torch.zeros_like(made[..., :1]), torch.ones_like(made[..., :1])])
        told = cnb.forward_backward(critic, functional.binary_cross_entropy_with_logits, both, marks)
        lab.show("critic's loss", told)
        own.step()
        lab.show("critic", cnb.full(critic[2].weight))
    return model


PROGRAMS: list[Program] = [parallel_teacher, adversarial]
