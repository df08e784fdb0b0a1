"""Validation, metrics, averaged copies of the model, generation."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from programs import LR, Lab, Program, adamw, text_loss, train


def _trained(cnb: Any, lab: Lab, count: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    model = lab.model(**options)
    model, optimizer = cnb.parallelize(model, adamw(model))
    train(cnb, lab, model, optimizer, count)
    return model, optimizer


def validation(cnb: Any, lab: Lab) -> nn.Module:
    """The last batches are smaller than there are replicas; accuracy and perplexity by running sums."""
    model, optimizer = _trained(cnb, lab)
    for epoch in range(2):
        model.eval()
        total = right = count = 0.0
        with torch.no_grad():
            for samples in (5, 3, 1):
                for inputs, targets in lab.batches(1, samples, seed=samples):
                    output = model(inputs)
                    known = targets != -100
                    total += lab.loss_fn(output, targets).item() * known.sum().item()
                    right += (output.argmax(-1) == targets)[known].sum().item()
                    count += known.sum().item()
        model.train()
        lab.show("perplexity", math.exp(total / count))
        lab.show("accuracy", right / count)
        lab.show("training", model.training and model.blocks[0].training)
        train(cnb, lab, model, optimizer, 1, seed=epoch)
    return model


def inference_mode(cnb: Any, lab: Lab) -> nn.Module:
    model, optimizer = _trained(cnb, lab)

    @torch.inference_mode()
    def evaluate() -> float:
        return lab.loss_fn(model(inputs), targets).item()

    inputs, targets = lab.batches(1, 3)[0]
    lab.show("evaluated", evaluate())
    train(cnb, lab, model, optimizer, 1, seed=8)
    with torch.inference_mode():
        lab.show("output", model(inputs))
    return model


def dropout_only_while_training(cnb: Any, lab: Lab) -> nn.Module:
    """Trained in eval mode, so that nothing is dropped; train() and back leaves the modes of all modules."""
    model = lab.model(dropout=0.5)
    model, optimizer = cnb.parallelize(model, adamw(model))
    model.eval()
    train(cnb, lab, model, optimizer)
    model.train()
    model.blocks[0].eval()
    lab.show("modes", [module.training for module in model.modules() if isinstance(module, nn.Dropout)])
    model.eval()
    with torch.no_grad():
        lab.show("output", model(lab.batches(1, 5)[0][0]))
    return model


def ema_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """A copy of the parallel model that follows it, and is evaluated."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    average = copy.deepcopy(model).requires_grad_(False).eval()
    for seed in range(3):
        train(cnb, lab, model, optimizer, 1, seed=seed)
        with torch.no_grad():
            for mine, p in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(p, 0.25)
    with torch.no_grad():
        lab.show("average", average(lab.batches(1, 3)[0][0]))
    for name, value in average.state_dict().items():
        lab.show(name, value)
    return model


def ema_shadow(cnb: Any, lab: Lab) -> nn.Module:
    """A dict of clones that follows, is swapped in for the evaluation, and back."""
    model, optimizer = _trained(cnb, lab)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(2):
        train(cnb, lab, model, optimizer, 1, seed=seed)
        for name, p in model.named_parameters():
            shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.copy_(shadow[name])
    with torch.no_grad():
        lab.show("average", model(lab.batches(1, 3)[0][0]))
    for name, p in model.named_parameters():
        p.data.copy_(kept[name])
    train(cnb, lab, model, optimizer, 1)
    return model


def averaged_model(cnb: Any, lab: Lab) -> nn.Module:
    """torch's own, made before and after parallelize, means and exponential means."""
    model = lab.model()
    model, optimizer = cnb.parallelize(model, adamw(model))
    averages = [AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))]
    for seed in range(3):
        train(cnb, lab, model, optimizer, 1, seed=seed)
        for average in averages:
            average.update_parameters(model)
    for average in averages:
        average.eval()
        with torch.no_grad():
            lab.show("average", average(lab.batches(1, 3)[0][0]))
    return averages[0].module


def best_in_memory(cnb: Any, lab: Lab) -> nn.Module:
    """The best weights are kept and come back at the end."""
    model, optimizer = _trained(cnb, lab, 1)
    best, weights = float("inf"), None
    inputs, targets = lab.batches(1, 3, seed=5)[0]
    for seed in range(3):
        train(cnb, lab, model, optimizer, 1, seed=seed)
        model.eval()
        with torch.no_grad():
            loss = lab.loss_fn(model(inputs), targets).item()
        model.train()
        lab.show("validation", loss)
        if loss < best:
            best, weights = loss, copy.deepcopy(model.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.3  # so that it gets worse
    model.load_state_dict(weights)
    with torch.no_grad():
        lab.show("again", lab.loss_fn(model(inputs), targets).item())
    return model


def generated(cnb: Any, lab: Lab) -> nn.Module:
    """While training, in the mode of training; then by a plain loop."""
    model, optimizer = _trained(cnb, lab, dropout=0.0)
    prompts = lab.batches(1, 3)[0][0]
    lab.show("texts", cnb.generate(model, prompts, 4))
    lab.show("text", cnb.generate(model, prompts[:1, :2], 5))
    lab.show("training", model.training)
    train(cnb, lab, model, optimizer, 1, seed=8)
    tokens = prompts[:1]
    with torch.no_grad():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    lab.show("loop", tokens)
    return model


def sampled_by_hand(cnb: Any, lab: Lab) -> nn.Module:
    """A loop with torch.multinomial and torch's own random state."""
    model, optimizer = _trained(cnb, lab)
    torch.manual_seed(3)
    tokens = lab.batches(1, 3)[0][0]
    with torch.no_grad():
        for _ in range(4):
            chances = torch.softmax(model(tokens)[:, -1] / 0.8, -1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    lab.show("loop", tokens)
    train(cnb, lab, model, optimizer, 1, seed=8)
    return model


def distilled(cnb: Any, lab: Lab) -> nn.Module:
    """A frozen teacher, itself parallel, gives the targets."""
    teacher = cnb.parallelize(lab.model().eval().requires_grad_(False))
    model = lab.model()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    model, optimizer = cnb.parallelize(model, torch.optim.AdamW(model.parameters(), lr=LR))

    def loss_fn(output: Any, targets: Any) -> Any:
        soft, hard = targets
        chances = soft.softmax(-1).flatten(0, -2)
        return nn.functional.cross_entropy(output.flatten(0, -2), chances) + text_loss(output, hard)

    for inputs, targets in lab.batches():
        with torch.no_grad():
            soft = teacher(inputs)
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, loss_fn, inputs, (soft, targets.clamp(min=0))))
        optimizer.step()
    return model


PROGRAMS: list[Program] = [
    validation, inference_mode, dropout_only_while_training, ema_by_hand, averaged_model, best_in_memory, generated,
    sampled_by_hand, distilled,
    ema_shadow,
]  # fmt: skip
ONLY: dict[Program, str] = {generated: "gpt llama bert", sampled_by_hand: "gpt llama bert"}
