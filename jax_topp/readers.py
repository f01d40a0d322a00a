"""Readers of the formats that rollout engines and trainers record supports in.

Formats of numbers on the host are checked, and their rows are sorted and freed of repeats; an error
names the row and the position. JAX arrays and torch tensors stay where they are, unchecked, in
:func:`from_csr` and :func:`from_padded`; the other readers copy them to the host.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import _arrays
from ._canonical import offsets_of, padded, ragged
from ._checks import check_vocab_size, row_index
from ._nested import flat_ids, flat_log_probs, flatten_rows
from .support import Support


def from_lists(rows: Any, *, none: str = "error", log_probs: Any = None) -> Support:
    """Reads nested lists, one of ids a row: what vLLM and SGLang return over HTTP.

    Args:
      rows: a list of rows; a row is a list or a 1-D array of ids. Lists of such lists, all of
        equally many rows, give batch axes.
      none: None for a row ("no mask for this token") is an error, or an empty row ("full_vocab"),
        to be scored with ``empty="full_vocab"``.
      log_probs: the engine's log-prob of each id, nested as ``rows``.

    Returns:
      A ragged NumPy Support.

    Raises:
      ValueError: None for a row, a negative id or one outside int32, log_probs of another length,
        or pieces of unequal numbers of rows. TypeError: anything but integers in a row.
    """
    if none not in ("error", "full_vocab"):
        raise ValueError(f"none must be 'error' or 'full_vocab', got {none!r}")
    shape, flat = flatten_rows("rows", rows)
    for n, row in enumerate(flat):
        if row is None:
            if none == "error":
                raise ValueError(
                    f"row {row_index(n, shape)} is None: the engine sent no support for it "
                    f"(none='full_vocab' reads it as an empty row)"
                )
            flat[n] = ()
    ids = flat_ids(flat, shape)
    sizes = np.fromiter(map(len, flat), np.int64, len(flat))
    values = None if log_probs is None else flat_log_probs(log_probs, sizes, shape)
    return ragged(ids, offsets_of(sizes), shape, values)


from_sampling_mask = from_lists


def from_csr(token_ids: Any, offsets: Any, *, log_probs: Any = None) -> Support:
    """Reads flat ids with offsets: row r has ``token_ids[offsets[r]:offsets[r + 1]]``.

    Args:
      token_ids: integers [C].
      offsets: integers [R + 1]; from 0, never decreasing, to C.
      log_probs: float [C], or None.

    Returns:
      A ragged Support of R rows. JAX arrays and torch tensors (of int32 and float32) are neither
      checked nor sorted, nor moved.

    Raises:
      ValueError: offsets that break these rules, or an id that is negative or outside int32.
      TypeError: other dtypes.
    """
    token_ids, offsets, log_probs = _arrays_of(
        token_ids=token_ids, offsets=offsets, log_probs=log_probs
    )
    for name, x in (("token_ids", token_ids), ("offsets", offsets)):
        if len(x.shape) != 1:
            raise ValueError(f"{name} must have one axis, got the shape {tuple(x.shape)}")
    if offsets.shape[0] == 0:
        raise ValueError("offsets must have an entry more than there are rows, got none at all")
    if not isinstance(token_ids, np.ndarray):
        return Support(token_ids, offsets[:-1], offsets[1:], log_probs)
    _check_offsets(offsets, len(token_ids))
    offsets = offsets.astype(np.int64)
    shape = (len(offsets) - 1,)
    if log_probs is not None:
        log_probs = _like_ids(log_probs, token_ids)
    return ragged(token_ids, offsets, shape, log_probs)


def from_padded(token_ids: Any, counts: Any = None, *, log_probs: Any = None) -> Support:
    """Reads rows of equal width.

    Args:
      token_ids: integers [*batch, R, K].
      counts: integers [*batch, R]: a row's ids are its first ``counts``, and what follows is not
        looked at, so that a pad of 0 does not hide the real id 0. None: -1 marks unused slots.
      log_probs: float [*batch, R, K], or None.

    Returns:
      A padded Support of the same shape, each row's ids sorted to the front, -1 after them. JAX
      arrays and torch tensors are neither checked nor sorted, nor moved.

    Raises:
      ValueError: counts below 0 or above K, or an id that is negative (but for the -1 of unused
        slots) or outside int32. TypeError: other dtypes.
    """
    token_ids, counts, log_probs = _arrays_of(
        token_ids=token_ids, counts=counts, log_probs=log_probs
    )
    shape = tuple(token_ids.shape)
    if len(shape) < 2:
        raise ValueError(f"token_ids must be [*batch, R, K], got the shape {shape}")
    if counts is not None and tuple(counts.shape) != shape[:-1]:
        raise ValueError(
            f"counts must be one a row: counts are {tuple(counts.shape)}, token_ids are {shape}"
        )
    used = None
    if counts is not None:
        if not _arrays.is_integer(_arrays.dtype_name(counts)):
            raise TypeError(f"counts must be integers, got {_arrays.dtype_name(counts)}")
        if isinstance(counts, np.ndarray):
            _check_counts(counts, shape[-1])
        used = _arrays.arange(token_ids, shape[-1]) < _arrays.comparable(counts)[..., None]
    if isinstance(token_ids, np.ndarray):
        if log_probs is not None:
            log_probs = _like_ids(log_probs, token_ids)
        return padded(token_ids, used, log_probs)
    if used is not None:
        token_ids = _arrays.where(used, token_ids, -1)
        log_probs = None if log_probs is None else _arrays.where(used, log_probs, -np.inf)
    return Support(token_ids, log_probs=log_probs)


def from_bitmask(bits: Any, vocab_size: int) -> Support:
    """Reads one bit an id: vLLM's form for wide rows.

    Args:
      bits: uint8 [*batch, R, ceil(vocab_size / 8)]; id i is bit ``i % 8`` (from the lowest) of byte
        ``i // 8``.
      vocab_size: the number of ids.

    Returns:
      A ragged NumPy Support.

    Raises:
      ValueError: another number of bytes, or a bit set at or past ``vocab_size``.
      TypeError: another dtype than uint8.
    """
    vocab_size = check_vocab_size(vocab_size)
    bits = _host("bits", bits)
    if bits.dtype != np.uint8:
        raise TypeError(f"bits must be uint8, got {bits.dtype}")
    width = math.ceil(vocab_size / 8)
    if bits.ndim < 2 or bits.shape[-1] != width:
        raise ValueError(
            f"bits must be [*batch, R, {width}] for a vocabulary of {vocab_size}, got {bits.shape}"
        )
    shape = bits.shape[:-1]
    # Almost every byte is zero: only the others are unpacked.
    flat = bits.reshape(-1)
    at = np.flatnonzero(flat)
    byte, bit = np.nonzero(np.unpackbits(flat[at, None], axis=1, bitorder="little"))
    row, ids = at[byte] // width, at[byte] % width * 8 + bit
    past = np.flatnonzero(ids >= vocab_size)
    if past.size:
        raise ValueError(
            f"row {row_index(row[past[0]], shape)} has bit {ids[past[0]]} set, outside the vocabulary "
            f"of {vocab_size} ids"
        )
    sizes = np.bincount(row, minlength=math.prod(shape))
    return ragged(ids, offsets_of(sizes), shape, None)


def from_top_log_probs(ids: Any, log_probs: Any) -> Support:
    """Reads top-k log-probs: the ids whose log-prob is finite are the members.

    Args:
      ids: integers [*batch, R, K]. An id may repeat (engines put the sampled one first); its first
        log-prob is kept.
      log_probs: float [*batch, R, K]; -inf where the sampler dropped the id.

    Returns:
      A padded NumPy Support with log_probs, as :func:`from_padded` gives.

    Raises:
      ValueError: a NaN or +inf log-prob, a member that is negative or outside int32, other shapes.
      TypeError: other dtypes.
    """
    ids, log_probs = _host("ids", ids), _host("log_probs", log_probs)
    if ids.ndim < 2:
        raise ValueError(f"ids must be [*batch, R, K], got the shape {ids.shape}")
    log_probs = _like_ids(log_probs, ids, "ids", np.float64)
    bad = np.isnan(log_probs) | (log_probs == np.inf)
    if bad.any():
        *row, column = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"row {row}, column {column} has the log-prob {log_probs[*row, column]}")
    return padded(ids, np.isfinite(log_probs), log_probs)


def _host(name: str, x: Any) -> np.ndarray:
    """An array from a list, NumPy, or a framework's array copied to the host."""
    if isinstance(x, (list, tuple)):
        return _from_sequence(name, x)
    if _arrays.kind_of(x) is None:
        raise TypeError(f"{name} must be an array or a list, got {type(x).__name__}")
    return _arrays.to_host(name, x)


def _from_sequence(name: str, x: Any) -> np.ndarray:
    as_array = _arrays.host_numbers if name == "log_probs" else _arrays.host_integers
    return as_array(name, x)


def _arrays_of(**arguments: Any) -> list[Any]:
    """The arguments as arrays of one framework; lists become NumPy, None stays."""
    out = [
        _from_sequence(n, x) if isinstance(x, (list, tuple)) else x for n, x in arguments.items()
    ]
    kinds = {n: _arrays.kind_of(x) for n, x in zip(arguments, out, strict=True) if x is not None}
    for name, kind in kinds.items():
        if kind is None:
            raise TypeError(
                f"{name} must be an array or a list, got {type(arguments[name]).__name__}"
            )
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise TypeError(f"the arguments must be arrays of one framework: {mixed}")
    return out


def _like_ids(
    log_probs: np.ndarray, ids: np.ndarray, name: str = "token_ids", dtype: type = np.float32
) -> np.ndarray:
    if not _arrays.is_float(_arrays.dtype_name(log_probs)):
        raise TypeError(f"log_probs must be floats, got {log_probs.dtype}")
    if log_probs.shape != ids.shape:
        raise ValueError(
            f"log_probs must have the shape of {name}: log_probs are {log_probs.shape}, "
            f"{name} are {ids.shape}"
        )
    with np.errstate(over="ignore"):
        return log_probs.astype(dtype, copy=False)


def _check_offsets(offsets: np.ndarray, count: int) -> None:
    if offsets.dtype.kind not in "iu":
        raise TypeError(f"offsets must be integers, got {offsets.dtype}")
    if offsets[0] != 0:
        raise ValueError(f"offsets[0] is {offsets[0]}; offsets must start at 0")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"offsets[{i + 1}] is {offsets[i + 1]}, below offsets[{i}], {offsets[i]}; "
            f"offsets must never decrease"
        )
    if offsets[-1] != count:
        raise ValueError(
            f"offsets[{len(offsets) - 1}] is {offsets[-1]}, but token_ids has {count} entries; "
            f"the last offset must be their number"
        )


def _check_counts(counts: np.ndarray, width: int) -> None:
    bad = (counts < 0) | (counts > width)
    if bad.any():
        row = [int(i) for i in np.argwhere(bad)[0]]
        raise ValueError(f"counts{row} is {counts[tuple(row)]}, not between 0 and K = {width}")
