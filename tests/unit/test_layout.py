"""Who holds what of a tensor, and what must travel to change it; against numpy on small tensors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_nb import checks
from colossal_nb.plan import Layout, Mesh, On, Partial, Replicate, Shard
from colossal_nb.plan.indices import cut, from_runs, normal, to_runs

MESH = Mesh({"dp": 2, "tp": 4})


def of(shape, mesh=MESH, **placements):
    return Layout.of(shape, "float32", mesh, **placements)


@st.composite
def layouts(draw, shape=None, mesh=None):
    mesh = mesh or Mesh({axis: draw(st.integers(1, 3)) for axis in ("dp", "pp", "tp")})
    shape = shape if shape is not None else draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    placements = [draw(placement(shape, size)) for size in mesh.shape]
    return Layout(tuple(shape), "float32", mesh, tuple(placements))


@st.composite
def placement(draw, shape, ranks):
    kind = draw(st.sampled_from(["replicate", "partial", "on", "shard", "shard", "parts"]))
    if kind == "on":
        return On(draw(st.integers(0, ranks - 1)))
    if kind in ("shard", "parts") and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        if kind == "shard":
            return Shard(dim)
        order = draw(st.permutations(range(shape[dim])))
        return Shard(dim, tuple(order[rank::ranks] for rank in range(ranks)))
    return Partial() if kind == "partial" else Replicate()


def test_mesh_2_4_both_dims_sharded_makes_8_blocks_of_4_4():
    layout = of((8, 16), dp=Shard(0), tp=Shard(1))
    assert [layout.local_shape(rank) for rank in range(8)] == [(4, 4)] * 8
    assert layout.slices(6) == (range(4, 8), range(8, 12))
    assert all(len(layout.owners((i, j))) == 1 for i in range(8) for j in range(16))


def test_mesh_2_4_replicate_and_shard_makes_4_blocks_with_two_owners():
    layout = of((8, 16), tp=Shard(1))
    assert [layout.owners((0, j)) for j in (0, 4, 8, 12)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_mesh_2_4_one_dim_sharded_twice_leaves_the_last_rank_empty():
    layout = of((7, 16), dp=Shard(0), tp=Shard(0))
    assert [layout.local_shape(rank) for rank in range(8)] == [(1, 16)] * 7 + [(0, 16)]
    assert [layout.owners((row, 0)) for row in range(7)] == [(row,) for row in range(7)]
    assert layout.local_bytes(7) == 0


@given(st.integers(0, 40), st.integers(1, 9))
def test_uneven_cut_follows_array_split(size, parts):
    expected = [part.tolist() for part in np.array_split(np.arange(size), parts)]
    assert [list(cut(range(size), parts, part)) for part in range(parts)] == expected


def test_explicit_parts_keep_their_order():
    layout = of((6,), Mesh({"tp": 2}), tp=Shard(0, ((4, 0, 2), (1, 3, 5))))
    assert layout.slices(0) == ((4, 0, 2),)
    assert layout.slices(1) == ((1, 3, 5),)
    assert layout.owners((2,)) == (0,)


def test_even_shard_cuts_what_explicit_parts_leave():
    layout = of((8,), Mesh({"dp": 2, "tp": 2}), dp=Shard(0), tp=Shard(0, ((0, 2, 4, 6), (1, 3, 5, 7))))
    assert [list(layout.slices(rank)[0]) for rank in range(4)] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_stage_holds_alone():
    layout = of((4,), Mesh({"pp": 2, "tp": 2}), pp=On(1), tp=Shard(0))
    assert layout.slices(0) is None and layout.local_shape(1) is None and layout.local_bytes(0) == 0
    assert layout.local_shape(2) == (2,)
    assert layout.owners((3,)) == (3,)


@given(layouts())
def test_json_round_trip(layout):
    assert Layout.from_json(layout.to_json()) == layout
    assert hash(Layout.from_json(layout.to_json())) == hash(layout)


@given(st.lists(st.integers(0, 30), unique=True))
def test_runs_round_trip(indices):
    assert from_runs(to_runs(normal(indices))) == normal(indices)
    assert list(normal(indices)) == indices


def test_consecutive_parts_are_ranges_however_they_were_given():
    assert Shard(0, ((0, 1, 2), (3, 4))) == Shard(0, (range(3), range(3, 5)))


@given(layouts())
def test_every_element_is_owned_as_declared(layout):
    assert checks.layout(layout) == []
    for index in np.ndindex(layout.global_shape):
        assert layout.owners(index) == tuple(
            rank
            for rank in range(layout.mesh.size)
            if (held := layout.slices(rank)) and all(i in some for i, some in zip(index, held, strict=True))
        )


def scatter(layout, whole, rng):
    """What each rank holds: its slice; of a partial tensor random addends that sum to it."""
    axes = [layout.mesh.axes.index(axis) for axis in layout.partial_axes]
    addends = {}
    places = {tuple(place[axis] for axis in axes) for place in layout.mesh.coordinates()}
    for place in sorted(places)[1:]:
        addends[place] = rng.integers(-9, 9, whole.shape)
    addends[min(places)] = whole - sum(addends.values(), np.zeros_like(whole))
    held = {}
    for rank, place in enumerate(layout.mesh.coordinates()):
        slices = layout.slices(rank)
        if slices is not None:
            held[rank] = addends[tuple(place[axis] for axis in axes)][np.ix_(*map(list, slices))]
    return held


def gather(layout, held):
    """The whole tensor again: addends summed over the partial axes, and whether all copies of one addend agree."""
    axes = [layout.mesh.axes.index(axis) for axis in layout.partial_axes]
    sums = {}
    for rank, place in enumerate(layout.mesh.coordinates()):
        if rank in held:
            key = tuple(place[axis] for axis in axes)
            addend = sums.setdefault(key, np.full(layout.global_shape, np.iinfo(np.int64).min))
            where = np.ix_(*map(list, layout.slices(rank)))
            seen = addend[where]
            assert ((seen == np.iinfo(np.int64).min) | (seen == held[rank])).all()
            addend[where] = held[rank]
    return sum(sums.values())


def apply(moves, old, new, held):
    """Play the moves: a rank begins with what it has of what it needs, then takes or adds what arrives."""
    result = {}
    for target in range(new.mesh.size):
        needed = new.slices(target)
        if needed is None:
            continue
        mine = np.zeros([len(indices) for indices in needed], np.int64)
        if target in held and keeps_own(old, new, target):
            put(mine, needed, old.slices(target), held[target], old.slices(target), add=False)
        for move in (move for move in moves if move.target == target):
            put(mine, needed, move.slices, held[move.source], old.slices(move.source), add=move.add)
        result[target] = mine
    return result


def keeps_own(old, new, target):
    """A rank whose addend of a newly partial tensor is zero drops what it had."""
    place = new.mesh.coordinate(target)
    kept = set(old.partial_axes) & set(new.partial_axes) if old.mesh == new.mesh else set()
    return all(place[axis] == 0 for axis in new.partial_axes if axis not in kept)


def put(mine, needed, box, values, source, *, add):
    for at in np.ndindex(*(len(indices) for indices in box)):
        index = [indices[i] for i, indices in zip(at, box, strict=True)]
        if all(i in indices for i, indices in zip(index, needed, strict=True)):
            here = tuple(list(indices).index(i) for i, indices in zip(index, needed, strict=True))
            there = tuple(list(indices).index(i) for i, indices in zip(index, source, strict=True))
            mine[here] = values[there] + (mine[here] if add else 0)


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    old = draw(layouts(shape=shape))
    same_mesh = draw(st.booleans())
    return old, draw(layouts(shape=shape, mesh=old.mesh if same_mesh else None))


@given(pairs(), st.integers(0, 2**31))
@settings(max_examples=150)
def test_moves_turn_one_layout_into_the_other(pair, seed):
    old, new = pair
    rng = np.random.default_rng(seed)
    whole = rng.integers(-99, 99, old.global_shape)
    held = scatter(old, whole, rng)
    assert (gather(old, held) == whole).all()
    assert (gather(new, apply(old.moves(new), old, new, held)) == whole).all()


@given(layouts())
def test_nothing_moves_to_where_it_is(layout):
    assert layout.moves(layout) == []


def test_moves_carry_only_what_is_missing():
    mesh = Mesh({"tp": 2})
    moves = of((4, 3), mesh, tp=Shard(0)).moves(of((4, 3), mesh))
    assert [(move.source, move.target, move.payload_bytes) for move in moves] == [(1, 0, 24), (0, 1, 24)]
    assert of((4, 3), mesh).moves(of((4, 3), mesh, tp=Shard(0))) == []


def test_finishing_a_sum_takes_every_addend():
    mesh = Mesh({"tp": 4})
    moves = of((8,), mesh, tp=Partial()).moves(of((8,), mesh, tp=Shard(0)))
    assert len(moves) == 4 * 3 and all(move.add and move.payload_bytes == 8 for move in moves)


@pytest.mark.parametrize("call, said", [
    (lambda: of((4,), cp=Shard(0)), "cp is none of them"),
    (lambda: of((4,), tp=Shard(1)), r"Shard\(1\) of a tensor with 1 dims"),
    (lambda: of((4,), tp=Shard(0, ((0,), (1,)))), "2 parts for 4 ranks"),
    (lambda: of((4,), dp=Shard(0, ((0, 1), (2, 4)))), "part 1 reaches from 2 to 4"),
    (lambda: of((4,), dp=Shard(0, ((0, 0), (2, 3)))), "part 0 names an index twice"),
    (lambda: of((4,), dp=On(2)), "dp has coordinates 0..1, not 2"),
    (lambda: Layout((4,), "float33", MESH, (Replicate(),) * 4), "dtype 'float33'"),
    (lambda: Layout((4,), "float32", MESH, ()), "0 placements for the 4 mesh axes"),
    (lambda: of((4,)).owners((4,)), "outside of a tensor"),
    (lambda: of((4,)).moves(of((5,))), "a move keeps shape and dtype"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_layouts_read_well():
    assert str(of((8, 4), tp=Shard(1))) == "float32 [8, 4], tp: Shard(1)"
    assert str(of((8, 4))) == "float32 [8, 4], replicated"
    assert str(of((8,), dp=Partial(), tp=Shard(0, ((0,), (1,), (2,), (3,))))) == (
        "float32 [8], dp: Partial, tp: Shard(0, by index)"
    )
