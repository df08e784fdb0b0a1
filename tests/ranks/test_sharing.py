"""One copy of a large value for all ranks of a host, counted in pages."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import colossal_nb as cnb
from colossal_nb.parallel.sharing import LEAST_BYTES
from colossal_nb.parallel.world import World

pytestmark = pytest.mark.ranks

MIB = 2**20
SIZE = 24 * MIB


def mapping(address: int) -> tuple[tuple[str, str], dict[str, int]]:
    """Device and inode of what a process has at an address, and the figures of /proc/self/smaps, in bytes."""
    found: tuple[str, str] | None = None
    figures: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)", line)
        if head:
            if found:
                break
            if int(head[1], 16) <= address < int(head[2], 16):
                found = head[3], head[4]
        elif found and (one := re.match(r"(\w+): +(\d+) kB", line)):
            figures[one[1]] = int(one[2]) * 1024
    assert found is not None
    return found, figures


def load() -> tuple[Any, Any]:
    """An object of the user's with large data in it."""

    @cnb.once
    def read() -> tuple[Any, Tensor]:
        tokens = (torch.arange(SIZE // 2) % 1000).to(torch.int16)
        return SimpleNamespace(tokens=tokens, index=np.arange(1000, dtype=np.float32), name="mine"), tokens

    return read()


def seen() -> tuple[Any, dict[str, int], list[Any]]:
    corpus, tokens = load()
    facts = [corpus.name, int(corpus.tokens.long().sum()), float(corpus.index.sum()), tokens is corpus.tokens]
    World.current().whole().run("barrier", [])  # all have read all of it
    place, figures = mapping(corpus.tokens.data_ptr() + MIB)
    World.current().whole().run("barrier", [])
    return place, figures, facts


def test_all_ranks_read_the_same_pages(ranks: Any) -> None:
    results = ranks(4).run(seen)
    assert len({place for place, _, _ in results}) == 1
    figures = [each for _, each, _ in results]
    assert all(each["Rss"] >= SIZE for each in figures)
    # The first and the last pages hold other things too.
    assert sum(each["Private_Clean"] + each["Private_Dirty"] for each in figures) < MIB
    assert SIZE <= sum(each["Pss"] for each in figures) < 1.1 * SIZE
    tokens = torch.arange(SIZE // 2) % 1000
    assert [facts for _, _, facts in results] == [["mine", int(tokens.sum()), 499500.0, True]] * 4


def write() -> list[float]:
    """Rank 1 writes; what each rank then finds there."""
    corpus, _ = load()
    group = World.current().whole()
    if group.index == 1:
        corpus.tokens[5:7] = 9
        corpus.index[0] = 7
    group.run("barrier", [])
    return [*corpus.tokens[4:8].tolist(), float(corpus.index[0])]


def test_who_writes_does_so_for_itself(ranks: Any) -> None:
    assert ranks(2).run(write) == [[4, 5, 6, 7, 0.0], [4, 9, 9, 7, 7.0]]


def of_all_kinds() -> list[str]:
    """Values whose way through a shared page is a special one, and those that take none."""
    big = LEAST_BYTES
    values = [
        torch.ones(big, dtype=torch.bfloat16),
        torch.ones(big, 2).t(),
        torch.ones(big, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(big)),
        torch.ones(3),
        torch.ones(0),
        torch.ones(big).to_sparse(),
        {"a": [np.ones(big), None]},
        "text",
    ]
    said = []
    for value in values:
        got: Any = cnb.once(lambda value=value: value)()
        assert type(got) is type(value)
        if isinstance(value, Tensor):
            torch.testing.assert_close(got, value, rtol=0, atol=0)
            assert got.requires_grad == value.requires_grad
        elif isinstance(value, dict):
            assert np.array_equal(got["a"][0], value["a"][0])
        said.append(type(got).__name__)
    return said


def test_values_of_all_kinds_arrive(ranks: Any) -> None:
    first, second = ranks(2).run(of_all_kinds)
    assert first == second


def unsendable() -> str:
    with pytest.raises(ValueError) as caught:
        cnb.once(lambda: lambda: 0)()
    return str(caught.value)


def test_what_cannot_be_sent_is_told_on_all_ranks(ranks: Any) -> None:
    first, second = ranks(2).run(unsendable)
    assert first == second
    assert "gave a function that cannot go to other ranks" in first


def corpus_pages() -> tuple[Any, int, int]:
    data = cnb.corpus.data("validation")
    total = int(data.long().sum())
    place, figures = mapping(data.data_ptr())
    return place, figures["Anonymous"], total  # pages of this process alone


def test_the_corpus_is_there_once(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = ranks(3).run(corpus_pages)
    assert len(set(results)) == 1
    assert results[0][1] == 0
    assert results[0][0][1] != "0"  # the inode of a file
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "cache", tmp_path / "file"):  # the second can hold nothing
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        cnb.corpus.data.cache_clear()
        assert int(cnb.corpus.data("validation").long().sum()) == results[0][2]
    assert len(list((tmp_path / "cache" / "colossal_nb").iterdir())) == 1
    cnb.corpus.data.cache_clear()
