"""What travels between the kernel and its ranks: functions of cells find the names of cells where they are read."""
from __future__ import annotations

import builtins
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from colossal_nb.cluster import parcel

CELL = """
import math
scale = 2
def helper(x): return x * scale
def f(x): return helper(x) + math.floor(0.5)
def count(n): return 0 if n == 0 else 1 + count(n - 1)
class Thing:
    factor = 3
    def total(self, x): return f(x) * self.factor
    @property
    def twice(self): return 2 * scale
    @staticmethod
    def plain(x): return helper(x)
def made(bonus):
    def inner(x, more=lambda: scale): return f(x) + bonus + more()
    return inner
closed = made(10)
"""


def cell() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    exec(CELL, names)
    return names


def carried(names: dict[str, Any], wanted: tuple[str, ...], path: Path, there: dict[str, Any]) -> Any:
    def pickler(file: Any, take: Any) -> parcel.Pickler:
        return parcel.Pickler(file, names, take)

    parcel.write(path, {name: names[name] for name in wanted}, pickler)
    return parcel.read(path, there)


def test_functions_of_every_kind_use_the_names_where_they_are_read(tmp_path: Path) -> None:
    there: dict[str, Any] = {"__builtins__": builtins}
    there.update(carried(cell(), ("f", "helper", "Thing", "closed", "count", "math"), tmp_path / "x", there))
    there["scale"] = 100
    assert there["f"](1) == 100 and there["f"].__globals__ is there
    assert (there["Thing"]().total(1), there["Thing"]().twice, there["Thing"].plain(2)) == (300, 200, 200)
    assert there["closed"](1) == 210
    assert there["count"](3) == 3
    assert there["__builtins__"] is builtins


def test_the_names_that_functions_read_are_told() -> None:
    names = cell()

    def needs(value: Any) -> set[str]:
        return parcel.needs(value, lambda file, take: parcel.Pickler(file, names, take))

    assert needs(names["f"]) == {"helper", "math"}
    assert needs({"in": [names["closed"]]}) == {"f", "scale"}
    assert needs(names["Thing"]) == {"f", "scale", "helper"}
    assert needs([1, names["math"]]) == set()


def test_without_names_of_cells_a_function_brings_copies_of_what_it_reads(tmp_path: Path) -> None:
    parcel.write(tmp_path / "x", cell()["f"])
    assert parcel.read(tmp_path / "x")(4) == 8


def test_what_needs_the_names_of_cells_is_not_read_without(tmp_path: Path) -> None:
    names = cell()
    parcel.write(tmp_path / "x", names["f"], lambda file, take: parcel.Pickler(file, names, take))
    with pytest.raises(pickle.UnpicklingError, match="with a namespace"):
        parcel.read(tmp_path / "x")


def test_large_arrays_lie_beside_the_bytes_and_can_be_written_to(tmp_path: Path) -> None:
    parcel.write(tmp_path / "x", [np.arange(1000), "text"])
    found = parcel.read(tmp_path / "x")
    found[0][0] = 5
    assert (found[0][0], found[0][999], found[1]) == (5, 999, "text")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
