"""Damaged, foreign, half-written: one error on all ranks, nothing changed, the old checkpoint kept."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import gpt, train
from torch import Tensor, nn

import colossal_nb as cnb
from colossal_nb.models import GPT
from colossal_nb.parallel.saving import shards
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks
Setup = tuple[Any, Any]


def setup(strategy: str, make: Callable[[], nn.Module] = gpt, kind: Any = torch.optim.AdamW) -> Setup:
    model = make()
    optimizer = kind(model.parameters(), lr=1e-2)
    model, optimizer = cnb.parallelize(model, optimizer, strategy)
    train(model, optimizer, 1)
    return model, optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    inside = [value for entry in optimizer.state.values() for value in entry.values()]
    return [each.detach().clone() for each in [*model.parameters(), *inside]]


def save_trained(path: Path, strategy: str = "tp=2") -> None:
    cnb.save(path, *setup(strategy), step=1)


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


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/*.distcp"))


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


def full_disk(path: Path, odd: int) -> tuple[str, str, int]:
    """Files on one rank may not grow: what a full disk is to a program."""
    model, optimizer = setup("tp=2")
    train(model, optimizer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if World.current().rank == odd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        cnb.save(path, model, optimizer, step=2)
    except OSError as error:
        return type(error).__name__, str(error), len(os.listdir(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "", "", 0


@pytest.mark.parametrize("odd", [0, 1])
def test_a_full_disk_leaves_the_old_one(ranks: Any, saved: Path, odd: int) -> None:
    said = ranks(2).run(full_disk, saved, odd)
    assert [each[:2] for each in said] == [said[0][:2]] * 2
    assert said[0][0] == "OSError"
    assert f"on rank {odd}: File too large" in said[0][1].replace("[Errno 27] ", "")
    assert cnb.load(saved, gpt()) == {"step": 1}
    assert len(list(saved.iterdir())) == 2


def test_a_full_disk_at_the_first_save_leaves_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(full_disk_first, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def full_disk_first(path: Path) -> None:
    model, optimizer = setup("tp=2")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            cnb.save(path, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def interrupted(path: Path, at: str) -> None:
    model, optimizer = setup("tp=2")

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    before = getattr(shards.FileSystemWriter, at)
    setattr(shards.FileSystemWriter, at, press)
    try:
        with pytest.raises(KeyboardInterrupt):
            cnb.save(path, model, optimizer, step=2)
    finally:
        setattr(shards.FileSystemWriter, at, before)


def test_an_interrupt_leaves_the_old_one(ranks: Any, saved: Path) -> None:
    ranks(2).run(interrupted, saved, "write_data")
    assert cnb.load(saved, gpt()) == {"step": 1}
    assert len(list(saved.iterdir())) == 2


def test_what_a_killed_save_left_goes_with_the_next(ranks: Any, saved: Path) -> None:
    shutil.copytree(data_files(saved)[0].parent, saved / "data-00000000")
    assert cnb.load(saved, gpt()) == {"step": 1}
    (saved / ".hidden").write_text("")
    ranks(2).run(save_trained, saved, "pp=2")
    assert len(list(saved.glob("data-*"))) == 1
    assert (saved / ".hidden").exists()
    assert cnb.load(saved, gpt()) == {"step": 1}


def paths(where: Path) -> list[str]:
    """What is said about paths that cannot be, on this rank."""
    model, rank = setup("dp=2")[0], World.current().rank
    said = []
    for path in (where / f"rank{rank}", 7, where / "taken", where / "file"):
        try:
            cnb.save(path, model)
        except ValueError as error:
            said.append(str(error))
    try:
        cnb.load(where / f"rank{rank}", model)
    except ValueError as error:
        said.append(str(error))
    return said


def test_paths_that_cannot_be(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    said = ranks(2).run(paths, tmp_path)
    differ, number, taken, file, load = said[0]
    assert f"rank 0: {tmp_path}/rank0, rank 1: {tmp_path}/rank1" in differ
    assert "load takes the same path" in load
    assert "not a int" in number
    assert "notes.txt" in taken
    assert "is a file" in file
    assert (said[1][0], said[1][1], said[1][4]) == (differ, number, load)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "taken"]
    assert [each.name for each in (tmp_path / "taken").iterdir()] == ["notes.txt"]


def test_paths_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = gpt()
    cnb.save("relative/run", model, a=1)
    cnb.save(Path("other"), model, a=2)
    cnb.save("~/run", model, a=3)
    assert [cnb.load(tmp_path / each, model)["a"] for each in ("relative/run", "other", "home/run")] == [1, 2, 3]
    assert cnb.load("~/run", model) == {"a": 3}


def lonely(path: Path) -> str:
    model, optimizer = setup("dp=2")
    with cnb.accumulate(model):
        try:
            cnb.save(path, model, optimizer)
        except ValueError as error:
            return str(error)
    return ""


def test_not_inside_accumulate(ranks: Any, tmp_path: Path) -> None:
    assert "save after it" in ranks(2).run(lonely, tmp_path / "run")[1]
