"""A save that comes to no end leaves the checkpoint that was there, several at once leave a whole one; paths that
cannot be are told."""

import fcntl
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_setup import data_files, save_trained, setup
from small_gpt import gpt, train
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

import colossal_nb as cnb
from colossal_nb.parallel import checkpoint
from colossal_nb.parallel.saving import folder
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


@pytest.fixture
def saved(ranks: Any, tmp_path: Path) -> Path:
    ranks(2).run(save_trained, tmp_path / "run")
    return tmp_path / "run"


def full_disk(path: Path, odd: int, most_bytes: int) -> tuple[str, str, int]:
    """Files on one rank may not grow further: what a full disk is to a program."""
    model, optimizer = setup("tp=2")
    train(model, optimizer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if World.current().rank == odd:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        cnb.save(path, model, optimizer, step=2)
    except OSError as error:
        return type(error).__name__, str(error), len(os.listdir(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "", "", 0


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("most_bytes", [0, 4096, 50_000])
def test_a_full_disk_leaves_the_old_one(ranks: Any, saved: Path, odd: int, most_bytes: int) -> None:
    assert min(file.stat().st_size for file in data_files(saved)) > most_bytes
    said = ranks(2).run(full_disk, saved, odd, most_bytes)
    assert [each[:2] for each in said] == [said[0][:2]] * 2
    assert said[0][0] == "OSError"
    assert f"nothing was saved to {saved}: a file may not grow that large there (on rank {odd}: File" in said[0][1]
    assert "what was there before is there still" in said[0][1]
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


class Pressing:
    """A file whose tenth write is met by an interrupt: torch.save then raises an error of its own on its way out."""

    def __init__(self, file: Any) -> None:
        self.file, self.writes = file, 0

    def write(self, data: Any) -> int:
        self.writes += 1
        if self.writes == 10:
            raise KeyboardInterrupt
        count: int = self.file.write(data)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def interrupted(path: Path) -> None:
    model, optimizer = setup("tp=2")
    before = FileSystem.create_stream

    @contextmanager
    def create_stream(self: FileSystem, name: Any, mode: str) -> Iterator[Any]:
        with before(self, name, mode) as file:
            World.current().whole().run("barrier", [])  # both are writing when the interrupt comes
            yield Pressing(file)

    FileSystem.create_stream = create_stream
    try:
        with pytest.raises(KeyboardInterrupt):
            cnb.save(path, model, optimizer, step=2)
    finally:
        FileSystem.create_stream = before


def test_an_interrupt_leaves_the_old_one(ranks: Any, saved: Path) -> None:
    ranks(2).run(interrupted, saved)
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


def linear(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def without_locks(number: int, kind: int) -> None:
    raise OSError(38, "Function not implemented")


def in_between(patch: pytest.MonkeyPatch, where: Any, name: str, other: Callable[[], Any], after: bool = False) -> None:
    """At the next call of a function `other` runs first, or right after it."""
    usual = getattr(where, name)

    def call(*given: Any) -> Any:
        patch.setattr(where, name, usual)
        if not after:
            other()
        result = usual(*given)
        if after:
            other()
        return result

    patch.setattr(where, name, call)


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("wait", [True, False])
def test_saves_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, after: bool, wait: bool
) -> None:
    """One writes and commits while the other stands right before or after the instant in which it becomes the
    checkpoint."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
    path, found = tmp_path / "run", []
    cnb.save(path, linear(0), who="before")

    def other() -> None:
        World.current().saving = None  # as another process has it
        cnb.save(path, linear(2), who="other")
        found.append(cnb.load(path, nn.Linear(2, 2))["who"])

    in_between(monkeypatch, os, "replace", other, after)
    saving = cnb.save(path, linear(1), wait=wait, who="one")
    if saving is not None:
        saving.wait()
    model = nn.Linear(2, 2)
    assert [*found, cnb.load(path, model)["who"]] == ["other", "other" if after else "one"]
    assert model.weight.unique().tolist() == [2 if after else 1]
    assert len(list(path.glob("data-*"))) == 1 or not locks
    cnb.save(path, model)
    assert len(list(path.glob("data-*"))) == 1 or not locks


def test_a_save_that_fails_takes_nothing_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda number: 1 / 0)
            with pytest.raises(RuntimeError, match="division"):
                cnb.save(tmp_path / "run", linear(2))

    in_between(monkeypatch, folder, "checksum", fail)
    cnb.save(tmp_path / "run", linear(1), who="one")
    assert cnb.load(tmp_path / "run", nn.Linear(2, 2)) == {"who": "one"}


def test_a_save_during_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "run", nn.Linear(2, 2)
    cnb.save(path, linear(1), who="one")
    for where, name in ((folder, "verify"), (checkpoint, "fill")):
        in_between(monkeypatch, where, name, lambda: cnb.save(path, linear(2), who="two"))
        assert cnb.load(path, model)["who"] == ("one" if name == "verify" else "two")
    in_between(monkeypatch, folder, "read", lambda: cnb.save(path, linear(3), who="three"), after=True)
    assert cnb.load(path, model) == {"who": "three"}
    assert model.weight.unique().tolist() == [3]
    cnb.save(path, model)
    assert len(list(path.glob("data-*"))) == 1


def test_a_save_during_a_load_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    path, model = tmp_path / "run", linear(0)
    cnb.save(path, linear(1))
    in_between(monkeypatch, folder, "verify", lambda: cnb.save(path, linear(2)))
    with pytest.raises(OSError, match=r"another save replaced the checkpoint at .*run while it was read: load again"):
        cnb.load(path, model)
    assert model.weight.unique().tolist() == [0]
    in_between(monkeypatch, checkpoint, "fill", lambda: cnb.save(path, linear(3)))
    with pytest.raises(OSError, match=r"another save replaced it meanwhile\. Weights and states are partly"):
        cnb.load(path, model)
    cnb.load(path, model)
    assert model.weight.unique().tolist() == [3]


def test_paths_of_which_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint.json").mkdir(parents=True)
    for path, text in {
        "/proc/none/run": "no folder can be made",
        "/dev/null/run": "a part of the path is a file",
        str(tmp_path / ("long" * 100)): "the name is too long",
        str(tmp_path / "run"): "checkpoint.json is a folder",
    }.items():
        for wait in (True, False):
            with pytest.raises((OSError, ValueError), match=text) as caught:
                cnb.save(path, nn.Linear(2, 2), wait=wait)
            assert path in str(caught.value)
    with pytest.raises(OSError, match="cannot be read: the name is too long"):
        cnb.load(tmp_path / ("long" * 100), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"checkpoint\.json is a folder"):
        cnb.load(tmp_path / "run", nn.Linear(2, 2))


def test_values_that_cannot_be_kept(tmp_path: Path) -> None:
    endless: list[Any] = [1]
    endless.append({"self": endless})
    for value, text in ((endless, "it contains itself"), ([torch.eye(2).to_sparse()], r"it\[0\] is a sparse")):
        with pytest.raises(ValueError, match=text):
            cnb.save(tmp_path / "run", nn.Linear(2, 2), it=value)
    assert not (tmp_path / "run").exists()


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
    assert "not 7" in number
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


def torn(path: Path, strategy: str) -> tuple[str, bool]:
    """What is said of a loop that moves a replicated weight by rank, and whether a file was written."""
    model, optimizer = setup(strategy)
    model.blocks[0].norm_1.weight.grad.mul_(1 + World.current().rank)
    optimizer.step()
    try:
        cnb.save(path, model, optimizer)
    except ValueError as error:
        if strategy == "dp=2":
            cnb.recover(model)
            cnb.save(path.with_name("whole"), model, optimizer)
        return str(error), path.exists()
    return "", path.exists()


@pytest.mark.parametrize(
    ("strategy", "advice"), [("dp=2", "cnb.recover(model) gives all ranks"), ("tp=2", "run the cell that makes")]
)
def test_torn_replicas_are_not_saved(ranks: Any, tmp_path: Path, strategy: str, advice: str) -> None:
    for said, written in ranks(2).run(torn, tmp_path / "run", strategy):
        assert "replicas of blocks.0.norm_1.weight differ between ranks 0 and 1 (by " in said
        assert advice in said
        assert not written
