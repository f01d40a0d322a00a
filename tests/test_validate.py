"""Support.validate: what it finds, and how it names the row, the position and the id."""

from __future__ import annotations

import numpy as np
import pytest

from jax_topp import Support

from supports import each_kind, each_layout, in_kind, random_support

RAGGED = Support(np.array([5, 6, 7]), np.array([0, 2]), np.array([2, 3]))


def spoil(support: Support, name: str, at: tuple[int, ...], value: int) -> Support:
    host = support.numpy()
    leaves = {n: getattr(host, n) for n in ("token_ids", "begins", "ends")}
    leaves = {n: None if x is None else x.copy() for n, x in leaves.items()}
    leaves[name][at] = value
    return Support(**leaves)


@each_kind
def test_validate_names_row_position_and_id(kind):
    ragged = Support(
        np.array([[1, 3, 5, 7], [2, 4, 6, -1]]), np.array([[0, 2]] * 2), np.array([[2, 4]] * 2)
    )
    padded = Support(np.array([[[1, 3], [5, 7]], [[2, 4], [6, -1]]]))
    for good in (ragged, padded):
        assert in_kind(good, kind).validate(8, np.array([[1, 7], [2, 6]])) is not None
    for bad, message in (
        (
            spoil(ragged, "token_ids", (1, 2), 8),
            r"row \[1, 1\], position 0: id 8 is outside the vocabulary of 8",
        ),
        (spoil(ragged, "token_ids", (0, 1), -2), r"row \[0, 0\], position 1: id -2"),
        (spoil(padded, "token_ids", (0, 1, 1), 9), r"row \[0, 1\], position 1: id 9"),
        (spoil(ragged, "ends", (1, 1), 5), r"row \[1, 1\] has the extent \[2, 5\).*4 slots"),
        (spoil(ragged, "begins", (0, 0), -1), r"row \[0, 0\] has the extent \[-1, 2\)"),
        (spoil(ragged, "begins", (0, 0), 3), r"row \[0, 0\] has the extent \[3, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            in_kind(bad, kind).validate(8)


@each_layout
def test_validate_targets(layout, rng):
    """Every target in its support passes, and a random one elsewhere is named."""
    support, rows = random_support(rng, (4, 5), layout)
    targets = np.array([row[-1] if row else -1 for row in rows]).reshape(4, 5)
    assert support.validate(50, targets) is support
    full = [n for n, row in enumerate(rows) if row]
    n = int(rng.choice(full))
    wrong = targets.copy()
    wrong.flat[n] = next(i for i in range(50) if i not in rows[n])
    where = rf"row \[{n // 5}, {n % 5}\]: target {wrong.flat[n]}"
    with pytest.raises(ValueError, match=f"{where} is not in the support"):
        support.validate(50, wrong)
    support.validate(50, wrong, missing="include")
    mask = np.ones((4, 5), bool)
    mask.flat[n] = False
    support.validate(50, wrong, mask)
    support.validate(50, wrong, mask.astype(np.float32))
    wrong.flat[n] = 50
    with pytest.raises(ValueError, match=r"row .*target 50 is outside the vocabulary"):
        support.validate(50, wrong, missing="include")


def test_validate_empty_rows_and_policies():
    support = Support.from_lists([[1, 2], []])
    support.validate(4)
    support.validate(4, [1, -1])
    with pytest.raises(ValueError, match=r"row \[1\]: target 3 has no support: the row is empty"):
        support.validate(4, [1, 3])
    support.validate(4, [1, 3], empty="full_vocab")
    support.validate(4, [1, 3], missing="include")
    with pytest.raises(ValueError, match="missing must be"):
        support.validate(4, [1, 3], missing="maybe")


def test_validate_ignores_what_masked_rows_hold():
    """Trainers' padding rows carry leftover ids and extents."""
    support = Support(np.array([1, 99]), np.array([0, 1, 7]), np.array([1, 2, 3]))
    support.validate(4, [1, 99, -100], [1, 0, 1])
    with pytest.raises(ValueError, match="id 99"):
        support.validate(4, [1, 1, -100])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "vocab_size must lie between 1 and 262144, got 0"),
        ((2**18 + 1,), ValueError, "got 262145"),
        ((True,), TypeError, "vocab_size must be an int, got bool"),
        ((8.0,), TypeError, "got float"),
        ((8, [1.0, 2.0]), TypeError, "targets must be integers, got float64"),
        ((8, [True, 2]), TypeError, "targets must be integers, got a bool"),
        ((8, [1]), ValueError, r"targets is \(1,\), rows are \(2,\)"),
        ((8, None, [True]), ValueError, r"loss_mask is \(1,\)"),
        ((8, 5), TypeError, "targets must be an array, got int"),
    ],
)
def test_validate_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        RAGGED.validate(*arguments)
