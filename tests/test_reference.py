"""The oracle against dense float64 forms that share no code with it, and against the table of statuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_topp import reference
from jax_topp.contract import Status
from jax_topp.reference import Cotangents
from jax_topp.support import Support

from cases import DTYPES, Case, membership, random_case, random_cotangents, row_ids, slot_rows
from compare import assert_bits_equal, assert_within
from odd_cases import odd_case

LAYOUTS = ("ragged", "padded")


def _dense(logits: Any, mask: Any, targets: Any, temperature: Any) -> tuple[Any, ...]:
    """The four row values and all log-probs by masking the whole vocabulary, in float64."""
    x = jnp.where(mask, logits / temperature[..., None], -jnp.inf)
    log_p = jax.nn.log_softmax(x, axis=-1)
    p = jnp.exp(log_p)
    entropy = -jnp.sum(p * jnp.where(p > 0, log_p, 0), axis=-1)
    at = targets[..., None]
    log_prob = jnp.take_along_axis(log_p, at, axis=-1)[..., 0]
    target_logit = jnp.take_along_axis(x, at, axis=-1)[..., 0]
    return log_prob, jax.nn.logsumexp(x, axis=-1), entropy, target_logit, log_p


def _exact_scale(case: Case) -> Case:
    """Powers of two as temperatures: the float32 division rounds nothing, as the dense form in float64."""
    rng = np.random.default_rng(7)
    return case.with_(temperature=rng.choice([0.25, 0.5, 1.0, 2.0], case.rows), vocab_size=None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_dense_ones(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(11)
    case = random_case(
        rng, rows=(3, 50), vocab_size=61, dtype=dtype, layout=layout, narrow_vocabulary=False
    )
    case = _exact_scale(case)
    result = reference.replay(*case.operands, **case.options)
    members = reference.member_log_probs(case.logits, case.support, **case.options)
    with jax.enable_x64(True):
        dense = _dense(
            jnp.asarray(case.logits.astype(np.float64)),
            jnp.asarray(membership(case)),
            jnp.asarray(case.targets.astype(np.int64)),
            jnp.asarray(case.temperature),
        )
        dense = tuple(np.asarray(v) for v in dense)
    active = np.asarray(case.loss_mask)
    assert_bits_equal(result.status, np.where(active, 0, 1).astype(np.int32))
    for name, actual, expected in zip(result._fields, result[:4], dense, strict=False):
        # the dense form's own error: a few float64 ulp of numbers below 2^8
        assert_within(actual, np.where(active, expected, 0), 2.0**-43, name)
    flat = dense[4].reshape(-1, case.logits.shape[-1])
    owners = slot_rows(case)
    scored = (owners >= 0) & active.reshape(-1)[owners] & (np.asarray(case.support.token_ids) != -1)
    ids = np.where(scored, case.support.token_ids, 0)
    assert_within(members, np.where(scored, flat[owners, ids], -np.inf), 2.0**-43, "members")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_autodiff(layout: str) -> None:
    rng = np.random.default_rng(12)
    case = random_case(
        rng, rows=(4, 60), vocab_size=37, layout=layout, ignored=0.0, narrow_vocabulary=False
    )
    # autodiff of the dense form has NaN where a member is -inf
    finite = np.where(np.isinf(case.logits), np.float32(-9), case.logits)
    case = _exact_scale(case.with_(logits=finite))
    cotangents = random_cotangents(rng, case)
    actual = reference.gradient(*case.operands, cotangents=cotangents, **case.options)
    members_of_id = np.zeros((case.targets.size, case.logits.shape[-1]))
    owners = slot_rows(case)
    slots = (owners >= 0) & (np.asarray(case.support.token_ids) >= 0)
    np.add.at(
        members_of_id,
        (owners[slots], np.asarray(case.support.token_ids)[slots]),
        cotangents.member_log_probs[slots],
    )
    mask, targets = membership(case), case.targets.astype(np.int64)
    with jax.enable_x64(True):
        weights = [jnp.asarray(c.astype(np.float64)) for c in cotangents[:4]]
        by_id = jnp.asarray(members_of_id.reshape(case.logits.shape))

        def loss(logits: Any) -> Any:
            *values, log_p = _dense(logits, mask, targets, jnp.asarray(case.temperature))
            rows = sum(jnp.sum(w * v) for w, v in zip(weights, values, strict=True))
            return rows + jnp.sum(by_id * jnp.where(mask, log_p, 0))

        expected = np.asarray(jax.grad(loss)(jnp.asarray(case.logits.astype(np.float64))))
    assert_within(actual, expected, 2.0**-40, "gradient")  # terms up to 2^8, a few float64 ulp
    assert not actual[~mask].any()


def test_repeats_and_order_change_nothing_and_their_cotangents_add() -> None:
    logits = np.random.default_rng(13).standard_normal((1, 9)).astype(np.float32)
    plain, repeated = Support(np.array([[2, 5, 7]])), Support(np.array([[5, -1, 7, 5, 2, 5]]))
    targets = np.array([5])
    for support in (plain, repeated):
        result = reference.replay(logits, targets, support, temperature=0.7)
        first = reference.replay(logits, targets, plain, temperature=0.7)
        for a, b in zip(result, first, strict=True):
            assert_bits_equal(a, b)
    c = Cotangents(member_log_probs=np.array([[1.0, 9.0, 0.5, 2.0, -3.0, 4.0]]))
    summed = Cotangents(member_log_probs=np.array([[-3.0, 7.0, 0.5]]))
    actual = reference.gradient(logits, targets, repeated, temperature=0.7, cotangents=c)
    expected = reference.gradient(logits, targets, plain, temperature=0.7, cotangents=summed)
    assert_within(actual, expected, 2.0**-48)


def _one(
    ids: list[int], *, target: int = 1, temperature: float = 1.0, mask: bool = True, **options: Any
) -> tuple[Any, np.ndarray]:
    """One padded row over six logits (the fourth NaN, the fifth -inf, the sixth +inf), and its gradient."""
    logits = np.array([[0.5, 1.0, -2.0, np.nan, -np.inf, np.inf]], np.float32)
    arguments = (logits, np.array([target]), Support(np.array([ids], np.int32)))
    keywords = {"temperature": np.array([temperature]), "loss_mask": np.array([mask]), **options}
    result = reference.replay(*arguments, **keywords)
    ones = Cotangents(*(np.ones(1),) * 4, np.ones((1, len(ids))))
    return result, reference.gradient(*arguments, cotangents=ones, **keywords)[0]


INF, NAN = np.inf, np.nan

# A row's ids and options, its status, and what it is a case of. Each row violates later rules too, where it can.
STATUSES = [
    ({"ids": [0, 9, 3], "target": -1, "temperature": 0.0}, Status.IGNORED),
    ({"ids": [0, 9, 3], "target": 99, "temperature": NAN, "mask": False}, Status.IGNORED),
    ({"ids": [9, 3], "target": 99, "temperature": 0.0}, Status.BAD_TEMPERATURE),
    ({"ids": [0, 1], "temperature": -1.0}, Status.BAD_TEMPERATURE),
    ({"ids": [0, 1], "temperature": INF}, Status.BAD_TEMPERATURE),
    ({"ids": [0, 1], "temperature": NAN}, Status.BAD_TEMPERATURE),
    ({"ids": [0, 1], "temperature": 1e-50}, Status.BAD_TEMPERATURE),
    ({"ids": [0, 1], "temperature": 1e39}, Status.BAD_TEMPERATURE),
    ({"ids": [6, 3], "target": 99}, Status.BAD_SUPPORT),
    ({"ids": [-2]}, Status.BAD_SUPPORT),
    ({"ids": [0, 3], "target": 6}, Status.BAD_TARGET),
    ({"ids": [-1, -1], "target": 6}, Status.BAD_TARGET),
    ({"ids": [-1, -1]}, Status.EMPTY),
    ({"ids": [4, -1], "target": 4}, Status.EMPTY),
    ({"ids": [4], "empty": "full_vocab"}, Status.EMPTY),
    ({"ids": [0, 3], "target": 2}, Status.NOT_FINITE),
    ({"ids": [0, 5], "target": 2}, Status.NOT_FINITE),
    ({"ids": [0, 1], "temperature": 1e-39}, Status.NOT_FINITE),  # 1 / 1e-39 overflows
    ({"ids": [-1], "empty": "full_vocab"}, Status.NOT_FINITE),
    ({"ids": [-1], "empty": "full_vocab", "vocab_size": 3}, Status.SCORED),
    ({"ids": [0, 2]}, Status.MISSING),
    ({"ids": [0, 4], "target": 4}, Status.MISSING),
    ({"ids": [0, 2], "target": 4, "missing": "include"}, Status.MISSING),
    ({"ids": [0, 2], "target": 3, "missing": "include"}, Status.NOT_FINITE),
    ({"ids": [0, 2], "missing": "include"}, Status.SCORED),
    ({"ids": [0, 1, 3], "vocab_size": 3}, Status.BAD_SUPPORT),
    ({"ids": [0, -1, 1, 1]}, Status.SCORED),
]


@pytest.mark.parametrize(("row", "status"), STATUSES)
def test_status(row: dict[str, Any], status: Status) -> None:
    result, gradient = _one(**row)
    assert result.status[0] == status
    values = [v[0] for v in result[:4]]
    expected = {
        Status.IGNORED: [0.0] * 4,
        Status.EMPTY: [-INF, -INF, 0.0, 0.0],
    }
    if status == Status.MISSING:
        assert values[0] == values[3] == -INF and np.isfinite(values[1:3]).all()
    elif status == Status.SCORED:
        assert np.isfinite(values).all() and np.isfinite(gradient).all()
    else:
        np.testing.assert_array_equal(values, expected.get(status, [NAN] * 4))
    if status in expected:
        assert not gradient.any()
    members = {i for i in row["ids"] if 0 <= i < row.get("vocab_size", 6)}
    if row.get("missing") == "include":
        members.add(row.get("target", 1))
    if row.get("empty") == "full_vocab" and members == set():
        members = set(range(row.get("vocab_size", 6)))
    nan = np.isnan(gradient)
    bad = status >= Status.BAD_SUPPORT
    assert set(np.flatnonzero(nan)) == (members if bad else set())
    assert set(np.flatnonzero(gradient != 0)) <= members


def test_policies_score_what_they_add() -> None:
    alone, _ = _one([-1], missing="include")
    assert alone.log_prob[0] == 0 and alone.status[0] == 0
    added, _ = _one([0, 2], missing="include")
    inside, _ = _one([0, 1, 2])
    whole, _ = _one([-1], empty="full_vocab", missing="include", vocab_size=3)
    for a, b, c in zip(added, inside, whole, strict=True):
        assert a[0] == b[0] == c[0]
    missing, gradient = _one([0, 2])
    assert missing.logsumexp[0] == pytest.approx(np.logaddexp(0.5, -2.0), abs=1e-15)
    assert gradient[0] != 0 and gradient[1] == 0


@pytest.mark.parametrize(
    ("begin", "end"), [(-1, 2), (2, 1), (0, 5), (5, 6), (1, -1), (-3, -2), (2**31 - 1, 2)]
)
def test_bad_extents(begin: int, end: int) -> None:
    logits = np.array([[0.5, 1.0, 2.0]] * 2, np.float32)
    support = Support(np.array([0, 1, 2, 2]), np.array([begin, 2]), np.array([end, 4]))
    result = reference.replay(logits, np.array([1, 2]), support, temperature=1.0)
    assert list(result.status) == [Status.BAD_SUPPORT, Status.SCORED]
    members = reference.member_log_probs(logits, support, temperature=1.0)
    np.testing.assert_array_equal(members, [-INF, -INF, 0.0, 0.0])


def test_the_first_row_owns_a_shared_slot() -> None:
    logits = np.array([[0.0, 1.0], [0.0, 3.0]], np.float32)
    support = Support(np.array([0, 1]), np.array([0, 0]), np.array([2, 2]))
    arguments = (logits, np.array([1, 1]), support)
    members = reference.member_log_probs(logits, support, temperature=1.0)
    np.testing.assert_allclose(np.exp(members).sum(), 1)
    c = Cotangents(member_log_probs=np.ones(2))
    gradient = reference.gradient(*arguments, temperature=1.0, cotangents=c)
    assert gradient[0].any() and not gradient[1].any()


def test_zero_cotangents_of_bad_rows_give_zero_gradients() -> None:
    rng = np.random.default_rng(14)
    case = odd_case(rng, rows=(400,), vocab_size=23, layout="padded")
    cotangents = random_cotangents(rng, case)
    gradient = reference.gradient(*case.operands, cotangents=cotangents, **case.options)
    status = reference.replay(*case.operands, **case.options).status
    asked = sum(np.abs(c) for c in cotangents[:4]) > 0
    asked |= np.array(
        [
            (c[ids != -1] != 0).any()
            for c, ids in zip(cotangents.member_log_probs, row_ids(case), strict=True)
        ]
    )
    bad = status >= Status.BAD_SUPPORT
    nan = np.isnan(gradient).any(axis=-1)
    assert (bad & ~asked).any() and (bad & asked).any()
    assert not nan[~(bad & asked)].any() and not gradient[~asked].any()


def test_every_status_is_met_by_the_odd_cases() -> None:
    case = odd_case(np.random.default_rng(15), rows=(30, 40), vocab_size=29)
    status = reference.replay(*case.operands, **case.options).status
    assert set(status.flat) == set(Status)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_wide_targets_do_not_wrap(dtype: Any) -> None:
    logits, support = np.zeros((1, 3), np.float32), Support(np.array([[0, 1]]))
    target = np.array([np.iinfo(dtype).max], dtype)
    assert reference.replay(logits, target, support, temperature=1.0).status[0] == 5
