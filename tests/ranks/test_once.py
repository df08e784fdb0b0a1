"""once: one rank runs it, the others wait and get the result or the error."""

from pathlib import Path
from typing import Any

import pytest

import colossal_nb as cnb
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks


def _result(path: Path) -> int:
    @cnb.once
    def write(text: str) -> int:
        return path.open("a").write(text)

    return write("abc")


def test_one_call_whose_result_all_get(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert ranks(3).run(_result, path) == [3, 3, 3]
    assert path.read_text() == "abc"


def _error() -> None:
    @cnb.once
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        fail()


def test_an_error_reaches_all(ranks: Any) -> None:
    ranks(3).run(_error)


def _block(path: Path) -> str:
    with cnb.once() as mine:
        if mine:
            assert World.current().rank == 0
            path.write_text("ready")
        return path.read_text()


def test_a_block_runs_first_on_one_rank(ranks: Any, tmp_path: Path) -> None:
    assert ranks(3).run(_block, tmp_path / "file") == ["ready"] * 3


def test_alone_it_is_a_plain_call() -> None:
    assert cnb.once(lambda: 5)() == 5
