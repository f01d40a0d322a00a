"""Readers: every format gives the same rows, sorted and freed of repeats, or an error that says where."""

from __future__ import annotations

import numpy as np
import pytest

from jax_topp import Support

from supports import (
    as_kind,
    assert_log_probs_follow,
    each_kind,
    flat_lists,
    log_probs_of,
    random_rows,
)

NAN, INF = float("nan"), float("inf")


def shuffled(rng: np.random.Generator, rows: list[list[int]], repeat: bool) -> list[list[int]]:
    """The same sets in another order, with repeats if asked for."""
    out = []
    for row in rows:
        more = rng.choice(row, size=3).tolist() if repeat and row else []
        out.append(rng.permutation([*row, *more]).astype(int).tolist())
    return out


def offsets_of(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)])


def padded(rows: list[list[int]], fill: float, dtype: type = np.int32) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows)) + 2), fill, dtype)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
    return out


def bitmask(rows: list[list[int]], vocab_size: int) -> np.ndarray:
    flags = np.zeros((len(rows), vocab_size), bool)
    for n, row in enumerate(rows):
        flags[n, row] = True
    return np.packbits(flags, axis=1, bitorder="little")


@pytest.mark.parametrize("repeat", [False, True])
def test_every_format_gives_the_same_rows(rng, repeat):
    rows = random_rows(rng, 40)
    given = shuffled(rng, rows, repeat)
    flat = [i for row in given for i in row]
    counts = [len(row) for row in given]
    values = log_probs_of(given)
    flat_values = [x for value in values for x in value]
    top_ids = [[*row, 49] for row in given]
    top_values = [[*value, -INF] for value in values]  # 49 was dropped by the sampler
    for name, support in {
        "lists": Support.from_lists(given, log_probs=values),
        "tuples": Support.from_lists(tuple(map(tuple, given)), log_probs=values),
        "arrays": Support.from_lists([np.array(row, np.int32) for row in given], log_probs=values),
        "sampling mask": Support.from_sampling_mask(given, log_probs=values),
        "csr": Support.from_csr(flat, offsets_of(given), log_probs=flat_values),
        "csr uint16": Support.from_csr(
            np.array(flat, np.uint16), offsets_of(given).astype(np.int32), log_probs=flat_values
        ),
        "padded -1": Support.from_padded(
            padded(given, -1), log_probs=padded(values, NAN, np.float32)
        ),
        "padded 0 with counts": Support.from_padded(
            padded(given, 0), counts, log_probs=padded(values, 7, np.float32)
        ),
        "top log-probs": Support.from_top_log_probs(
            padded(top_ids, -5), padded(top_values, -INF, np.float32)
        ),
    }.items():
        assert support.to_lists() == rows, name
        assert_log_probs_follow(support)
        assert support.token_ids.dtype == np.int32
    assert Support.from_bitmask(bitmask(rows, 53), 53).to_lists() == rows


def test_batch_axes(rng):
    rows = random_rows(rng, 12)
    nested = [[rows[6 * b + 3 * i :][:3] for i in range(2)] for b in range(2)]
    values = [[log_probs_of(rows[6 * b + 3 * i :][:3]) for i in range(2)] for b in range(2)]
    ids = padded(rows, -1).reshape(2, 2, 3, -1)
    for support in (
        Support.from_lists(nested, log_probs=values),
        Support.from_padded(ids),
        Support.from_padded(ids, (ids >= 0).sum(-1)),
        Support.from_bitmask(bitmask(rows, 50).reshape(2, 2, 3, -1), 50),
        Support.from_top_log_probs(ids, np.where(ids >= 0, -1.0, -INF)),
    ):
        assert support.row_shape == (2, 2, 3)
        assert support.to_lists() == nested
    assert_log_probs_follow(Support.from_lists(nested, log_probs=values))


def test_nothing_at_all():
    assert Support.from_lists([]).to_lists() == []
    assert Support.from_lists([[], []]).to_lists() == [[], []]
    assert Support.from_lists([[[]], [[3]]]).row_shape == (2, 1)
    assert Support.from_csr([], [0]).to_lists() == []
    assert Support.from_csr([], [0, 0], log_probs=[]).to_lists() == [[]]
    assert Support.from_padded([[], []]).to_lists() == [[], []]
    assert Support.from_padded(np.zeros((0, 4), np.int32)).to_lists() == []
    assert Support.from_bitmask(np.zeros((0, 2), np.uint8), 9).to_lists() == []


def test_a_row_of_none():
    with pytest.raises(ValueError, match=r"row \[1\] is None.*none='full_vocab'"):
        Support.from_lists([[3], None])
    assert Support.from_lists([[3], None], none="full_vocab").to_lists() == [[3], []]
    assert Support.from_lists(
        [None, [3]], none="full_vocab", log_probs=[None, [-1.0]]
    ).to_lists() == [[], [3]]
    assert Support.from_lists([[None], [[3]]], none="full_vocab").to_lists() == [[[]], [[3]]]
    with pytest.raises(ValueError, match=r"row \[1, 0\] is None"):
        Support.from_lists([[[3]], [None]])
    with pytest.raises(ValueError, match="none must be"):
        Support.from_lists([[3]], none="empty")


def test_a_pad_of_zero_does_not_hide_the_real_id_zero():
    """field.md D 23: NeMo-RL pads with 0 and says with counts how many are real."""
    assert Support.from_padded([[0, 5], [5, 0]], [2, 1]).to_lists() == [[0, 5], [5]]
    assert Support.from_padded([[7, 0, 0]], [2]).to_lists() == [[0, 7]]


def test_what_lies_behind_the_count_is_not_looked_at():
    assert Support.from_padded([[5, -9, 2**31 - 1]], [1]).to_lists() == [[5]]
    assert Support.from_padded(np.array([[5, 2**40]]), [1]).to_lists() == [[5]]


def test_repeats_keep_the_first_log_prob():
    support = Support.from_lists([[7, 3, 7]], log_probs=[[-1.0, -2.0, -3.0]])
    assert support.to_lists() == [[3, 7]]
    assert support.log_probs.tolist() == [-2.0, -1.0]
    support = Support.from_top_log_probs([[7, 3, 7]], [[-1.0, -2.0, -3.0]])
    assert support.log_probs.tolist() == [[-2.0, -1.0, -INF]]
    assert Support.from_lists([[3] * 300 + [7]]).to_lists() == [[3, 7]]


def test_log_probs_are_rounded_to_float32_once():
    """Top log-probs may be float64: -inf is judged before they are rounded."""
    support = Support.from_top_log_probs([[1, 2]], np.array([[-1e39, -0.1]]))
    assert support.log_probs.tolist() == [[-INF, np.float32(-0.1)]]


@each_kind
@pytest.mark.parametrize("repeat", [False, True])
def test_arrays_of_every_framework(kind, repeat, rng):
    """Those of JAX and torch stay where they are; that they are not sorted is said in the docstring."""
    rows = random_rows(rng, 20)
    given = shuffled(rng, rows, repeat)
    ids = as_kind(np.array([i for row in given for i in row], np.int32), kind)
    csr = Support.from_csr(ids, as_kind(offsets_of(given).astype(np.int32), kind))
    counts = as_kind(np.array(list(map(len, given)), np.int32), kind)
    zero = Support.from_padded(as_kind(padded(given, 0), kind), counts)
    minus = Support.from_padded(as_kind(padded(given, -1), kind))
    masks = Support.from_bitmask(as_kind(bitmask(rows, 50), kind), 50)
    for support in (csr, zero, minus):
        assert type(support.token_ids) is type(ids)
        expected = rows if kind == "numpy" else given
        assert support.to_lists() == expected
    assert masks.to_lists() == rows
    if kind != "numpy":
        assert csr.token_ids is ids


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
@each_kind
def test_counts_of_every_width(kind, dtype):
    """200 columns: the comparison must not happen in int8."""
    ids = np.broadcast_to(np.arange(200, dtype=np.int32), (2, 200))
    support = Support.from_padded(as_kind(ids, kind), as_kind(np.array([3, 100], dtype), kind))
    assert np.asarray(support.sizes()).tolist() == [3, 100]


def test_from_padded_and_csr_under_jit():
    import jax

    ids = np.array([[5, 0], [6, 7]], np.int32)
    support = jax.jit(Support.from_padded)(ids, np.array([1, 2], np.int32))
    assert support.to_lists() == [[5], [6, 7]]
    support = jax.jit(Support.from_csr)(ids.reshape(-1), np.array([0, 3, 4], np.int32))
    assert support.to_lists() == [[5, 0, 6], [7]]


MISTAKES = [
    # lists
    (
        Support.from_lists,
        ([[1], [2, -3]],),
        ValueError,
        r"row \[1\], position 1: id -3 is negative",
    ),
    (
        Support.from_lists,
        ([[1], [2, 2**31]],),
        ValueError,
        r"row \[1\], position 1: id 2147483648 is outside int32",
    ),
    (
        Support.from_lists,
        ([[1], [2**80]],),
        ValueError,
        r"row \[1\], position 0: id .* is outside int32",
    ),
    (Support.from_lists, ([[1], [2.0]],), TypeError, r"row \[1\], position 0 is 2.0, not an id"),
    (Support.from_lists, ([[1], [True]],), TypeError, r"row \[1\], position 0 is True, not an id"),
    (
        Support.from_lists,
        ([[1, 2], [True, 2]],),
        TypeError,
        r"row \[1\], position 0 is True, not an id",
    ),
    (Support.from_lists, ([[1], ["2"]],), TypeError, r"row \[1\], position 0 is '2', not an id"),
    (Support.from_lists, ([[1], [None]],), TypeError, r"row \[1\], position 0 is None, not an id"),
    (Support.from_lists, ([[1], 2],), TypeError, r"row \[1\] must be a list of ids, got 2"),
    (Support.from_lists, ([1, 2],), TypeError, r"row \[0\] must be a list of ids, got 1"),
    (Support.from_lists, (["12"],), TypeError, r"row \[0\] must be a list of ids, got '12'"),
    (Support.from_lists, ([np.array([1.5])],), TypeError, "is 1.5, not an id"),
    (Support.from_lists, ("12",), TypeError, "rows must be a list of rows, got str"),
    (Support.from_lists, (None,), TypeError, "rows must be a list of rows, got NoneType"),
    (
        Support.from_lists,
        ([[[1]], [[1], [2]]],),
        ValueError,
        r"item \[1\] has 2 rows, item \[0\] has 1",
    ),
    (Support.from_lists, ([[[1]], [2]],), TypeError, r"row \[1, 0\] must be a list of ids, got 2"),
    # offsets
    (Support.from_csr, ([1, 2], [1, 2]), ValueError, r"offsets\[0\] is 1; offsets must start at 0"),
    (
        Support.from_csr,
        ([1, 2], [0, 2, 1, 2]),
        ValueError,
        r"offsets\[2\] is 1, below offsets\[1\], 2",
    ),
    (Support.from_csr, ([1, 2], [0, 1]), ValueError, r"offsets\[1\] is 1, but token_ids has 2"),
    (Support.from_csr, ([1, 2], [0, 3]), ValueError, r"offsets\[1\] is 3, but token_ids has 2"),
    (Support.from_csr, ([1, 2], []), ValueError, "an entry more than there are rows"),
    (
        Support.from_csr,
        ([1, -2, 3], [0, 1, 3]),
        ValueError,
        r"row \[1\], position 0: id -2 is negative",
    ),
    (
        Support.from_csr,
        ([1, 2**31], [0, 0, 2]),
        ValueError,
        r"row \[1\], position 1: id 2147483648",
    ),
    (Support.from_csr, ([1.0], [0, 1]), TypeError, "ids must be integers, got float64"),
    (Support.from_csr, ([True], [0, 1]), TypeError, "token_ids must be integers, got a bool"),
    (Support.from_csr, ([1], [0.0, 1.0]), TypeError, "offsets must be integers, got float64"),
    (
        Support.from_csr,
        ([[1]], [0, 1]),
        ValueError,
        r"token_ids must have one axis, got the shape \(1, 1\)",
    ),
    (Support.from_csr, ([1], [[0, 1]]), ValueError, "offsets must have one axis"),
    (Support.from_csr, (5, [0, 1]), TypeError, "token_ids must be an array or a list, got int"),
    # padded
    (Support.from_padded, ([[1], [-2]],), ValueError, r"row \[1\], position 0: id -2 is negative"),
    (
        Support.from_padded,
        ([[1, -1]], [2]),
        ValueError,
        r"row \[0\], position 1: id -1 is negative",
    ),
    (
        Support.from_padded,
        ([[1, 2]], [3]),
        ValueError,
        r"counts\[0\] is 3, not between 0 and K = 2",
    ),
    (Support.from_padded, ([[1, 2]], [-1]), ValueError, r"counts\[0\] is -1"),
    (
        Support.from_padded,
        ([[1, 2]], [1, 2]),
        ValueError,
        r"counts are \(2,\), token_ids are \(1, 2\)",
    ),
    (Support.from_padded, ([[1, 2]], [1.0]), TypeError, "counts must be integers, got float64"),
    (Support.from_padded, ([[1.0]],), TypeError, "ids must be integers, got float64"),
    (
        Support.from_padded,
        ([1, 2],),
        ValueError,
        r"must be \[\*batch, R, K\], got the shape \(2,\)",
    ),
    (Support.from_padded, ([[1], [2, 3]],), ValueError, "token_ids must be a rectangular list"),
    (Support.from_padded, ([[1, 2**40]],), ValueError, r"row \[0\], position 1: id 1099511627776"),
    # bit masks
    (
        Support.from_bitmask,
        (np.zeros((1, 2), np.uint8), 17),
        ValueError,
        r"must be \[\*batch, R, 3\].*17",
    ),
    (
        Support.from_bitmask,
        (np.array([[0, 2]], np.uint8), 9),
        ValueError,
        r"row \[0\] has bit 9 set",
    ),
    (
        Support.from_bitmask,
        (np.zeros((1, 2), np.int8), 9),
        TypeError,
        "bits must be uint8, got int8",
    ),
    (Support.from_bitmask, (np.zeros(2, np.uint8), 9), ValueError, r"got \(2,\)"),
    (
        Support.from_bitmask,
        (np.zeros((1, 2), np.uint8), 2**18 + 1),
        ValueError,
        "262144, got 262145",
    ),
    # top log-probs
    (
        Support.from_top_log_probs,
        ([[1, 2]], [[-1.0, NAN]]),
        ValueError,
        r"row \[0\], column 1 has the log-prob nan",
    ),
    (
        Support.from_top_log_probs,
        ([[1, 2]], [[INF, -1.0]]),
        ValueError,
        r"row \[0\], column 0 has the log-prob inf",
    ),
    (
        Support.from_top_log_probs,
        ([[1, -2]], [[-1.0, -1.0]]),
        ValueError,
        r"position 1: id -2 is negative",
    ),
    (
        Support.from_top_log_probs,
        ([[1, 2]], [[-1.0]]),
        ValueError,
        r"log_probs are \(1, 1\), ids are \(1, 2\)",
    ),
    (Support.from_top_log_probs, ([1], [-1.0]), ValueError, r"got the shape \(1,\)"),
]


@pytest.mark.parametrize(
    ("reader", "arguments", "error", "message"),
    MISTAKES,
    ids=lambda x: getattr(x, "__name__", None),
)
def test_mistakes_are_named(reader, arguments, error, message):
    with pytest.raises(error, match=message):
        reader(*arguments)


@pytest.mark.parametrize(
    ("log_probs", "error", "message"),
    [
        ([[-1.0]], ValueError, r"nested as the rows: they have rows \(1,\), not \(2,\)"),
        ([[-1.0], [-1.0]], ValueError, r"log_probs of row \[1\] has 1 entries for 2 ids"),
        ([["a"], [-1.0, -2.0]], TypeError, "log_probs must be numbers"),
        (5, TypeError, "log_probs must be a list of rows, got int"),
    ],
)
def test_log_probs_that_do_not_fit_the_lists(log_probs, error, message):
    with pytest.raises(error, match=message):
        Support.from_lists([[1], [2, 3]], log_probs=log_probs)


def test_log_probs_that_do_not_fit_the_arrays():
    with pytest.raises(ValueError, match=r"log_probs are \(1,\), token_ids are \(2,\)"):
        Support.from_csr([1, 2], [0, 2], log_probs=[-1.0])
    with pytest.raises(TypeError, match="log_probs must be floats, got int64"):
        Support.from_csr([1], [0, 1], log_probs=np.array([1]))
    with pytest.raises(TypeError, match="the arguments must be arrays of one framework"):
        Support.from_csr(as_kind(np.array([1], np.int32), "jax"), np.array([0, 1]))


def test_empty_pieces_keep_their_place():
    """[[], [[1]]] is a batch whose first piece has no rows: not one row and a nested list."""
    with pytest.raises(ValueError, match=r"item \[1\] has 1 rows, item \[0\] has 0"):
        Support.from_lists([[], [[1]]])
    assert flat_lists(Support.from_lists([[[], [2]], [[1], []]])) == [[], [2], [1], []]
