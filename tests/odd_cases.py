"""Rows of every odd kind: what a batch of random rows can be spoilt with."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from cases import Case, lay_out, random_case, row_ids

_FAULTS = (
    "bad id",
    "padding",
    "repeats",
    "unsorted",
    "empty",
    "all padding",
    "all -inf",
    "target -inf",
    "nan",
    "+inf",
    "-inf",
    "nan outside",
    "overflow",
    "temperature",
    "negative target",
    "missing",
    "late target",
    "masked",
    "bad extent",
)


def odd_case(
    rng: np.random.Generator,
    *,
    rows: tuple[int, ...],
    vocab_size: int,
    dtype: str = "float32",
    layout: str = "ragged",
    max_members: int | None = None,
) -> Case:
    """Every odd kind of row in one batch: two in three have one to three faults, so that precedence matters too."""
    case = random_case(
        rng,
        rows=rows,
        vocab_size=vocab_size,
        dtype=dtype,
        layout=layout,
        max_members=max_members,
        ignored=0.05,
    )
    draft = _Draft(case, rng)
    for n in range(math.prod(rows)):
        if rng.random() < 2 / 3:
            for fault in rng.choice(_FAULTS, size=rng.integers(1, 4), replace=False):
                draft.spoil(n, str(fault))
    return draft.case(rows, layout)


class _Draft:
    """A case taken apart into rows, to be spoilt one by one."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        count = math.prod(case.rows)
        self.rng, self.vocab_size, self.original = rng, case.size, case
        self.logits = case.logits.reshape(count, -1).copy()
        self.targets = case.targets.reshape(count).copy()
        # float64: 1e-50 becomes 0 only where it is rounded to float32
        self.temperature = np.broadcast_to(case.temperature, case.rows).reshape(count)
        self.temperature = self.temperature.astype(np.float64)
        self.mask = np.asarray(case.loss_mask).reshape(count).copy()
        self.members = [ids.copy() for ids in row_ids(case)]
        self.bad_extents: set[int] = set()

    def spoil(self, n: int, fault: str) -> None:
        rng, size, ids = self.rng, self.vocab_size, self.members[n]
        one = rng.integers(len(ids), size=1) if len(ids) else np.zeros(0, np.int64)
        inside = ids[(ids >= 0) & (ids < size)]
        member = rng.choice(inside, size=1) if len(inside) else np.zeros(0, np.int64)
        if fault == "bad id":
            ids[one] = rng.choice([-3, -2, size, size + 1, size + 3, 2**31 - 1, -(2**31)])
        elif fault == "padding":
            self.members[n] = np.insert(ids, rng.integers(len(ids) + 1), -1)
        elif fault == "repeats":
            again = rng.choice(ids, size=rng.integers(1, 4)) if len(ids) else ids
            self.members[n] = np.insert(ids, rng.integers(len(ids) + 1), again)
        elif fault == "unsorted":
            rng.shuffle(ids)
        elif fault == "empty":
            self.members[n] = ids[:0]
        elif fault == "all padding":
            ids[:] = -1
        elif fault == "all -inf":
            self.logits[n, inside] = -np.inf
        elif fault == "target -inf" and 0 <= self.targets[n] < size:
            self.logits[n, self.targets[n]] = -np.inf
        elif fault in ("nan", "+inf", "-inf"):
            self.logits[n, member] = float(fault)
        elif fault == "nan outside":
            outside = np.setdiff1d(np.arange(size), np.append(ids, self.targets[n]))
            self.logits[n, outside[:3]] = np.nan
        elif fault == "overflow":  # finite in float32 and bfloat16, but not after the division
            self.logits[n, member] = min(3e38, float(ml_dtypes.finfo(self.logits.dtype).max))
            self.temperature[n] = 0.1
        elif fault == "temperature":
            self.temperature[n] = rng.choice([0.0, -1.0, np.nan, np.inf, 1e-50])
        elif fault == "negative target":
            self.targets[n] = rng.choice([-1, -3, -100])
        elif fault == "missing":
            self.targets[n] = rng.integers(size)
        elif fault == "late target":
            self.targets[n] = rng.choice([size, size + 3, 2**31 - 1])
        elif fault == "masked":
            self.mask[n] = False
        elif fault == "bad extent":
            self.bad_extents.add(n)

    def case(self, rows: tuple[int, ...], layout: str) -> Case:
        support = lay_out(self.rng, self.members, rows, layout)
        if layout != "padded":
            begins, ends = support.begins.reshape(-1), support.ends.reshape(-1)  # views
            for n in self.bad_extents:
                begins[n], ends[n] = self._bad_extent(
                    int(begins[n]), int(ends[n]), support.token_ids.shape[-1]
                )
        return self.original.with_(
            logits=self.logits.reshape(*rows, self.logits.shape[-1]),
            targets=self.targets.reshape(rows),
            support=support,
            temperature=self.temperature.reshape(rows),
            loss_mask=self.mask.reshape(rows),
        )

    def _bad_extent(self, begin: int, end: int, capacity: int) -> tuple[int, int]:
        kinds = [
            (-1, end),
            (-(2**31), end),
            (end + 1, begin),  # reversed
            (begin, capacity + 1),
            (begin, 2**31 - 1),
            (capacity + 1, capacity + 2),
            (begin, -1),
        ]
        return kinds[self.rng.integers(len(kinds))]
