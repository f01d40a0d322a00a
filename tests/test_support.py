"""Support: what it takes, and what slicing, gathering, joining and checking do to its rows, in every framework."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from jax_topp import Support

from frontends import needs_torch
from supports import (
    as_kind,
    assert_log_probs_follow,
    each_kind,
    each_layout,
    flat_lists,
    in_kind,
    random_support,
)

I32 = np.int32
RAGGED = Support(np.array([5, 6, 7], I32), np.array([0, 2], I32), np.array([2, 3], I32))
PADDED = Support(np.array([[5, 6], [7, -1]], I32))


# Making one -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), TypeError, "token_ids must be a NumPy, JAX or torch array, got NoneType"),
        (([[1, 2]],), TypeError, "got list .*from_lists"),
        (
            (np.zeros(3, I32),),
            ValueError,
            r"must be padded, \[\*batch, R, K\], got the shape \(3,\)",
        ),
        ((np.zeros((2, 3)),), TypeError, "token_ids must be integers, got float64"),
        ((np.ones((2, 3), bool),), TypeError, "token_ids must be integers, got bool"),
        ((np.array([[1, 2**31]]),), ValueError, r"token_ids\[0, 1\] is 2147483648, outside int32"),
        ((np.array([[2**64 - 1]], np.uint64),), ValueError, "outside int32"),
        ((np.zeros(3, I32), np.zeros(1, I32)), ValueError, "begins is given, ends is not"),
        ((np.zeros(3, I32), None, np.zeros(1, I32)), ValueError, "ends is given, begins is not"),
        ((np.zeros(3, I32), np.zeros(1, I32), np.zeros(2, I32)), ValueError, r"\(1,\).*\(2,\)"),
        (
            (np.zeros((2, 3), I32), np.zeros((4, 1), I32), np.zeros((4, 1), I32)),
            ValueError,
            r"same batch axes: token_ids are \(2, 3\), begins are \(4, 1\)",
        ),
        ((np.zeros((), I32), np.zeros(1, I32), np.zeros(1, I32)), ValueError, "same batch axes"),
        (
            (np.zeros((2, 3), I32), None, None, np.zeros((2, 2), np.float32)),
            ValueError,
            r"log_probs are \(2, 2\), token_ids are \(2, 3\)",
        ),
        ((np.zeros((1, 1), I32), None, None, np.zeros((1, 1), I32)), TypeError, "must be floats"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        Support(*arguments)


@needs_torch
def test_refuses_several_frameworks_and_their_other_dtypes():
    import jax.numpy as jnp
    import torch

    with pytest.raises(TypeError, match="begins is torch"):
        Support(np.zeros(1, I32), torch.zeros(1, dtype=torch.int32), np.zeros(1, I32))
    with pytest.raises(TypeError, match="token_ids must be int32, got int64: convert it first"):
        Support(torch.zeros((1, 1), dtype=torch.int64))
    with pytest.raises(TypeError, match="token_ids must be int32, got int16"):
        Support(jnp.zeros((1, 1), jnp.int16))
    with pytest.raises(TypeError, match="log_probs must be float32, got bfloat16"):
        Support(jnp.zeros((1, 1), jnp.int32), log_probs=jnp.zeros((1, 1), jnp.bfloat16))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int64, np.uint32, np.uint64])
def test_numpy_integers_of_any_width(dtype):
    support = Support(np.array([[5, 6]], dtype), log_probs=np.array([[-0.5, -1.0]]))
    assert support.token_ids.dtype == I32 and support.log_probs.dtype == np.float32
    assert support.to_lists() == [[5, 6]]


def test_is_frozen_and_can_be_copied_pickled_and_shown():
    with pytest.raises(AttributeError):
        RAGGED.token_ids = None  # type: ignore[misc]
    for other in (pickle.loads(pickle.dumps(RAGGED)), copy.deepcopy(RAGGED), copy.copy(RAGGED)):
        assert other.to_lists() == [[5, 6], [7]]
    assert repr(RAGGED) == "Support(ragged, token_ids=[3], begins=[2], ends=[2], numpy)"
    assert repr(PADDED) == "Support(padded, token_ids=[2, 2], numpy)"


def test_shapes():
    assert (RAGGED.is_padded, RAGGED.row_shape, RAGGED.capacity, len(RAGGED)) == (False, (2,), 3, 2)
    assert (PADDED.is_padded, PADDED.row_shape, PADDED.capacity, len(PADDED)) == (True, (2,), 2, 2)


# Slicing and gathering ------------------------------------------------------------------------------------------------


@each_kind
@each_layout
def test_slices_the_leading_axis(kind, layout, rng):
    flat, rows = random_support(rng, (7,), layout, kind)
    for part in (slice(2, 5), slice(None, None, 2), slice(5, 2), slice(-3, None)):
        assert flat[part].to_lists() == rows[part]
        assert_log_probs_follow(flat[part])
    batch, rows = random_support(rng, (3, 4), layout, kind)
    assert flat_lists(batch[1:]) == rows[4:]
    assert batch[1].to_lists() == rows[4:8] == batch[np.int64(-2)].to_lists()
    assert batch[2].row_shape == (4,)


@each_kind
@each_layout
def test_indexing_that_makes_no_sense(kind, layout, rng):
    flat, _ = random_support(rng, (3,), layout, kind)
    batch, _ = random_support(rng, (3, 2), layout, kind)
    with pytest.raises(TypeError, match=r"no batch axis to drop: write support\[1:2\]"):
        flat[1]
    with pytest.raises(IndexError, match="index 3 is past"):
        batch[3]
    for index in ([0], None, True, (0, 1), 1.0):
        with pytest.raises(TypeError, match=r"indexed by an int or a slice"):
            batch[index]
    assert len(list(batch)) == 3  # iteration ends


@each_kind
@each_layout
@pytest.mark.parametrize("index_kind", ["same", "numpy"])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8])
def test_take(kind, layout, index_kind, dtype, rng):
    flat, rows = random_support(rng, (7,), layout, kind)
    wanted = np.array([6, 0, 0, 3, 100, 7] + ([-1, -7] if dtype != np.uint8 else []), dtype)
    expected = [rows[i] if 0 <= i < 7 else [] for i in wanted.tolist()]
    taken = flat.take(as_kind(wanted, kind if index_kind == "same" else "numpy"))
    assert taken.to_lists() == expected
    assert_log_probs_follow(taken)
    assert taken.is_padded == flat.is_padded
    if layout == "ragged":
        assert taken.token_ids is flat.token_ids

    batch, rows = random_support(rng, (2, 5), layout, kind)
    wanted = np.array([[4, 9, 1], [0, 4, 4]], dtype)
    expected = [rows[5 * b + i] if i < 5 else [] for b in range(2) for i in wanted[b].tolist()]
    assert flat_lists(batch.take(as_kind(wanted, kind))) == expected


@each_layout
def test_take_of_more_than_a_byte_of_rows(layout, rng):
    """300 rows and int8 row numbers: the comparison must not happen in int8."""
    support, rows = random_support(rng, (300,), layout)
    assert support.take(np.array([127, -1], np.int8)).to_lists() == [rows[127], []]
    assert support.take([299, 300, 2**31 + 5]).to_lists() == [rows[299], [], []]


@each_kind
@each_layout
def test_take_from_nothing(kind, layout, rng):
    support, _ = random_support(rng, (0,), layout, kind)
    assert support.take([0, 1]).to_lists() == [[], []]
    assert support.take([]).to_lists() == []


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0.5], TypeError, "rows must be integers, got float64"),
        ([True], TypeError, "rows must be integers, got a bool"),
        (np.array([True, False]), TypeError, "rows must be integers, got bool"),
        ([[0], [1]], ValueError, r"rows are \(2, 1\), the support has rows \(2,\)"),
        (1, TypeError, "got int"),
        (slice(0, 1), TypeError, "got slice"),
    ],
)
def test_take_refuses(rows, error, message):
    with pytest.raises(error, match=message):
        RAGGED.take(rows)


@each_layout
def test_take_and_sizes_under_jit(layout, rng):
    """Static shapes: a label shift inside a trainer's step."""
    import jax

    support, rows = random_support(rng, (2, 6), layout, "jax")
    wanted = np.array([[1, 2, 3, 4, 5, -1]] * 2, np.int32)
    shifted = jax.jit(lambda s, i: s.take(i))(support, wanted)
    assert flat_lists(shifted) == [*rows[1:6], [], *rows[7:], []]
    sizes = jax.jit(lambda s: s.sizes())(support)
    np.testing.assert_array_equal(np.asarray(sizes).reshape(-1), list(map(len, rows)))
    sliced = jax.jit(lambda s: s[1])(support)
    assert sliced.to_lists() == rows[6:]


# Sizes and capacity ---------------------------------------------------------------------------------------------------


@each_kind
@each_layout
def test_sizes(kind, layout, rng):
    support, rows = random_support(rng, (3, 5), layout, kind)
    sizes = support.sizes()
    assert str(sizes.dtype).removeprefix("torch.") == "int32"
    np.testing.assert_array_equal(np.asarray(sizes).reshape(-1), list(map(len, rows)))


@each_kind
def test_sizes_of_bad_extents_are_zero(kind):
    begins, ends = [0, -1, 3, 0, 2], [2, 1, 1, 9, 2]
    ids = np.arange(4, dtype=I32)
    support = in_kind(Support(ids, np.array(begins), np.array(ends)), kind)
    assert np.asarray(support.sizes()).tolist() == [2, 0, 0, 0, 0]


@each_kind
@each_layout
def test_capacity_grows_and_shrinks(kind, layout, rng):
    support, rows = random_support(rng, (2, 3), layout, kind)
    wide = support.with_capacity(support.capacity + 5)
    assert wide.capacity == support.capacity + 5
    assert flat_lists(wide) == rows
    assert_log_probs_follow(wide)
    host = support.numpy()
    used = int(host.ends[host.ends > host.begins].max(initial=0)) if layout == "ragged" else None
    if used is None:
        used = int(np.flatnonzero((host.token_ids != -1).any((0, 1)))[-1]) + 1
    narrow = wide.with_capacity(used)
    assert narrow.capacity == used and flat_lists(narrow) == rows
    with pytest.raises(ValueError, match=rf"to {used - 1}: {used} slots are used"):
        support.with_capacity(used - 1)
    for n in (-1, 2**31):
        with pytest.raises(ValueError, match="capacity must lie between"):
            support.with_capacity(n)


@each_kind
def test_a_bad_extent_stays_bad_when_slots_move(kind):
    """[2, 5) of three slots is bad; in nine slots, or behind another piece, it must not turn into a row."""
    bad = in_kind(Support(np.array([1, 2, 3]), np.array([2, -3]), np.array([5, 1])), kind)
    good = in_kind(RAGGED, kind)
    for support, row in ((bad.with_capacity(9), 0), (Support.concatenate([good, bad, good]), 2)):
        with pytest.raises(ValueError, match=rf"support row \[{row}\] has the extent"):
            support.validate(50)


def test_capacity_cannot_shrink_under_a_trace():
    import jax

    with pytest.raises(ValueError, match="under a trace"):
        jax.jit(lambda s: s.with_capacity(1))(in_kind(PADDED, "jax"))
    assert jax.jit(lambda s: s.with_capacity(4))(in_kind(PADDED, "jax")).capacity == 4


# Joining --------------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "layouts", [["ragged"] * 3, ["padded"] * 3, ["ragged", "padded", "ragged"]]
)
@pytest.mark.parametrize("log_probs", [True, False])
def test_concatenate(kind, layouts, log_probs, rng):
    made = [
        random_support(rng, (n,), layout, kind, log_probs)
        for n, layout in zip((3, 0, 4), layouts, strict=True)
    ]
    joined = Support.concatenate([support for support, _ in made])
    assert joined.to_lists() == [row for _, rows in made for row in rows]
    assert joined.is_padded == (set(layouts) == {"padded"})
    assert (joined.log_probs is None) != log_probs
    if log_probs:
        assert_log_probs_follow(joined)


@each_kind
@pytest.mark.parametrize(
    "layouts", [["ragged"] * 3, ["padded"] * 3, ["padded", "ragged", "ragged"]]
)
def test_stack(kind, layouts, rng):
    made = [random_support(rng, (4,), layout, kind) for layout in layouts]
    pieces = [s.with_capacity(s.capacity + n) for n, (s, _) in enumerate(made)]
    stacked = Support.stack(pieces)
    assert stacked.row_shape == (3, 4)
    assert flat_lists(stacked) == [row for _, rows in made for row in rows]
    assert_log_probs_follow(stacked)
    for i, (_, rows) in enumerate(made):
        assert stacked[i].to_lists() == rows


@pytest.mark.parametrize("join", [Support.concatenate, Support.stack])
def test_joins_refuse(join, rng):
    bare, _ = random_support(rng, (2,), "ragged", log_probs=False)
    full, _ = random_support(rng, (2,), "ragged")
    for pieces, error, message in (
        ([], ValueError, "needs at least one Support"),
        ([bare, [[1]]], TypeError, "item 1 is a list"),
        (
            [bare, random_support(rng, (1, 2), "ragged", log_probs=False)[0]],
            ValueError,
            r"item 1 has rows \(1, 2\)",
        ),
        ([full, bare], ValueError, "log_probs in all pieces or in none: item 1 has none"),
        ([bare, in_kind(bare, "jax")], TypeError, "one framework"),
    ):
        with pytest.raises(error, match=message):
            join(pieces)


def test_stack_refuses_unequal_rows():
    with pytest.raises(ValueError, match=r"equally many rows, got \[2, 1\]"):
        Support.stack([RAGGED, RAGGED[:1]])


# Leaving --------------------------------------------------------------------------------------------------------------


def test_values_cannot_be_seen_under_a_trace():
    import jax

    for look in (lambda s: s.to_lists(), lambda s: s.numpy(), lambda s: s.validate(9)):
        with pytest.raises(TypeError, match=r"support.token_ids has no values here .*outside jit"):
            jax.jit(lambda s, look=look: look(s) and 0)(in_kind(RAGGED, "jax"))


@needs_torch
def test_to_a_device():
    import jax
    import torch

    device = jax.devices("cpu")[-1]
    assert RAGGED.to(device).token_ids.devices() == {device}
    assert RAGGED.to("cpu").to_lists() == RAGGED.to(torch.device("cpu")).to_lists() == [[5, 6], [7]]
    assert isinstance(RAGGED.to("cpu").begins, torch.Tensor)
    assert RAGGED.to("meta").token_ids.is_meta
    with pytest.raises(TypeError, match="cannot move jax arrays to 'cpu'"):
        RAGGED.to(device).to("cpu")
    with pytest.raises(TypeError, match="cannot move torch arrays"):
        RAGGED.to("cpu").to(device)
    with pytest.raises(TypeError, match="cannot move numpy arrays to 5"):
        RAGGED.to(5)
