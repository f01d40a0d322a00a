"""Comparisons of results: bit for bit, or within a bound that is derived."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jax_topp.reference import Cotangents, ReferenceReplay

from cases import DTYPES, Case, slot_rows


def to_numpy(x: Any) -> np.ndarray:
    """NumPy, JAX or torch array as NumPy, with the same bits."""
    if type(x).__module__.split(".")[0] != "torch":
        return np.asarray(x)
    import torch

    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:  # a dtype that NumPy itself lacks
        return x.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return x.numpy()


def bits(x: Any) -> np.ndarray:
    """The elements as unsigned integers."""
    x = np.ascontiguousarray(to_numpy(x))
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def assert_bits_equal(actual: Any, expected: Any, what: str = "") -> None:
    """Same dtype, shape and bits, those of NaNs too; names the first element that differs."""
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    _report(bits(actual) != bits(expected), actual, expected, what, None)


def assert_within(actual: Any, expected: Any, bound: Any, what: str = "") -> None:
    """|actual - expected| <= bound at every element; NaN matches NaN only, an infinity only itself.

    An `expected` that the dtype of `actual` rounds to an infinity is one.
    """
    actual, expected = to_numpy(actual), to_numpy(expected).astype(np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    with np.errstate(over="ignore", under="ignore"):
        rounded = expected.astype(actual.dtype)
    expected = np.where(np.isinf(rounded), rounded.astype(np.float64), expected)
    actual = actual.astype(np.float64)
    bound = np.broadcast_to(np.asarray(bound, np.float64), actual.shape)
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - expected) <= bound
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    finite = np.isfinite(actual) & np.isfinite(expected)
    _report(~np.where(finite, near, same), actual, expected, what, bound)


def _report(
    wrong: np.ndarray, actual: np.ndarray, expected: np.ndarray, what: str, bound: Any
) -> None:
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    allowed = (
        ""
        if bound is None
        else f" (off by {abs(actual[at] - expected[at]):.3g}, bound {bound[at]:.3g})"
    )
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.size} elements differ, first {list(at)}: "
        f"{actual[at]!r}, not {expected[at]!r}{allowed}"
    )


# (digits of the significand, exponent of the smallest normal number)
_FORMATS = {
    "float64": (53, -1022),
    "float32": (24, -126),
    "bfloat16": (8, -126),
    "float16": (11, -14),
}


def ulp(x: Any, dtype: Any) -> np.ndarray:
    """The spacing of `dtype` at |x|, that of its denormals at the least; float64. 0 where x is not finite."""
    digits, smallest = _FORMATS[str(np.dtype(DTYPES.get(dtype, dtype)))]
    x = np.asarray(x, np.float64)
    finite = np.isfinite(x)
    _, exponent = np.frexp(np.where(finite, x, 0.0))  # |x| in [2^(e - 1), 2^e)
    exponent = np.where(x == 0, smallest, np.maximum(exponent - 1, smallest))
    return np.where(finite, np.ldexp(1.0, exponent - (digits - 1)), 0.0)


def value_bounds(reference: ReferenceReplay, members: Any) -> ReferenceReplay:
    """How far each float32 value may lie from the oracle's, for rows of `members` members; 0 for the status.

    Half a float32 ulp for the one rounding, and docs/numerics.md's bounds of what is rounded: K 2^-45 (log_prob,
    logsumexp), K 2^-44 (entropy). Each sum and difference of doubles may also round by half a double ulp of its
    result, and m by half of its own. x_y is one IEEE division.
    """
    k = np.asarray(members, np.float64)
    half = [ulp(v, "float32") / 2 + ulp(v, "float64") / 2 for v in reference[:3]]
    of_max = ulp(np.abs(reference.logsumexp) + np.log(2.0**18), "float64") / 2
    log_prob = half[0] + k * 2.0**-45
    logsumexp = half[1] + k * 2.0**-45 + of_max
    entropy = half[2] + k * 2.0**-44
    zero = np.zeros(k.shape)
    return ReferenceReplay(log_prob, logsumexp, entropy, zero, zero)


def gradient_bound(
    expected: np.ndarray, case: Case, cotangents: Cotangents, members: Any
) -> np.ndarray:
    """How far a gradient of the logits' dtype may lie from the oracle's `expected`, [*rows, columns].

    One ulp of the dtype: half for the rounding (its denormals' spacing at the least), the rest for the rounding to
    float32 before it and for a rounding into the next binade. And before any rounding: with d = K 2^-45 the error of
    the fixed-point sums, log p is off by d, H by d (2 + ln K), p by p d; so g p by |g| d, p (l - sum c) by
    (|l| + sum |c|) d, and h p (log p + H) by |h| d (1 + 2 + ln K + 1/e + ln K) < 2 d |h| (2 + ln K). Double rounding
    errors, 2^-53 of a term and K 2^-53 of sum |c|, fit into the other d.
    """
    k = np.asarray(members, np.float64)
    g, l, h, u = (np.abs(np.asarray(c, np.float64)) for c in cotangents[:4])  # noqa: E741
    c = np.zeros(math.prod(case.rows))
    owners = slot_rows(case).reshape(-1)
    slots = np.abs(np.asarray(cotangents.member_log_probs, np.float64)).reshape(-1)
    np.add.at(c, owners[owners >= 0], slots[owners >= 0])
    with np.errstate(over="ignore", under="ignore"):
        temperature = np.broadcast_to(np.asarray(case.temperature, np.float32), case.rows)
    terms = g + l + u + c.reshape(case.rows) + h * (2 + np.log(k))
    with np.errstate(all="ignore"):  # a row with a bad temperature has no finite gradient
        before_rounding = k * 2.0**-44 * terms / np.abs(temperature.astype(np.float64))
    before_rounding = np.where(np.isfinite(before_rounding), before_rounding, 0)
    return ulp(expected, case.logits.dtype) + before_rounding[..., None]
