"""Statuses, options, limits, and the checks of a call: what both front ends and the kernels agree on."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np

MAX_VOCAB_SIZE = 1 << 18  # the fixed-point sums cannot overflow below this many members
LOGIT_DTYPES = ("float32", "bfloat16", "float16")  # in the order of the kernels' DType

# Bits of the kernels' options; csrc/contract.h has the same values.
INCLUDE_MISSING = 1
FULL_VOCAB = 2
NO_TARGET = 4
PADDED = 8

_MISSING = {"neg_inf": 0, "include": INCLUDE_MISSING}
_EMPTY = {"neg_inf": 0, "full_vocab": FULL_VOCAB}


class Status(IntEnum):
    """How a row ended; 0 is the only one with a finite score. docs/numerics.md has the table."""

    SCORED = 0
    IGNORED = 1
    EMPTY = 2
    MISSING = 3
    BAD_SUPPORT = 4
    BAD_TARGET = 5
    BAD_TEMPERATURE = 6
    NOT_FINITE = 7


def option_bits(missing: str, empty: str) -> int:
    """The kernels' option bits of the two policies; ValueError for an unknown one."""
    bits = 0
    for name, value, known in (("missing", missing, _MISSING), ("empty", empty, _EMPTY)):
        if not isinstance(value, str) or value not in known:
            choices = " or ".join(repr(choice) for choice in known)
            raise ValueError(f"{name} must be {choices}, got {value!r}")
        bits |= known[value]
    return bits


def check_logits(shape: tuple[int, ...], dtype: str) -> None:
    """Refuses logits without a vocabulary axis or of another dtype than the kernels read."""
    if len(shape) < 1:
        raise ValueError(f"logits must be [..., V], got the shape {shape}")
    if dtype not in LOGIT_DTYPES:
        raise TypeError(
            f"logits must be bfloat16, float16 or float32, got {dtype}; cast them before the call"
        )


def check_vocab_size(vocab_size: Any, columns: int) -> int:
    """The number of ids that exist: ``vocab_size``, or every column of the logits."""
    if vocab_size is None:
        vocab_size = columns
        name = f"the logits' last axis ({columns})"
    else:
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, (int, np.integer)):
            raise TypeError(f"vocab_size must be an int, got {type(vocab_size).__name__}")
        vocab_size = int(vocab_size)
        name = f"vocab_size ({vocab_size})"
        if not 0 <= vocab_size <= columns:
            raise ValueError(f"{name} must lie between 0 and the logits' last axis ({columns})")
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"{name} is above {MAX_VOCAB_SIZE}, the largest vocabulary supported")
    return vocab_size


def check_rows(
    logits: tuple[int, ...],
    support: tuple[int, ...],
    targets: tuple[int, ...] | None,
    loss_mask: tuple[int, ...] | None,
) -> None:
    """Refuses operands that disagree on the rows, naming the shapes."""
    rows = logits[:-1]
    if targets is not None and targets != rows:
        raise ValueError(
            f"targets must have the logits' shape without the vocabulary: "
            f"targets are {targets}, logits are {logits}"
        )
    if support != rows:
        raise ValueError(
            f"support must have one row for each row of the logits: "
            f"support has rows {support}, logits are {logits}"
        )
    if loss_mask is not None and loss_mask != rows:
        raise ValueError(
            f"loss_mask must have one entry a row: loss_mask is {loss_mask}, the rows are {rows}"
        )


def check_temperature(shape: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """Refuses a temperature that would need NumPy's rank-extending broadcast: [B] for [B, B] is a mistake."""
    if not shape:
        return
    if len(shape) != len(rows) or any(t not in (1, r) for t, r in zip(shape, rows, strict=True)):
        raise ValueError(
            f"temperature must be a number, or have the rank of targets with dimensions equal or 1: "
            f"temperature is {shape}, targets are {rows}"
        )


def host_temperature(value: Any) -> np.float32 | None:
    """A Python or NumPy number as float32, checked; None for anything else (an array)."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("temperature must be a number or a float array, got a bool")
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    with np.errstate(over="ignore"):
        rounded = np.float32(number)
    if not (rounded > 0 and np.isfinite(rounded)):
        raise ValueError(
            f"temperature must be positive and finite in float32, got {value!r} "
            f"(greedy rows have a support of one id and any temperature)"
        )
    return rounded


def check_host_targets(targets: np.ndarray) -> np.ndarray:
    """NumPy targets as int32; an array library would wrap a wider one silently."""
    if targets.dtype.kind not in "iu":
        raise TypeError(f"targets must be integers, got {targets.dtype}")
    if targets.dtype.itemsize > 4 or targets.dtype == np.uint32:
        wrong = (targets > np.iinfo(np.int32).max) | (targets < np.iinfo(np.int32).min)
        if wrong.any():
            where = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise ValueError(f"targets{list(where)} is {targets[where]}, outside int32")
    return targets.astype(np.int32)


def check_no_overlap(begins: np.ndarray, ends: np.ndarray) -> None:
    """Refuses rows that share slots: a slot can hold one row's member log-prob only."""
    begins = begins.reshape(-1, begins.shape[-1]).astype(np.int64)
    ends = ends.reshape(begins.shape).astype(np.int64)
    for piece, (b, e) in enumerate(zip(begins, ends, strict=True)):
        rows = np.flatnonzero(e > b)
        rows = rows[np.argsort(b[rows], kind="stable")]
        clash = np.flatnonzero(b[rows[1:]] < e[rows[:-1]])
        if clash.size:
            first, second = sorted((int(rows[clash[0]]), int(rows[clash[0] + 1])))
            raise ValueError(
                f"support rows {first} and {second} of piece {piece} share slots, and a slot holds one member "
                f"log-prob: give each row slots of its own (a padded support always has them)"
            )
