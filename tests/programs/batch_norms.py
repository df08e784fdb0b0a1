"""Models whose layers keep running statistics of the batches, evaluated with these."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from programs import Lab, Program


class Convnet(nn.Module):
    """One norm of each kind: averaged, cumulative, frozen, called twice, of an instance."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.frozen = nn.BatchNorm2d(6).requires_grad_(False)
        self.instance = nn.InstanceNorm2d(6, affine=True, momentum=0.3, track_running_stats=True)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.shared = nn.BatchNorm1d(6, momentum=0.2)
        self.head = nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.instance(self.frozen(self.second(self.first(images)))).tanh().mean((2, 3))
        x = self.shared(x + self.down(self.up(x).relu()))
        return self.head(self.shared(x * 2))


class Skipping(nn.Module):
    """Dark images take one way more: parts of a batch call a norm more often than others, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.late = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.linear(images.flatten(1)))
        if images.mean() < 0.5:
            x = self.norm(self.late(x))
        return self.head(x)


def _made(cnb: Any, lab: Lab, make: Any = Convnet) -> tuple[Any, Any]:
    model = lab.model(make)
    return cnb.parallelize(model, torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3))


def _train(cnb: Any, lab: Lab, model: Any, optimizer: Any, sizes: tuple[int, ...]) -> None:
    for seed, samples in enumerate(sizes):
        inputs, targets = lab.batches(1, samples, seed)[0]
        optimizer.zero_grad()
        lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()


def _evaluate(lab: Lab, model: Any) -> None:
    model.eval()
    with torch.no_grad():
        lab.show("output", model(lab.batches(1, 5)[0][0]))
    for name, value in model.state_dict().items():
        lab.show(name, value)
    for name, value in model.named_buffers():
        lab.show(f"{name} as a rank reads it", value)
    model.train()


def evaluated(cnb: Any, lab: Lab) -> nn.Module:
    """Batches that do not divide; one norm is frozen for a while, and thawed."""
    model, optimizer = _made(cnb, lab)
    model.frozen.eval()
    _train(cnb, lab, model, optimizer, (16, 18, 11))
    _evaluate(lab, model)
    _train(cnb, lab, model, optimizer, (12, 9))
    _evaluate(lab, model)
    return model


def few_samples(cnb: Any, lab: Lab) -> nn.Module:
    """Fewer of them than there are parts: some replicas have none."""
    model = lab.model(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)))
    model, optimizer = cnb.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    _train(cnb, lab, model, optimizer, (1, 4, 3, 1))
    _evaluate(lab, model)
    return model


def accumulated(cnb: Any, lab: Lab) -> nn.Module:
    """Two batches in a step; a copy made in between goes its own way."""
    model, optimizer = _made(cnb, lab)
    for seed in range(2):
        optimizer.zero_grad()
        with cnb.accumulate(model):
            for inputs, targets in lab.batches(2, 8, seed):
                lab.show("loss", cnb.forward_backward(model, lab.loss_fn, inputs, targets))
        optimizer.step()
    twin = copy.deepcopy(model)
    for each in (twin, model):
        inputs, targets = lab.batches(1, 8)[0]
        lab.show("loss", cnb.forward_backward(each, lab.loss_fn, inputs, targets))
        _evaluate(lab, each)
    return model


def skipping(cnb: Any, lab: Lab) -> nn.Module:
    model, optimizer = _made(cnb, lab, Skipping)
    _train(cnb, lab, model, optimizer, (8, 8, 10, 9))
    _evaluate(lab, model)
    return model


def plain_loop(cnb: Any, lab: Lab) -> nn.Module:
    """A loop without forward_backward; a forward without gradients moves running statistics too."""
    model, optimizer = _made(cnb, lab)
    for inputs, targets in lab.batches(3, 9):
        optimizer.zero_grad()
        loss = lab.loss_fn(cnb.output(model, inputs), targets)
        loss.backward()
        optimizer.step()
        lab.show("loss", loss)
    with torch.no_grad():
        lab.show("output", cnb.output(model, inputs))
    _evaluate(lab, model)
    return model


PROGRAMS: list[Program] = [evaluated, few_samples, accumulated, skipping, plain_loop]
