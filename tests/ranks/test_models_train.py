"""The models that we ship are plain sequential torch, and train under every strategy as they do on one device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from equivalence import Batch, Outcome, check, train
from small_gpt import loss_fn
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import BERT, GPT, Llama, ViT
from colossal_nb.parallel import report
from colossal_nb.parallel.layouts import layout_of
from colossal_nb.plan.layout import Shard

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
def sequential(make: Make, samples: int, dtype: torch.dtype, clip: float | None) -> Outcome:
    return train(make, batches(make, samples, dtype), dtype, None, clip)


@pytest.mark.parametrize(("count", "strategy"), CASES)
@pytest.mark.parametrize(("dtype", "samples", "clip"), [(torch.float64, 7, 0.5), (torch.float32, 8, None)])
@pytest.mark.parametrize("make", MODELS)
def test_equal_to_sequential(
    ranks: Any, count: int, strategy: str, make: Make, dtype: torch.dtype, samples: int, clip: float | None
) -> None:
    outcomes = ranks(count).run(program, make, batches(make, samples, dtype), dtype, strategy, clip)
    check(outcomes, sequential(make, samples, dtype, clip), dtype)


def cuts(make: Make, strategy: str) -> tuple[dict[str, str], list[str]]:
    """Per parameter how it is cut along tp ("" is whole), and the report."""
    model = cnb.parallelize(make(), strategy=strategy)
    found = {}
    for name, p in model.named_parameters():
        layout = layout_of(p)
        placement = layout.placement("tp")
        found[name] = ""
        if isinstance(placement, Shard):
            found[name] = f"dim {placement.dim}: {p.shape[placement.dim]} of {layout.global_shape[placement.dim]}"
    return found, report.lines(model)


COLUMN_QKV = {"attention.qkv.weight": "dim 0: 24 of 48", "attention.qkv.bias": "dim 0: 24 of 48"}
ROW_OUT = {"attention.out.weight": "dim 1: 8 of 16"}
UP_DOWN = {"up.weight": "dim 0: 32 of 64", "up.bias": "dim 0: 32 of 64", "down.weight": "dim 1: 32 of 64"}
SWIGLU = {
    "mlp.gate.weight": "dim 0: 24 of 48",
    "mlp.up.weight": "dim 0: 24 of 48",
    "mlp.down.weight": "dim 1: 24 of 48",
}
GROUPED = {
    "attention.q.weight": "dim 0: 8 of 16",
    "attention.k.weight": "dim 0: 4 of 8",
    "attention.v.weight": "dim 0: 4 of 8",
}
ROWS = "dim 0: 129 of 257"
CUT: dict[Any, tuple[dict[str, str], dict[str, str]]] = {  # in every block; elsewhere
    gpt: (COLUMN_QKV | ROW_OUT | UP_DOWN, {"token.weight": ROWS, "head.weight": ROWS}),
    llama: (GROUPED | ROW_OUT | SWIGLU, {"token.weight": ROWS, "head.weight": ROWS}),
    bert: (COLUMN_QKV | ROW_OUT | UP_DOWN, {"token.weight": ROWS, "head.decoder.bias": ROWS}),
    vit: (COLUMN_QKV | ROW_OUT | UP_DOWN, {}),
}


@pytest.mark.parametrize("make", MODELS)
def test_the_matrices_of_all_blocks_and_the_vocabulary_are_cut(ranks: Any, make: Make) -> None:
    in_blocks, elsewhere = CUT[make]
    expected = {f"blocks.{block}.{name}": cut for block in range(2) for name, cut in in_blocks.items()} | elsewhere
    found, lines = ranks(2).run(cuts, make, "tp=2")[0]
    assert {name: cut for name, cut in found.items() if cut} == expected
    text = "\n".join(lines)
    assert "blocks.0-1.attention: q" in text
    assert all(f"whole: {name}" not in text for name in ("blocks", "token", "head.decoder"))


def losses(make: Make, strategy: str, dropout: float) -> list[float]:
    torch.manual_seed(0)
    model = make(dropout=dropout).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    found = []
    for inputs, targets in batches(make, 7, torch.float64):
        optimizer.zero_grad()
        found.append(cnb.forward_backward(model, loss_fn, inputs, targets).item())
        optimizer.step()
    return found


@cache
def alone(ranks: Any, make: Make) -> list[float]:
    found, without = (ranks(1).run(losses, make, "", dropout)[0] for dropout in (0.1, 0.0))
    assert all(abs(a - b) > 1e-4 for a, b in zip(found, without, strict=True))
    return found


@pytest.mark.parametrize(("count", "strategy"), CASES)
@pytest.mark.parametrize("make", MODELS)
def test_dropout_is_the_same_everywhere(ranks: Any, count: int, strategy: str, make: Make) -> None:
    expected = alone(ranks, make)
    for found in ranks(count).run(losses, make, strategy, 0.1):
        assert found == pytest.approx(expected, rel=1e-10)


def evaluated(make: Make, strategy: str) -> tuple[Tensor, Tensor]:
    """The output of all samples, from a model that is parallel and from one that is not."""
    torch.manual_seed(0)
    model = make().double().eval()
    ((inputs, _), *_) = batches(make, 3, torch.float64)
    keywords = inputs if isinstance(inputs, dict) else {}
    plain = () if keywords else (inputs,)
    with torch.no_grad():
        expected = model(*plain, **keywords)
        return cnb.parallelize(model, strategy=strategy)(*plain, **keywords), expected


@pytest.mark.parametrize(("count", "strategy"), [(2, "pp=2"), (4, "dp=2 tp=2"), (8, "dp=2 tp=2 pp=2")])
@pytest.mark.parametrize("make", MODELS)
def test_evaluation_gives_the_whole_output(ranks: Any, count: int, strategy: str, make: Make) -> None:
    for found, expected in ranks(count).run(evaluated, make, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Padded(nn.Module):
    """torch's encoder with its defaults: without gradients in eval mode it packs padded rows for fused kernels."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=not norm_first)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)).mean(1)


def _padded(strategy: str, norm_first: bool) -> list[Tensor]:
    """Outputs in eval mode, of the model and of its encoder by itself (which under pp lies on several stages)."""
    tokens = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9], [1, 0, 0, 0]])
    model = Padded(norm_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if strategy:
        model, optimizer = cnb.parallelize(model, optimizer, strategy)
        cnb.forward_backward(model, nn.functional.cross_entropy, tokens, torch.arange(4) % 3)
    else:
        nn.functional.cross_entropy(model(tokens), torch.arange(4) % 3).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        inside = [] if "pp" in strategy else [model.encoder(torch.ones(4, 3, 8).cumsum(2).sin())]
        return [model(tokens), *inside]


@pytest.mark.parametrize("strategy", ["dp=2", "tp=2", "pp=2"])
def test_torchs_encoder_evaluates_alike(ranks: Any, strategy: str) -> None:
    for norm_first in (False, True):
        expected = _padded("", norm_first)
        for found in ranks(2).run(_padded, strategy, norm_first):
            torch.testing.assert_close(found, expected[: len(found)])
