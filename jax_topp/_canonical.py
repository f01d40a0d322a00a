"""Host rows as a Support in canonical form: every row ascending, each id once."""

from __future__ import annotations

import math

import numpy as np

from . import _arrays
from ._checks import bad_id, row_index
from .support import Support


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _check_flat_ids(ids: np.ndarray, offsets: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    bad = np.flatnonzero((ids < 0) | (ids > _arrays.INT32.max))
    if bad.size:
        row = int(np.searchsorted(offsets, bad[0], side="right")) - 1
        raise bad_id(row_index(row, shape), int(bad[0] - offsets[row]), ids[bad[0]])
    return ids.astype(np.int32, copy=False)


def ragged(
    ids: np.ndarray, offsets: np.ndarray, shape: tuple[int, ...], log_probs: np.ndarray | None
) -> Support:
    """A ragged Support of rows given one after another: checks, sorts, drops repeats."""
    ids = _check_flat_ids(ids, offsets, shape)
    ids, offsets, log_probs = _sort_flat(ids, offsets, log_probs)
    if len(ids) > _arrays.INT32.max:
        raise ValueError(f"there are {len(ids)} ids, more than int32 can number")
    if len(shape) == 1:
        extents = offsets.astype(np.int32)
        return Support(ids, extents[:-1], extents[1:], log_probs)
    *batch, rows = shape
    offsets = offsets[: 1 + math.prod(shape)]
    pieces = math.prod(batch)
    edges = offsets[np.arange(pieces + 1) * rows]
    capacity = int(np.diff(edges).max(initial=0))
    used = np.arange(capacity) < np.diff(edges)[:, None]
    begins = offsets[:-1].reshape(pieces, rows) - edges[:-1, None]
    ends = offsets[1:].reshape(pieces, rows) - edges[:-1, None]

    def laid_out(x: np.ndarray, fill: float) -> np.ndarray:
        out = np.full((pieces, capacity), fill, x.dtype)
        out[used] = x
        return out.reshape(*batch, capacity)

    return Support(
        laid_out(ids, -1),
        begins.astype(np.int32).reshape(shape),
        ends.astype(np.int32).reshape(shape),
        None if log_probs is None else laid_out(log_probs, -np.inf),
    )


def _sort_flat(
    ids: np.ndarray, offsets: np.ndarray, log_probs: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Each row strictly ascending; of a repeated id the first log-prob stays."""
    descends = ids[1:] <= ids[:-1]
    starts = offsets[1:-1]
    starts = starts[(starts > 0) & (starts < len(ids))]
    descends[starts - 1] = False  # from one row to the next
    if not descends.any():
        return ids, offsets, log_probs
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    keys = row << 31 | ids
    if log_probs is None:
        keys.sort()
    else:
        order = np.argsort(keys, kind="stable")
        keys, log_probs = keys[order], log_probs[order]
    first = np.ones(len(keys), bool)
    first[1:] = keys[1:] != keys[:-1]
    ids = (keys & _arrays.INT32.max).astype(np.int32)
    if not first.all():
        ids, offsets = ids[first], offsets_of(first)[offsets]
        log_probs = None if log_probs is None else log_probs[first]
    return ids, offsets, log_probs


def padded(ids: np.ndarray, used: np.ndarray | None, log_probs: np.ndarray | None) -> Support:
    """A padded Support: checks, sorts the used slots of each row to the front, drops repeats."""
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if used is None:
        used = ids != -1
    bad = used & ((ids < 0) | (ids > _arrays.INT32.max))
    if bad.any():
        *row, position = (int(i) for i in np.argwhere(bad)[0])
        raise bad_id(row, position, ids[*row, position])
    ids = np.where(used, ids, -1).astype(np.int32)
    if log_probs is not None:
        with np.errstate(over="ignore"):
            log_probs = np.where(used, log_probs, -np.inf).astype(np.float32)
    ids, log_probs = _sort_padded(ids, log_probs)
    repeats = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != -1)
    if repeats.any():
        ids[..., 1:][repeats] = -1
        if log_probs is not None:
            log_probs[..., 1:][repeats] = -np.inf
        ids, log_probs = _sort_padded(ids, log_probs)
    return Support(ids, log_probs=log_probs)


def _sort_padded(
    ids: np.ndarray, log_probs: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Sorts each row, -1 last: it is the largest unsigned number."""
    unsigned = ids.view(np.uint32)
    if (unsigned[..., 1:] >= unsigned[..., :-1]).all():
        return ids, log_probs
    if log_probs is None:
        return np.sort(unsigned, axis=-1).view(np.int32), None
    order = np.argsort(unsigned, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1), np.take_along_axis(log_probs, order, -1)
