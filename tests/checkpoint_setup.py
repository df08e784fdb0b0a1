"""A small run that trains a step, and its checkpoint, for the tests of what can go wrong with one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_gpt import gpt, train
from torch import nn

import colossal_nb as cnb

Setup = tuple[Any, Any]


def setup(strategy: str, make: Callable[[], nn.Module] = gpt, kind: Any = torch.optim.AdamW) -> Setup:
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, 1)
    return model, optimizer


def save_trained(path: Path, strategy: str = "tp=2") -> None:
    cnb.save(path, *setup(strategy), step=1)


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/*.distcp"))
