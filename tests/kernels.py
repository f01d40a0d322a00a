"""Calls the CPU kernels over raw addresses, with memory around every output that must not change."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from jax_topp import _core
from jax_topp.contract import NO_TARGET, option_bits
from jax_topp.reference import Cotangents

from cases import DTYPES, Case

_CANARY = 0xC5
_MARGIN = 256  # bytes on either side


class Forward(NamedTuple):
    """Row values with the rows' shape; the last three are what the backward reads."""

    log_prob: np.ndarray
    logsumexp: np.ndarray
    support_entropy: np.ndarray
    target_logit: np.ndarray
    status: np.ndarray
    max: np.ndarray
    sum: np.ndarray
    weighted_sum: np.ndarray


_FORWARD_DTYPES = [np.float32] * 4 + [np.int32, np.float32, np.int64, np.int64]


class Guarded:
    """An output array amid canary bytes, filled with them too; `check` says whether those outside still stand.

    `padding` appends that many elements to each row and `column_stride` spreads the columns: the memory between the
    elements is guarded as well.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, padding: int = 0, column_stride: int = 1
    ):
        dtype = np.dtype(dtype)
        wide = (*shape[:-1], shape[-1] * column_stride + padding) if shape else shape
        size = math.prod(wide) * dtype.itemsize
        self.memory = np.full(size + 2 * _MARGIN, _CANARY, np.uint8)
        whole = self.memory[_MARGIN : _MARGIN + size].view(dtype).reshape(wide)
        self.array = whole[..., : shape[-1] * column_stride : column_stride] if shape else whole

    def check(self) -> np.ndarray:
        """A copy of the array, after looking at everything around it."""
        result = self.array.copy()
        self.array[...] = np.frombuffer(bytes([_CANARY] * result.itemsize), result.dtype)[0]
        wrong = np.flatnonzero(self.memory != _CANARY)
        self.array[...] = result
        assert not wrong.size, f"byte {wrong[0] - _MARGIN} of an output's memory was overwritten"
        return result


class Call:
    """One case's operands as the kernels read them. `targets=False`: as member_log_probs calls them."""

    def __init__(
        self,
        case: Case,
        *,
        missing: str = "neg_inf",
        empty: str = "neg_inf",
        targets: bool = True,
        kernels: str = "",
    ) -> None:
        self.case, self.kernels, self.rows = case, kernels, case.rows
        self.options = option_bits(missing, empty) | (0 if targets else NO_TARGET)
        self.logits = case.logits  # strides as they are
        self.dtype = [*DTYPES].index(str(case.logits.dtype))
        ids = case.targets if targets else np.zeros(self.rows)
        mask = True if case.loss_mask is None else case.loss_mask
        self.targets = np.where(mask, ids, -1).astype(np.int32)
        scale = np.asarray(case.temperature).astype(np.float32)
        scale = scale if scale.ndim == 0 else np.broadcast_to(scale, self.rows)
        self.temperature = np.array(
            scale, order="C"
        )  # ascontiguousarray would give a scalar an axis
        self.extents = [
            None if x is None else np.ascontiguousarray(x)
            for x in (case.support.begins, case.support.ends)
        ]
        self.token_ids = np.ascontiguousarray(case.support.token_ids)

    def problem(self, logits: np.ndarray | None = None) -> _core.Problem:
        logits = self.logits if logits is None else logits
        padded = self.extents[0] is None
        return _core.problem(
            self.dtype,
            _address(logits),
            logits.shape,
            _strides(logits),
            _address(self.token_ids),
            *(_address(x) for x in self.extents),
            self.token_ids.shape[-1],
            1 if padded else self.rows[-1],
            math.prod(self.token_ids.shape[:-1]),
            _address(self.targets),
            _address(self.temperature),
            int(self.temperature.ndim > 0),
            self.case.size,
            self.options,
        )

    def forward(self) -> Forward:
        out = [Guarded(self.rows, dtype) for dtype in _FORWARD_DTYPES]
        _core.forward(self.problem(), [_address(o.array) for o in out], kernels=self.kernels)
        return Forward(*(o.check() for o in out))

    def members(self, saved: Forward) -> np.ndarray:
        out = Guarded(self.token_ids.shape, np.float32)
        addresses = [_address(x) for x in saved[4:]]
        _core.members(self.problem(), addresses, _address(out.array), kernels=self.kernels)
        return out.check()

    def backward(
        self,
        saved: Forward,
        cotangents: Cotangents,
        *,
        in_place: bool = False,
        padding: int = 0,
        column_stride: int = 1,
    ) -> np.ndarray:
        """The gradient; `in_place` writes it over a copy of the logits with the same strides."""
        given = [None if c is None else np.ascontiguousarray(c, np.float32) for c in cotangents]
        out = Guarded(self.logits.shape, self.logits.dtype, padding, column_stride)
        if in_place:
            out.array[...] = self.logits
        _core.backward(
            self.problem(out.array if in_place else None),
            [_address(x) for x in saved[4:]],
            [_address(c) for c in given],
            _address(out.array),
            _strides(out.array),
            kernels=self.kernels,
        )
        return out.check()


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else x.ctypes.data


def _strides(x: np.ndarray) -> list[int]:
    return [s // x.dtype.itemsize for s in x.strides]
