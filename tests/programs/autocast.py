"""bf16 by torch.autocast, around the step and around evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from programs import Lab, Outcome, Program, adamw


def _bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def autocast_around_steps(cnb: Any, lab: Lab) -> nn.Module:
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        with _bf16():
            lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
    with torch.no_grad(), _bf16():
        for samples in (4, 3, 1):
            inputs, targets = lab.batches(1, samples, seed=samples)[0]
            output = model(inputs)
            lab.show("dtype", str(output.dtype))
            lab.show("loss evaluated", lab.loss_fn(output, targets))
    return model


def autocast_inside_the_loss_only(cnb: Any, lab: Lab) -> nn.Module:
    """The other way round: bf16 in the model, the loss outside of it in fp32."""
    model = lab.model()

    def loss_fn(output: Any, targets: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return lab.loss_fn(output.float(), targets)

    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        with _bf16():
            loss, output = cnb.forward_backward(model, loss_fn, inputs, targets, return_output=True)
        lab.show("dtype", str(output.dtype))
        lab.show("loss", loss)
        optimizer.step()
    return model


def evaluated_under_autocast(cnb: Any, lab: Lab) -> nn.Module:
    """Trained in fp32, evaluated in bf16 between the steps."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    for inputs, targets in lab.batches():
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
        with torch.no_grad(), _bf16():
            lab.show("loss evaluated", lab.loss_fn(model(inputs), targets))
    return model


def outside(found: Outcome, expected: Outcome) -> list[str]:
    """What is outside of the band of bf16, in words."""
    wrong = []
    for (name, a), (other, b) in zip(found.shown, expected.shown, strict=True):
        if a != b if isinstance(b, str) else name != other or abs(float(a) - float(b)) > 2e-2:
            wrong.append(f"{name}: {a} for {b}")
    wrong += [f"gradients of {sorted(set(found.gradients) ^ set(expected.gradients))}"] * (
        list(found.gradients) != list(expected.gradients)
    )
    for name, b in expected.gradients.items():
        cosine = nn.functional.cosine_similarity(found.gradients[name].double().flatten(), b.double().flatten(), dim=0)
        # A gradient that is 0 in exact arithmetic (of the keys' bias) has no direction.
        if cosine < 0.999 and float(b.norm()) > 1e-6:
            wrong.append(f"gradient {name}: cosine {float(cosine):.5f}, norm {float(b.norm()):.1e}")
    return wrong


PROGRAMS: list[Program] = [autocast_around_steps, autocast_inside_the_loss_only, evaluated_under_autocast]
