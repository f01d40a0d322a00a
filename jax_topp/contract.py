"""Statuses, options, limits, and the checks of a call: what both front ends and the kernels agree on."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, SupportsFloat

import numpy as np

MAX_VOCAB_SIZE = 1 << 18  # the fixed-point sums cannot overflow below this many members
LOGIT_DTYPES = ("float32", "bfloat16", "float16")  # in the order of the kernels' DType

# Bits of the kernels' options; csrc/contract.h has the same values.
INCLUDE_MISSING = 1
FULL_VOCAB = 2
NO_TARGET = 4
PADDED = 8

# Halfway to the smallest denormal and to 2^128: ties go to the even neighbour, so both ends round away.
_ROUNDS_TO_0 = 2.0**-150
_ROUNDS_TO_INF = 2.0**128 - 2.0**103

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


def kind_of(value: Any) -> str:
    """What to call a wrong argument in a message: "torch.Tensor", "list"."""
    kind = type(value)
    root = kind.__module__.split(".")[0]
    if root in ("jax", "jaxlib"):
        return "a JAX array"
    return f"{root}.{kind.__name__}" if root in ("torch", "numpy") else kind.__name__


def not_a_support(value: Any) -> str:
    """The message for anything but a Support."""
    return (
        f"support must be a jax_topp.Support, got {kind_of(value)} "
        f"(Support.from_lists, from_csr and from_padded make one)"
    )


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


def check_targets_given(targets: Any) -> None:
    """Refuses None, which stands for no target inside the front ends."""
    if targets is None:
        raise TypeError("targets must be an integer array, got NoneType")


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
            f"temperature must be a number, or have the rank of the rows with dimensions equal or 1: "
            f"temperature is {shape}, the rows are {rows}"
        )


def check_temperature_number(value: SupportsFloat) -> float:
    """A Python or NumPy number, refused where float32 would round it to 0 or infinity, and for NaN."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not _ROUNDS_TO_0 < number < _ROUNDS_TO_INF:
        raise ValueError(
            f"temperature must be positive and finite in float32, got {value!r} "
            f"(greedy rows have a support of one id and any temperature)"
        )
    return number


def check_no_overlap(begins: np.ndarray, ends: np.ndarray, capacity: int) -> None:
    """Refuses rows that share slots: a slot can hold one row's member log-prob only.

    Rows with a bad extent own nothing, so they share nothing.
    """
    if begins.size < 2:
        return
    begins = begins.reshape(-1, begins.shape[-1]).astype(np.int64)
    ends = ends.reshape(begins.shape).astype(np.int64)
    one_behind_the_other = begins[:, 1:] >= np.maximum(ends, begins)[:, :-1]
    if one_behind_the_other.all():  # as readers lay them
        return
    for piece, (b, e) in enumerate(zip(begins, ends, strict=True)):
        rows = np.flatnonzero((b >= 0) & (e > b) & (e <= capacity))
        rows = rows[np.argsort(b[rows], kind="stable")]
        clash = np.flatnonzero(b[rows[1:]] < e[rows[:-1]])
        if clash.size:
            first, second = sorted((int(rows[clash[0]]), int(rows[clash[0] + 1])))
            raise ValueError(
                f"support rows {first} and {second} of piece {piece} share slots, and a slot holds "
                f"one member log-prob: give each row slots of its own (a padded support always has them)"
            )
