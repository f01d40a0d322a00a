"""The oracle: what every backend must compute, in NumPy, row by row. Readable before fast.

The scaled logit ``x = float32(z) / float32(T)`` is an IEEE float32 division, by definition; everything after it is in
extended precision (float64 where the platform has no wider long double) and is rounded to float64 once. Arguments are
as for :func:`jax_topp.replay`, as NumPy arrays; of ``support`` only ``token_ids``, ``begins`` and ``ends`` are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .contract import FULL_VOCAB, INCLUDE_MISSING, Status, option_bits

_WIDE = np.longdouble


class ReferenceReplay(NamedTuple):
    """One value a row, with the shape of the rows: float64, and an int32 :class:`jax_topp.Status`."""

    log_prob: np.ndarray
    logsumexp: np.ndarray
    support_entropy: np.ndarray
    target_logit: np.ndarray
    status: np.ndarray


class Cotangents(NamedTuple):
    """Of each result: shaped as the rows, the last as ``support.token_ids``; None stands for zeros."""

    log_prob: Any = None
    logsumexp: Any = None
    support_entropy: Any = None
    target_logit: Any = None
    member_log_probs: Any = None


@dataclass(frozen=True)
class _Problem:
    """The operands with their rows flattened; row n lies in piece ``n // rows_per_piece``."""

    rows: tuple[int, ...]
    logits: np.ndarray  # [N, columns]
    targets: np.ndarray | None  # [N] int64; None: no target is asked for
    active: np.ndarray  # [N] bool
    temperature: np.ndarray  # [N] float32
    token_ids: np.ndarray  # [pieces, C] int64
    begins: np.ndarray | None  # [N] int64; None: padded
    ends: np.ndarray | None
    rows_per_piece: int
    vocab_size: int
    options: int


@dataclass(frozen=True)
class _Row:
    """What is known of one row; the values from ``members`` on mean something in a scored or missing row."""

    status: Status
    ids: np.ndarray  # of its slots, the extent clamped to the piece
    first: int  # of its first slot among all slots
    owns_slots: bool  # False: the extent is bad
    target: int  # -1: there is none
    full_vocab: bool  # empty, and scored over all ids
    members: np.ndarray = field(
        default_factory=lambda: np.zeros(0)
    )  # distinct ids, ascending, with an included target
    x: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of each member
    target_logit: Any = 0.0
    max: Any = 0.0
    log_sum: Any = 0.0  # L = log sum exp(x - max)
    entropy: Any = 0.0  # H = L + sum(exp(x - max) * (max - x)) / sum(exp(x - max))


def replay(
    logits: Any,
    targets: Any,
    support: Any,
    *,
    temperature: Any,
    loss_mask: Any = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
) -> ReferenceReplay:
    """``log_prob = (x_y - m) - L``, ``logsumexp = m + L``, ``support_entropy = L + U / S`` and ``target_logit = x_y``.

    Over the distinct members i of a row: ``m = max x_i``, ``S = sum exp(x_i - m)``, ``U = sum exp(x_i - m)(m - x_i)``,
    ``L = log S``. A row without a score has the values of its status.
    """
    options = option_bits(missing, empty)
    problem = _problem(logits, targets, support, temperature, loss_mask, vocab_size, options)
    count = len(problem.logits)
    values = np.zeros((4, count))
    status = np.zeros(count, np.int32)
    for n in range(count):
        row = _row(problem, n)
        status[n] = row.status
        values[:, n] = _row_values(row)
    return ReferenceReplay._make(x.reshape(problem.rows) for x in (*values, status))


def member_log_probs(
    logits: Any,
    support: Any,
    *,
    temperature: Any,
    targets: Any = None,
    loss_mask: Any = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
) -> np.ndarray:
    """``(x_i - m) - L`` at every slot of every row, float64, shaped as ``support.token_ids``.

    -inf at padding, at slots that no row owns and in rows that are ignored or empty; NaN in rows with a bad input. Of
    two rows that share a slot the first owns it. ``targets`` and ``missing`` matter where replay gives the members too.
    """
    options = option_bits(missing, empty)
    problem = _problem(logits, targets, support, temperature, loss_mask, vocab_size, options)
    owners = _slot_owners(problem)
    out = np.full(problem.token_ids.size, -np.inf)
    for n in range(len(problem.logits)):
        row = _row(problem, n)
        if row.status in (Status.IGNORED, Status.EMPTY):
            continue
        at = row.first + np.flatnonzero(_carries_member(row, owners, n))
        if row.status in (Status.SCORED, Status.MISSING):
            x = row.x[np.searchsorted(row.members, row.ids[at - row.first])]
            out[at] = (x - row.max) - row.log_sum
        else:
            out[at] = np.nan
    return out.reshape(np.shape(support.token_ids))


def gradient(
    logits: Any,
    targets: Any,
    support: Any,
    *,
    temperature: Any,
    cotangents: Cotangents,
    loss_mask: Any = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
) -> np.ndarray:
    """``dz_i = dx_i / T`` of every column, float64 [..., V]; exactly +0 outside the support.

    With the cotangents g of log_prob, l of logsumexp, h of support_entropy, u of target_logit and c_i of the members:
    ``dx_i = g([i = y] - p_i) + p_i(l - sum(c) - h(log p_i + H)) + c_i + u[i = y]``, ``p_i = exp(x_i - m - L)``. A
    repeated id has the sum of its slots' c. g and u count as 0 where the target is missing.
    """
    options = option_bits(missing, empty)
    problem = _problem(logits, targets, support, temperature, loss_mask, vocab_size, options)
    owners = _slot_owners(problem)
    count = len(problem.logits)
    by_row = np.stack([_flat(c, count) for c in cotangents[:4]], axis=1)
    by_slot = _flat(cotangents.member_log_probs, problem.token_ids.size)
    out = np.zeros(problem.logits.shape)
    for n in range(count):
        row = _row(problem, n)
        own = _carries_member(row, owners, n)
        c = np.where(own, by_slot[row.first : row.first + len(row.ids)], 0.0)
        if row.status in (Status.SCORED, Status.MISSING):
            dx = _row_dx(row, by_row[n], c)
            out[n, row.members] = dx / _WIDE(problem.temperature[n])
        elif row.status not in (Status.IGNORED, Status.EMPTY) and (by_row[n].any() or c.any()):
            out[n, _bad_row_members(problem, row)] = np.nan
    return out.reshape(*problem.rows, problem.logits.shape[1])


def _problem(
    logits: Any,
    targets: Any,
    support: Any,
    temperature: Any,
    loss_mask: Any,
    vocab_size: int | None,
    options: int,
) -> _Problem:
    logits = np.asarray(logits)
    rows, columns = logits.shape[:-1], logits.shape[-1]
    count = int(np.prod(rows, dtype=np.int64))
    ids = np.asarray(support.token_ids).astype(np.int64)
    padded = support.begins is None
    pieces = count if padded else int(np.prod(ids.shape[:-1], dtype=np.int64))
    active = (
        np.ones(count, bool) if loss_mask is None else np.asarray(loss_mask).reshape(count) != 0
    )
    if targets is not None:
        targets = _as_int64(np.asarray(targets)).reshape(count)
        active = active & (targets >= 0)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(temperature).astype(np.float32)
    return _Problem(
        rows=rows,
        logits=logits.reshape(count, columns),
        targets=targets,
        active=active,
        temperature=np.broadcast_to(scale, rows).reshape(count),
        token_ids=ids.reshape(pieces, ids.shape[-1]),
        begins=None if padded else np.asarray(support.begins).astype(np.int64).reshape(count),
        ends=None if padded else np.asarray(support.ends).astype(np.int64).reshape(count),
        rows_per_piece=1 if padded else int(np.shape(support.begins)[-1]),
        vocab_size=columns if vocab_size is None else vocab_size,
        options=options,
    )


def _as_int64(targets: np.ndarray) -> np.ndarray:
    """Saturates uint64, which would wrap to a negative target."""
    if targets.dtype == np.uint64:
        targets = np.minimum(targets, np.uint64(np.iinfo(np.int64).max))
    return targets.astype(np.int64)


def _slots(problem: _Problem, n: int) -> tuple[np.ndarray, int, bool]:
    """The ids of row n's slots, the number of its first slot, and whether its extent is sound."""
    piece = n // problem.rows_per_piece
    ids = problem.token_ids[piece]
    begin, end = 0, len(ids)
    if problem.begins is not None and problem.ends is not None:
        begin, end = int(problem.begins[n]), int(problem.ends[n])
    sound = 0 <= begin <= end <= len(ids)
    begin, end = max(begin, 0), min(end, len(ids))
    if begin > end:
        begin = end = 0
    return ids[begin:end], piece * len(ids) + begin, sound


def _row(problem: _Problem, n: int) -> _Row:
    """Decides the status in its order of precedence: 1, then 6, 4, 5, then 2, 7, 3."""
    ids, first, sound = _slots(problem, n)
    target = -1 if problem.targets is None else int(problem.targets[n])
    full_vocab = bool(problem.options & FULL_VOCAB) and not (ids >= 0).any()

    def row(status: Status, **values: Any) -> _Row:
        return _Row(status, ids, first, sound, target, full_vocab, **values)

    temperature = problem.temperature[n]
    if not problem.active[n]:
        return row(Status.IGNORED)
    if not (temperature > 0 and np.isfinite(temperature)):
        return row(Status.BAD_TEMPERATURE)
    if not sound or (ids < -1).any() or (ids >= problem.vocab_size).any():
        return row(Status.BAD_SUPPORT)
    if target >= problem.vocab_size:
        return row(Status.BAD_TARGET)
    members = np.arange(problem.vocab_size) if full_vocab else np.unique(ids[ids >= 0])
    if problem.options & INCLUDE_MISSING and target >= 0:
        members = np.union1d(members, target)
    with np.errstate(over="ignore", under="ignore"):
        x = problem.logits[n, members].astype(np.float32) / temperature
    if (x == -np.inf).all():  # also where there is no member
        return row(Status.EMPTY)
    if np.isnan(x).any() or (x == np.inf).any():
        return row(Status.NOT_FINITE)
    target_logit = np.float32(0)
    status = Status.SCORED
    if problem.targets is not None:
        at = np.flatnonzero(members == target)
        target_logit = x[at[0]] if at.size else np.float32(-np.inf)
        status = Status.MISSING if target_logit == -np.inf else Status.SCORED
    wide = x.astype(_WIDE)
    largest, log_sum, entropy = _normaliser(wide)
    return row(
        status,
        members=members,
        x=wide,
        target_logit=_WIDE(target_logit),
        max=largest,
        log_sum=log_sum,
        entropy=entropy,
    )


def _normaliser(x: np.ndarray) -> tuple[Any, Any, Any]:
    """``m``, ``L`` and ``H`` of one row; a member whose exponential is 0 adds 0, never 0 * inf."""
    largest = x.max()
    y = x - largest
    t = np.exp(y)
    total = t.sum()
    log_sum = np.log(total)
    weighted = np.sum(np.where(t > 0, t * -np.where(t > 0, y, 0), 0))
    return largest, log_sum, log_sum + weighted / total


def _row_values(row: _Row) -> tuple[Any, Any, Any, Any]:
    """log_prob, logsumexp, support_entropy, target_logit."""
    if row.status == Status.IGNORED:
        return 0.0, 0.0, 0.0, 0.0
    if row.status == Status.EMPTY:
        return -np.inf, -np.inf, 0.0, 0.0
    if row.status not in (Status.SCORED, Status.MISSING):
        return np.nan, np.nan, np.nan, np.nan
    log_prob = (row.target_logit - row.max) - row.log_sum
    return log_prob, row.max + row.log_sum, row.entropy, row.target_logit


def _row_dx(row: _Row, cotangents: np.ndarray, c: np.ndarray) -> np.ndarray:
    """d loss / d x of each of ``row.members``; c is by slot, 0 where the slot carries no member."""
    g, l, h, u = (_WIDE(v) for v in cotangents)  # noqa: E741
    if row.status == Status.MISSING:
        g = u = _WIDE(0)
    is_target = row.members == row.target
    c_of_id = np.zeros(len(row.members), _WIDE)
    valid = row.ids >= 0
    np.add.at(c_of_id, np.searchsorted(row.members, row.ids[valid]), c[valid].astype(_WIDE))
    q = (row.x - row.max) - row.log_sum
    p = np.exp(q)
    q = np.where(p > 0, q, 0)  # only the terms with p vanish; q may be -inf and must not meet one
    b = l - c_of_id.sum()
    return g * (is_target - p) + p * (b - h * (q + row.entropy)) + c_of_id + u * is_target


def _bad_row_members(problem: _Problem, row: _Row) -> np.ndarray:
    """The ids at which a row that could not be scored has a NaN gradient."""
    if row.full_vocab and row.status != Status.BAD_SUPPORT:
        return np.arange(problem.vocab_size)
    ids = row.ids
    if problem.options & INCLUDE_MISSING:
        ids = np.append(ids, row.target)
    return ids[(ids >= 0) & (ids < problem.vocab_size)]


def _slot_owners(problem: _Problem) -> np.ndarray:
    """The first row with a sound extent around each slot, -1 where there is none."""
    owners = np.full(problem.token_ids.size, -1, np.int64)
    for n in reversed(range(len(problem.logits))):
        ids, first, sound = _slots(problem, n)
        if sound:
            owners[first : first + len(ids)] = n
    return owners


def _carries_member(row: _Row, owners: np.ndarray, n: int) -> np.ndarray:
    """Which slots of row n hold one of its members; padding holds none, and a bad extent owns none."""
    mine = owners[row.first : row.first + len(row.ids)] == n
    return mine & (row.ids != -1) & row.owns_slots


def _flat(cotangent: Any, count: int) -> np.ndarray:
    if cotangent is None:
        return np.zeros(count)
    return np.asarray(cotangent).astype(np.float64).reshape(count)
