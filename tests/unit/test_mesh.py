"""Where ranks stand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_nb.plan import AXES, Mesh

meshes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}).map(Mesh)


def test_rank_is_the_row_major_coordinate():
    mesh = Mesh({"dp": 2, "pp": 2, "tp": 2})
    assert mesh.axes == ("dp", "pp", "sp", "tp")
    assert mesh.size == 8
    assert mesh.coordinate(5) == {"dp": 1, "pp": 0, "sp": 0, "tp": 1}
    assert mesh.rank({"dp": 1, "tp": 1}) == 5
    assert mesh.ranks("tp", 5) == (4, 5)
    assert mesh.ranks("pp", 5) == (5, 7)
    assert mesh.ranks("dp", 5) == (1, 5)
    assert mesh.ranks("sp", 5) == (5,)
    assert mesh.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]


@given(meshes)
def test_coordinate_and_rank_are_inverse(mesh):
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert [tuple(place.values()) for place in places] == list(mesh.coordinates())


@given(meshes, st.sampled_from(AXES))
def test_groups_share_the_ranks_out(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(mesh.axis_size(axis)))
        assert all(mesh.ranks(axis, rank) == group for rank in group)


def test_equal_meshes_are_one_key():
    assert {Mesh({"tp": 2}): 1}[Mesh({"dp": 1, "tp": 2})] == 1
    assert Mesh({"tp": 2}) != Mesh({"pp": 2})
    assert str(Mesh({"tp": 2, "dp": 3})) == "dp=3 tp=2"
    assert str(Mesh()) == "one rank"


@pytest.mark.parametrize("call, said", [
    (lambda: Mesh({"cp": 2}), "'cp' is none of them"),
    (lambda: Mesh({"tp": 0}), "at least 1 rank, not 0"),
    (lambda: Mesh({"tp": 2}).coordinate(2), "ranks 0..1; 2 is none"),
    (lambda: Mesh({"tp": 2}).ranks("row", 0), "'row' is none of them"),
    (lambda: Mesh({"tp": 2}).rank({"tp": 2}), "coordinates 0..1; 2 is none"),
])  # fmt: skip
def test_what_is_not_there_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()
