"""Damaged, foreign, of another model: one error on all ranks, and nothing is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setup import data_files, save_trained, setup
from small_gpt import gpt
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT

pytestmark = pytest.mark.ranks


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inside = [value for entry in optimizer.state.values() for value in entry.values()]
    return [each.detach().clone() for each in [*model.parameters(), *inside]]


def refused(path: Any, strategy: str, make: Callable[[], nn.Module], kind: Any) -> tuple[str, str, bool]:
    """The kind and the text of the error, and whether model and optimizer stayed as they were."""
    model, optimizer = setup(strategy, make, kind)
    before, random = states(model, optimizer), torch.get_rng_state()
    try:
        cnb.load(path, model, optimizer)
    except (ValueError, OSError) as error:
        after = states(model, optimizer)
        same = len(before) == len(after) and torch.equal(random, torch.get_rng_state())
        same = same and all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
        return type(error).__name__, str(error), same
    return "", "", False


def expect(ranks: Any, path: Path, kind: str, *texts: str, **setting: Any) -> None:
    make, optimizer = setting.get("make", gpt), setting.get("optimizer", torch.optim.AdamW)
    for strategy in setting.get("strategies", ["tp=2", "pp=2"]):
        said = ranks(2).run(refused, path, strategy, make, optimizer)
        assert said[0] == said[1]
        name, text, unchanged = said[0]
        assert name == kind
        assert all(each in text for each in texts), text
        assert unchanged


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    ranks(2).run(save_trained, tmp_path / "run")
    return tmp_path / "run"


def test_a_changed_bit(ranks: Any, saved: Path) -> None:
    for file in data_files(saved):
        flip(file, file.stat().st_size // 2)
        expect(ranks, saved, "ValueError", "damaged", file.name, strategies=["pp=2"])
        flip(file, file.stat().st_size // 2)


def test_a_file_cut_short_or_gone(ranks: Any, saved: Path) -> None:
    file = data_files(saved)[1]
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    expect(ranks, saved, "ValueError", f"{len(data) - 10} of {len(data)} bytes", strategies=["tp=2"])
    file.unlink()
    expect(ranks, saved, "ValueError", "not whole", file.name, strategies=["tp=2"])


def test_a_damaged_list_of_the_tensors(ranks: Any, tmp_path: Path) -> None:
    """Which torch's own tools read."""
    model = gpt()
    saving = cnb.save(tmp_path / "run", model, torch.optim.AdamW(model.parameters()), wait=False)
    assert saving is not None
    saving.wait()
    (file,) = (tmp_path / "run").glob("data-*/.metadata")
    data = file.read_bytes()
    flipped = data[:9] + bytes([data[9] ^ 1]) + data[10:]
    for damaged in (data[:-10], flipped, b"of another program"):
        file.write_bytes(damaged)
        expect(ranks, tmp_path / "run", "ValueError", "damaged", ".metadata", strategies=["tp=2"])
    file.unlink()
    expect(ranks, tmp_path / "run", "ValueError", "not whole", ".metadata", strategies=["tp=2"])


def test_a_damaged_head(ranks: Any, saved: Path) -> None:
    head = saved / "checkpoint.json"
    text = head.read_bytes()
    for damaged in (
        b"",
        b"{}",
        text[: len(text) // 2],
        text[1:],
        text.replace(b'"aliases"', b'"aliasse"'),
        b"\xff\xfe",
    ):
        head.write_bytes(damaged)
        expect(ranks, saved, "ValueError", "damaged", strategies=["tp=2"])
    head.write_bytes(text.replace(b'"version": 1', b'"version": 2'))
    expect(ranks, saved, "ValueError", "version 2", strategies=["tp=2"])
    head.unlink()
    expect(ranks, saved, "FileNotFoundError", "did not come to its end", strategies=["tp=2"])


def test_what_is_no_checkpoint(ranks: Any, tmp_path: Path) -> None:
    expect(ranks, tmp_path / "none", "FileNotFoundError", "nothing of that name", strategies=["tp=2"])
    (tmp_path / "folder").mkdir()
    expect(ranks, tmp_path / "folder", "FileNotFoundError", "it has no checkpoint.json", strategies=["tp=2"])
    torch.save(gpt().state_dict(), tmp_path / "weights.pt")
    expect(ranks, tmp_path / "weights.pt", "ValueError", "is a file", "torch.load", strategies=["tp=2"])


def wider() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=2, hidden=32, heads=4, max_length=8).double()


def deeper() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocab_size=29, layers=3, hidden=16, heads=4, max_length=8).double()


def shallower() -> nn.Module:
    torch.manual_seed(0)
    model = GPT(vocab_size=29, layers=1, hidden=16, heads=4, max_length=8).double()
    model.norm = nn.Sequential(nn.LayerNorm(16).double(), nn.LayerNorm(16).double())
    return model


def tied() -> nn.Module:
    return gpt(tied=True)


def test_another_model(ranks: Any, saved: Path) -> None:
    expect(
        ranks, saved, "ValueError", "token.weight is [29, 16] in the checkpoint and [29, 32] in the model", make=wider
    )
    expect(ranks, saved, "ValueError", "missing in the checkpoint: blocks.2.", "and ", make=deeper)
    both = ["missing in the checkpoint: norm.0.bias", "unexpected in the checkpoint: blocks.1."]
    expect(ranks, saved, "ValueError", *both, make=shallower, strategies=["tp=2"])
    expect(ranks, saved, "ValueError", "head.weight and token.weight are one weight in the model", make=tied)


def half_decayed(parameters: Any, lr: float) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=lr)


def without_first(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[1:], lr=lr)


def test_another_optimizer(ranks: Any, saved: Path) -> None:
    expect(ranks, saved, "ValueError", "AdamW in the checkpoint and a SGD here", optimizer=torch.optim.SGD)
    expect(ranks, saved, "ValueError", "1 param groups in the checkpoint and 2 here", optimizer=half_decayed)
    expect(ranks, saved, "ValueError", "not in both: token.weight", optimizer=without_first)


def test_an_optimizer_that_was_not_saved(tmp_path: Path) -> None:
    model = gpt()
    cnb.save(tmp_path / "run", model)
    with pytest.raises(ValueError, match="saved with 0 optimizers, and load got 1"):
        cnb.load(tmp_path / "run", model, torch.optim.SGD(model.parameters()))
