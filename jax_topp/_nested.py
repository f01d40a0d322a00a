"""Nested lists, one of ids a row, to flat arrays and back."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays
from ._checks import bad_id, row_index

if TYPE_CHECKING:
    from .support import Support


def _is_batch(rows: list[Any]) -> bool:
    """Whether the items are lists of rows; decided by the first that shows it."""
    for item in rows:
        if item is None:
            return False
        if hasattr(item, "ndim"):
            return item.ndim > 1
        if isinstance(item, (list, tuple)) and len(item):
            return (
                item[0] is None
                or isinstance(item[0], (list, tuple))
                or (hasattr(item[0], "tolist") and item[0].ndim > 0)
            )
    return False


def flatten_rows(name: str, rows: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The row shape and all rows in one list."""
    if not isinstance(rows, (list, tuple)) and getattr(rows, "ndim", 0) < 1:
        raise TypeError(f"{name} must be a list of rows, got {type(rows).__name__}")
    flat = list(rows)
    shape: tuple[int, ...] = (len(flat),)
    while _is_batch(flat):
        lengths = []
        for n, piece in enumerate(flat):
            if piece is None or not hasattr(piece, "__len__"):
                raise TypeError(
                    f"{name}: item {row_index(n, shape)} must be a list of rows, got {piece!r}"
                )
            lengths.append(len(piece))
        if len(set(lengths)) > 1:
            n = next(i for i, length in enumerate(lengths) if length != lengths[0])
            raise ValueError(
                f"{name}: item {row_index(n, shape)} has {lengths[n]} rows, item {row_index(0, shape)} has "
                f"{lengths[0]}: the pieces of a batch need equally many (add empty rows)"
            )
        shape, flat = (*shape, lengths[0]), list(chain.from_iterable(flat))
    return shape, flat


def flat_ids(rows: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """All ids one after another. Lists, since NumPy would truncate or promote floats among arrays."""
    for n, row in enumerate(rows):
        if hasattr(row, "tolist"):
            rows[n] = row.tolist()
        elif not isinstance(row, (list, tuple)):
            raise TypeError(f"row {row_index(n, shape)} must be a list of ids, got {row!r}")
    values = list(chain.from_iterable(rows))
    if not values:
        return np.zeros(0, np.int64)
    try:
        ids = np.array(values)
    except ValueError:  # lists among the ids
        ids = np.array(None)
    if ids.ndim == 1 and ids.dtype.kind in "iu" and not _arrays.has_bools(values):
        return ids
    for n, row in enumerate(rows):
        for position, x in enumerate(row):
            if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
                raise TypeError(
                    f"row {row_index(n, shape)}, position {position} is {x!r}, not an id"
                )
            if not 0 <= x <= _arrays.INT32.max:
                raise bad_id(row_index(n, shape), position, x)
    raise AssertionError("unreachable")


def flat_log_probs(log_probs: Any, sizes: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    got, rows = flatten_rows("log_probs", log_probs)
    rows = [() if row is None else row for row in rows]
    if len(rows) != len(sizes):
        raise ValueError(f"log_probs must be nested as the rows: they have rows {got}, not {shape}")
    for n, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True)):
        if len(row) != size:
            raise ValueError(
                f"log_probs of row {row_index(n, shape)} has {len(row)} entries for {size} ids"
            )
    values = np.array(list(chain.from_iterable(rows)) or np.zeros(0))
    if values.dtype.kind not in "fiu":
        raise TypeError(f"log_probs must be numbers, got {values.dtype}")
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def nested_lists(host: Support) -> list[Any]:
    """The ids of every row of a NumPy Support; -1 is skipped."""
    if len(host.row_shape) > 1:
        return [nested_lists(host[i]) for i in range(len(host))]
    ids = host.token_ids.tolist()
    if host.is_padded:
        rows = ids
    else:
        extents = zip(host.begins.tolist(), host.ends.tolist(), strict=True)
        rows = [ids[begin:end] for begin, end in extents]
    if (host.token_ids == -1).any():
        rows = [[i for i in row if i != -1] for row in rows]
    return rows
