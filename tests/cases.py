"""The one generator of inputs for all tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jax_topp.reference import Cotangents
from jax_topp.support import Support

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True)
class Case:
    """The operands of one call, as NumPy arrays.

    Attributes:
      logits: [*rows, columns] in one of DTYPES.
      targets: [*rows] int32 or int64.
      support: the recorded ids of each row.
      temperature: a float, or a float array with the rank of ``targets`` and dimensions equal or 1.
      loss_mask: [*rows] bool, or None.
      vocab_size: an int up to ``columns``, or None for all columns.
    """

    logits: np.ndarray
    targets: np.ndarray
    support: Support
    temperature: Any
    loss_mask: np.ndarray | None = None
    vocab_size: int | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        return self.targets.shape

    @property
    def size(self) -> int:
        """The number of ids that exist."""
        return self.logits.shape[-1] if self.vocab_size is None else self.vocab_size

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a call but its policies."""
        return {
            "temperature": self.temperature,
            "loss_mask": self.loss_mask,
            "vocab_size": self.vocab_size,
        }

    @property
    def operands(self) -> tuple[np.ndarray, np.ndarray, Support]:
        return self.logits, self.targets, self.support

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)


# Rows with a score
# ----------------------------------------------------------------------------------------------------------------------


def random_case(
    rng: np.random.Generator,
    *,
    rows: tuple[int, ...],
    vocab_size: int,
    dtype: str = "float32",
    layout: str = "ragged",
    max_members: int | None = None,
    temperature: Any = None,
    ignored: float = 0.1,
    narrow_vocabulary: bool | None = None,
) -> Case:
    """Rows that can all be scored: log-uniform sizes with K = 1 and the largest, ties, -inf logits, gaps.

    Targets are drawn from the softmax over the support. `temperature` None is a scalar, or an array with some
    dimensions 1, of 0.1 to 2. `ignored` is the share of rows with loss_mask False (0: no mask). With
    `narrow_vocabulary` the logits have columns past vocab_size, NaN in them; None leaves that to chance.
    """
    count = math.prod(rows)
    if temperature is None:
        temperature = random_temperature(rng, rows)
    extra = 0
    if narrow_vocabulary or (narrow_vocabulary is None and rng.random() < 0.3):
        extra = int(rng.integers(1, 9))
    members = [
        random_members(rng, vocab_size, size)
        for size in random_sizes(rng, count, min(max_members or vocab_size, vocab_size))
    ]
    logits = random_logits(rng, count, vocab_size, dtype)
    scale = np.broadcast_to(np.asarray(temperature, np.float32), rows).reshape(count)
    targets = np.zeros(count, rng.choice([np.int32, np.int64]))
    for n, ids in enumerate(members):
        if rng.random() < 0.2:  # never all of them
            logits[n, rng.choice(ids, size=len(ids) // 2, replace=False)] = -np.inf
        targets[n] = draw_target(rng, logits[n], ids, scale[n])
    if extra:
        past = np.full((count, extra), np.nan, logits.dtype)
        logits = np.concatenate([logits, past], axis=1)
    return Case(
        logits=logits.reshape(*rows, vocab_size + extra),
        targets=targets.reshape(rows),
        support=lay_out(rng, members, rows, layout),
        temperature=temperature,
        loss_mask=rng.random(rows) >= ignored if ignored else None,
        vocab_size=vocab_size if extra else None,
    )


def random_temperature(rng: np.random.Generator, rows: tuple[int, ...]) -> Any:
    """0.1 to 2: a float, or an array in which some dimensions of `rows` are 1."""
    if rng.random() < 0.3:
        return float(rng.uniform(0.1, 2.0))
    shape = tuple(1 if rng.random() < 0.3 else r for r in rows)
    return rng.uniform(0.1, 2.0, shape).astype(np.float32)


def random_sizes(rng: np.random.Generator, count: int, largest: int) -> np.ndarray:
    """Log-uniform in [1, largest], and both ends of it among the first two rows."""
    sizes = np.exp(rng.uniform(0, np.log(largest + 1), count)).astype(np.int64)
    sizes[:1] = largest
    sizes[1:2] = 1
    return np.clip(sizes, 1, largest)


def random_members(rng: np.random.Generator, vocab_size: int, size: int) -> np.ndarray:
    """Distinct ids in ascending order, or now and then in any."""
    ids = rng.choice(vocab_size, size=size, replace=False, shuffle=True)
    return ids if rng.random() < 0.2 else np.sort(ids)


def random_logits(rng: np.random.Generator, count: int, columns: int, dtype: str) -> np.ndarray:
    """Normal, three to a row's unit, around another centre in each row; a quarter of the rows is full of ties."""
    logits = rng.standard_normal((count, columns), np.float32)
    logits *= 3
    logits += rng.normal(0, 10, (count, 1)).astype(np.float32)
    tied = rng.random(count) < 0.25
    logits[tied] = np.rint(logits[tied])
    return logits.astype(DTYPES[dtype])


def draw_target(
    rng: np.random.Generator, logits: np.ndarray, ids: np.ndarray, temperature: Any
) -> int:
    """One id of the support, from the softmax over it."""
    x = logits[ids].astype(np.float64) / float(temperature)
    return int(ids[np.argmax(x + rng.gumbel(size=len(ids)))])


def lay_out(
    rng: np.random.Generator, members: list[np.ndarray], rows: tuple[int, ...], layout: str
) -> Support:
    """A Support of these slots in row-major order of `rows`; rubbish stands where no row reads."""
    if layout == "padded":
        return _padded(rng, members, rows)
    per_piece = rows[-1]
    pieces = [members[p * per_piece :][:per_piece] for p in range(math.prod(rows[:-1]))]
    gaps = [rng.integers(0, 4, per_piece + 1) * (rng.random(per_piece + 1) < 0.3) for _ in pieces]
    used = [sum(map(len, piece)) + int(gap.sum()) for piece, gap in zip(pieces, gaps, strict=True)]
    capacity = max(used, default=0) + int(rng.integers(0, 5))
    token_ids = rng.choice([-(2**31), -7, 0, 2**31 - 1], (len(pieces), capacity)).astype(np.int32)
    begins = np.zeros((len(pieces), per_piece), np.int32)
    ends = np.zeros_like(begins)
    for p, (piece, gap) in enumerate(zip(pieces, gaps, strict=True)):
        at = 0
        for r, ids in enumerate(piece):
            at += int(gap[r])
            token_ids[p, at : at + len(ids)] = ids
            begins[p, r], ends[p, r] = at, at + len(ids)
            at += len(ids)
    batch = rows[:-1]
    return Support(token_ids.reshape(*batch, capacity), begins.reshape(rows), ends.reshape(rows))


def _padded(rng: np.random.Generator, members: list[np.ndarray], rows: tuple[int, ...]) -> Support:
    """-1 behind the members, or now and then before and between them."""
    width = max(map(len, members), default=0) + int(rng.integers(0, 4))
    token_ids = np.full((len(members), width), -1, np.int32)
    for n, ids in enumerate(members):
        at = np.arange(len(ids))
        if rng.random() < 0.3:
            at = np.sort(rng.choice(width, size=len(ids), replace=False))
        token_ids[n, at] = ids
    return Support(token_ids.reshape(*rows, width))


# What is known of a case's rows
# ----------------------------------------------------------------------------------------------------------------------


def row_ids(case: Case) -> list[np.ndarray]:
    """The slots of each row in row-major order, its extent clamped to its piece."""
    ids = np.asarray(case.support.token_ids)
    if case.support.begins is None:
        return list(ids.reshape(math.prod(case.rows), ids.shape[-1]))
    capacity = ids.shape[-1]
    pieces = math.prod(case.rows[:-1])
    begins = np.asarray(case.support.begins).reshape(pieces, case.rows[-1])
    ends = np.asarray(case.support.ends).reshape(begins.shape)
    flat = ids.reshape(pieces, capacity)
    return [
        flat[p, max(int(b), 0) : max(min(int(e), capacity), 0)]
        for p in range(len(begins))
        for b, e in zip(begins[p], ends[p], strict=True)
    ]


def membership(case: Case, *, missing: str = "neg_inf", empty: str = "neg_inf") -> np.ndarray:
    """bool [*rows, columns]: where a gradient may be anything but +0."""
    mask = np.zeros((math.prod(case.rows), case.logits.shape[-1]), bool)
    for n, (ids, target) in enumerate(zip(row_ids(case), case.targets.flat, strict=True)):
        if empty == "full_vocab" and not (ids >= 0).any():
            mask[n, : case.size] = True
        if missing == "include" and 0 <= target < case.size:
            mask[n, target] = True
        mask[n, ids[(ids >= 0) & (ids < case.size)]] = True
    return mask.reshape(case.logits.shape)


def member_bounds(case: Case, *, empty: str = "neg_inf") -> np.ndarray:
    """At least as many members as each row can have: its slots and an included target, or the vocabulary."""
    sizes = [
        case.size if empty == "full_vocab" and not (ids >= 0).any() else len(ids) + 1
        for ids in row_ids(case)
    ]
    return np.reshape(np.array(sizes, np.int64), case.rows)


def slot_rows(case: Case) -> np.ndarray:
    """For each slot the first row with a sound extent around it, -1 for none; shaped as the token ids."""
    ids = np.asarray(case.support.token_ids)
    count = math.prod(case.rows)
    if case.support.begins is None:
        return np.broadcast_to(np.arange(count).reshape(*case.rows, 1), ids.shape)
    owners = np.full((math.prod(case.rows[:-1]), ids.shape[-1]), -1)
    begins, ends = (np.ravel(x).tolist() for x in (case.support.begins, case.support.ends))
    for n in reversed(range(count)):
        b, e = begins[n], ends[n]
        if 0 <= b <= e <= ids.shape[-1]:
            owners[n // case.rows[-1], b:e] = n
    return owners.reshape(ids.shape)


def random_cotangents(rng: np.random.Generator, case: Case) -> Cotangents:
    """All five, float32. A quarter of the rows has none at all, and a quarter only one kind."""
    count = math.prod(case.rows)
    kept = np.ones((5, count), bool)
    choice = rng.random(count)
    kept[:, choice < 0.25] = False
    only = np.flatnonzero((choice >= 0.25) & (choice < 0.5))
    kept[:, only] = False
    kept[rng.integers(5, size=len(only)), only] = True
    values = rng.standard_normal((4, count)).astype(np.float32) * kept[:4]
    slots = np.shape(case.support.token_ids)
    owners = slot_rows(case)
    members = rng.standard_normal(slots).astype(np.float32)  # also where it must not count
    members[(owners >= 0) & ~np.append(kept[4], True)[owners]] = 0  # -1, no row, finds the True
    return Cotangents(*(v.reshape(case.rows) for v in values), members)
