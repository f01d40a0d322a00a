"""What is checked of a Support: its arrays when it is made, and its values where the host can look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _arrays, contract

if TYPE_CHECKING:
    from .support import Support


def checked_leaves(
    token_ids: Any, begins: Any, ends: Any, log_probs: Any
) -> tuple[Any, Any, Any, Any]:
    """The arrays as int32 and float32, after all that their types and shapes can show."""
    if (begins is None) != (ends is None):
        given, absent = ("begins", "ends") if ends is None else ("ends", "begins")
        raise ValueError(f"begins and ends belong together: {given} is given, {absent} is not")
    leaves = {"token_ids": token_ids, "begins": begins, "ends": ends, "log_probs": log_probs}
    leaves = {name: x for name, x in leaves.items() if x is not None or name == "token_ids"}
    _check_one_framework(leaves)
    out = {name: _as_dtype(name, x) for name, x in leaves.items()}
    shapes = {name: tuple(x.shape) for name, x in out.items()}
    ids = shapes["token_ids"]
    if begins is None:
        if len(ids) < 2:
            raise ValueError(
                f"token_ids without begins and ends must be padded, [*batch, R, K], got the shape {ids}"
            )
    elif shapes["begins"] != shapes["ends"]:
        raise ValueError(
            f"begins and ends must have one shape: begins are {shapes['begins']}, ends are {shapes['ends']}"
        )
    elif not ids or not shapes["begins"] or ids[:-1] != shapes["begins"][:-1]:
        raise ValueError(
            f"token_ids must be [*batch, C] and begins [*batch, R] with the same batch axes: "
            f"token_ids are {ids}, begins are {shapes['begins']}"
        )
    if ids[-1] > _arrays.INT32.max:
        raise ValueError(f"token_ids have {ids[-1]} slots, more than int32 can number")
    if shapes.get("log_probs", ids) != ids:
        raise ValueError(
            f"log_probs must have the shape of token_ids: log_probs are {shapes['log_probs']}, "
            f"token_ids are {ids}"
        )
    return out["token_ids"], out.get("begins"), out.get("ends"), out.get("log_probs")


def _check_one_framework(leaves: dict[str, Any]) -> None:
    kinds = {name: _arrays.kind_of(x) for name, x in leaves.items()}
    for name, kind in kinds.items():
        if kind is None:
            raise TypeError(
                f"{name} must be a NumPy, JAX or torch array, got {type(leaves[name]).__name__} "
                f"(Support.from_lists, from_csr and from_padded read other formats)"
            )
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise TypeError(f"a Support holds arrays of one framework: {mixed}; see Support.to(device)")


def _as_dtype(name: str, x: Any) -> Any:
    wanted = "float32" if name == "log_probs" else "int32"
    if isinstance(x, np.ndarray):
        return _arrays.host_floats(name, x) if wanted == "float32" else _arrays.host_ids(name, x)
    if _arrays.dtype_name(x) != wanted:
        raise TypeError(f"{name} must be {wanted}, got {_arrays.dtype_name(x)}: convert it first")
    return x


def row_index(n: Any, shape: tuple[int, ...]) -> list[int]:
    """The index of row n, for a message."""
    return [int(i) for i in np.unravel_index(int(n), shape)]


def bad_id(row: list[int], position: int, value: Any) -> ValueError:
    what = "negative" if value < 0 else "outside int32"
    return ValueError(f"row {row}, position {position}: id {value} is {what}")


def gatherable_rows(support: Support, rows: Any) -> tuple[Any, Any]:
    """int32 row numbers in the support's framework that can be gathered, and which of them were in range."""
    if isinstance(rows, (list, tuple)):
        rows = _arrays.host_integers("rows", rows)
    kind, own = _arrays.kind_of(rows), _arrays.kind_of(support.token_ids)
    if kind is None or kind not in ("numpy", own):
        raise TypeError(
            f"rows must be a NumPy array or, as the support's, a {own} array, got {type(rows).__name__}"
        )
    if not _arrays.is_integer(_arrays.dtype_name(rows)):
        raise TypeError(f"rows must be integers, got {_arrays.dtype_name(rows)}")
    batch, count = support.row_shape[:-1], support.row_shape[-1]
    if len(rows.shape) != len(batch) + 1 or tuple(rows.shape[:-1]) != batch:
        raise ValueError(
            f"rows must be [*batch, R'] with the support's batch axes: rows are {tuple(rows.shape)}, "
            f"the support has rows {support.row_shape}"
        )
    rows = _arrays.comparable(rows)
    inside = (rows >= 0) & (rows < count)
    rows = _arrays.as_int32(_arrays.where(inside, rows, 0))
    if kind == "numpy":
        rows, inside = (_arrays.like(x, support.token_ids) for x in (rows, inside))
    return rows, inside


def good_extents(begins: Any, ends: Any, capacity: int) -> Any:
    return (begins >= 0) & (ends >= begins) & (ends <= capacity)


def check_vocab_size(value: Any) -> int:
    """The number of ids, as an int; TypeError or ValueError for anything that cannot be one."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"vocab_size must be an int, got {type(value).__name__}")
    if not 0 < value <= contract.MAX_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size must lie between 1 and {contract.MAX_VOCAB_SIZE}, got {value}"
        )
    return int(value)


def validate(host: Support, vocab_size: int, targets: Any, loss_mask: Any, options: int) -> None:
    active = np.ones(host.row_shape, bool)
    if loss_mask is not None:
        active = _row_values("loss_mask", loss_mask, host) != 0
    if targets is not None:
        targets = _row_values("targets", targets, host)
        if targets.dtype.kind not in "iu":
            raise TypeError(f"targets must be integers, got {targets.dtype}")
        active &= targets >= 0
    check_extents(host, active)
    row, slot = _slots_of(host, active)
    ids = host.token_ids.reshape(-1)[slot]
    _check_ids(host, row, slot, ids, vocab_size)
    if targets is not None:
        _check_targets(host, active, targets, row[ids != -1], ids[ids != -1], vocab_size, options)


def _row_values(name: str, x: Any, host: Support) -> np.ndarray:
    if isinstance(x, (list, tuple)):
        x = _arrays.host_integers(name, x) if name == "targets" else np.asarray(x)
    if _arrays.kind_of(x) is None:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    x = _arrays.to_host(name, x)
    if x.shape != host.row_shape:
        raise ValueError(
            f"{name} must be one a row: {name} is {x.shape}, rows are {host.row_shape}"
        )
    return x


def check_extents(host: Support, active: np.ndarray) -> None:
    if host.is_padded:
        return
    bad = np.flatnonzero(active & ~good_extents(host.begins, host.ends, host.capacity))
    if bad.size:
        begin, end = host.begins.reshape(-1)[bad[0]], host.ends.reshape(-1)[bad[0]]
        raise ValueError(
            f"{_row_name(host, bad[0])} has the extent [{begin}, {end}), which does not lie within "
            f"its {host.capacity} slots"
        )


def _slots_of(host: Support, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every slot of every active row, in order: the row's number and the slot's, both among all."""
    rows = np.flatnonzero(active)
    if host.is_padded:
        first = rows * host.capacity
        sizes = np.full(rows.shape, host.capacity)
    else:
        begins = host.begins.reshape(-1)[rows].astype(np.int64)
        sizes = host.ends.reshape(-1)[rows] - begins
        first = begins + rows // max(host.row_shape[-1], 1) * host.capacity
    before = np.cumsum(sizes) - sizes
    return np.repeat(rows, sizes), np.arange(sizes.sum()) + np.repeat(first - before, sizes)


def _row_name(host: Support, n: Any) -> str:
    return f"support row {row_index(n, host.row_shape)}"


def _check_ids(
    host: Support, row: np.ndarray, slot: np.ndarray, ids: np.ndarray, vocab_size: int
) -> None:
    bad = np.flatnonzero((ids < -1) | (ids >= vocab_size))
    if bad.size:
        n, where = row[bad[0]], bad[0] - np.searchsorted(row, row[bad[0]])
        raise ValueError(
            f"{_row_name(host, n)}, position {where}: id {ids[bad[0]]} is outside the vocabulary "
            f"of {vocab_size} ids"
        )


def _check_targets(
    host: Support,
    active: np.ndarray,
    targets: np.ndarray,
    row: np.ndarray,
    ids: np.ndarray,
    vocab_size: int,
    options: int,
) -> None:
    active, targets = active.reshape(-1), targets.reshape(-1)
    has_members, found = np.zeros(active.shape, bool), np.zeros(active.shape, bool)
    has_members[row] = True
    found[row[ids == targets[row]]] = True
    include, full = bool(options & contract.INCLUDE_MISSING), bool(options & contract.FULL_VOCAB)
    for bad, complaint in (
        (targets >= vocab_size, f"is outside the vocabulary of {vocab_size} ids"),
        (~has_members & (not full) & (not include), "has no support: the row is empty"),
        (has_members & ~found & (not include), "is not in the support"),
    ):
        rows = np.flatnonzero(active & bad)
        if rows.size:
            raise ValueError(f"{_row_name(host, rows[0])}: target {targets[rows[0]]} {complaint}")
