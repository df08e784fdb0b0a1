"""The models that we ship are plain sequential torch, and train under every strategy as they do on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from equivalence import Batch, Outcome, check, train
from torch import Tensor, nn

from colossal_nb.models import BERT, GPT, Llama, ViT

pytestmark = pytest.mark.ranks
STEPS = 3
VOCABULARY = 257  # a byte and one more: no number of ranks divides it
LENGTH = 8
Make = Callable[[], nn.Module]


def gpt(dropout: float = 0.0) -> GPT:
    return GPT(VOCABULARY, layers=2, hidden=16, heads=4, max_length=16, dropout=dropout)


def llama(dropout: float = 0.0) -> Llama:
    return Llama(VOCABULARY, layers=2, hidden=16, heads=4, kv_heads=2, max_length=16, dropout=dropout)


def bert(dropout: float = 0.0) -> BERT:
    return BERT(VOCABULARY, layers=2, hidden=16, heads=4, max_length=16, dropout=dropout)


def vit(dropout: float = 0.0) -> ViT:
    return ViT(8, 4, classes=10, layers=2, hidden=16, heads=4, channels=1, dropout=dropout)


def batches(make: Make, samples: int, dtype: torch.dtype) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [_BATCHES[make](samples, dtype, generator) for _ in range(STEPS)]


def _words(samples: int, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    """The next token, in texts of different lengths."""
    text = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[torch.arange(LENGTH) >= _lengths(samples, generator)] = -100
    return text[:, :-1], targets


def _gaps(samples: int, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    """Words to guess, in texts of different lengths, of two segments."""
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    seen = torch.arange(LENGTH) < _lengths(samples, generator)
    hidden = (torch.rand(samples, LENGTH, generator=generator) < 0.4) & seen
    hidden[:, 0] = True
    segments = (torch.arange(LENGTH) >= _lengths(samples, generator) // 2).long()
    inputs = {"tokens": tokens.masked_fill(hidden, 0), "attention_mask": seen.long(), "token_types": segments}
    return inputs, tokens.masked_fill(~hidden, -100)


def _lengths(samples: int, generator: torch.Generator) -> Tensor:
    lengths = torch.randint(1, LENGTH, (samples, 1), generator=generator)
    lengths[0] = LENGTH
    return lengths


def _images(samples: int, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    images = torch.rand(samples, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    return images, torch.randint(10, (samples,), generator=generator)


_BATCHES: dict[Any, Callable[[int, torch.dtype, torch.Generator], Batch]] = {
    gpt: _words, llama: _words, bert: _gaps, vit: _images
}  # fmt: skip
MODELS = [gpt, llama, bert, vit]
CASES = [
    (2, "dp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2 tp=2"), (4, "tp=2 pp=2"), (4, "tp=4"), (8, "dp=2 tp=2 pp=2")
]  # fmt: skip


def program(*args: Any) -> Outcome:
    """`train`, as a function of this module: it goes to the ranks together with the models above."""
    return train(*args)


@cache
def sequential(make: Make, samples: int, dtype: torch.dtype) -> Outcome:
    return train(make, batches(make, samples, dtype), dtype, None, None)


@pytest.mark.parametrize(("count", "strategy"), CASES)
@pytest.mark.parametrize(("dtype", "samples"), [(torch.float64, 7), (torch.float32, 8)])
@pytest.mark.parametrize("make", MODELS)
def test_equal_to_sequential(
    ranks: Any, count: int, strategy: str, make: Make, dtype: torch.dtype, samples: int
) -> None:
    outcomes = ranks(count).run(program, make, batches(make, samples, dtype), dtype, strategy, None)
    check(outcomes, sequential(make, samples, dtype), dtype)
