"""A small GPT under a strategy with a precision, and its whole weights."""

from typing import Any

import torch
from small_gpt import batch, loss_fn
from torch import Tensor

import colossal_nb as cnb
from colossal_nb.models import GPT

INPUTS, TARGETS = batch(8)


def made(strategy: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = GPT(29, layers=2, hidden=16, heads=4, max_length=8)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    return model, optimizer


def step(model: Any, optimizer: Any, inputs: Any = INPUTS) -> float:
    optimizer.zero_grad()
    loss = cnb.forward_backward(model, loss_fn, inputs, TARGETS)
    optimizer.step()
    return float(loss)


def whole(model: Any) -> dict[str, Tensor]:
    return {name: cnb.full(p) for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], value) for name, value in b.items())
