"""Every line of docs/numerics.md's table of odd inputs, in both front ends: values, gradients, precedence."""

from __future__ import annotations

import numpy as np
import pytest

from jax_topp import Status, Support, reference
from jax_topp.reference import Cotangents

from cases import DTYPES, Case, member_bounds, random_cotangents
from compare import assert_bits_equal, assert_within, gradient_bound, value_bounds
from frontends import VALUES, each_frontend
from odd_cases import odd_case

V = 12
NAN, INF = float("nan"), float("inf")
F32 = np.float32


def row(
    ids: list[int],
    target: int = 3,
    *,
    logits: dict[int, float] | None = None,
    temperature: float = 0.7,
    mask: bool = True,
    extent: tuple[int, int] | None = None,
) -> Case:
    """One row of finite logits, but for those given."""
    z = np.random.default_rng(5).normal(0, 2, (1, V)).astype(F32)
    for i, value in (logits or {}).items():
        z[0, i] = value
    begin, end = extent or (0, len(ids))
    return Case(
        logits=z,
        targets=np.array([target]),
        support=Support(
            np.array(ids, np.int32), np.array([begin], np.int32), np.array([end], np.int32)
        ),
        temperature=np.array([temperature], F32),
        loss_mask=np.array([mask]),
    )


GOOD = [1, 3, 7, 9]
# name: row, status; what precedence decides comes in the rows with two faults.
ROWS = {
    "scored": (row(GOOD), Status.SCORED),
    "padding anywhere": (row([-1, 3, -1, 9, -1]), Status.SCORED),
    "-inf outside the support": (row(GOOD, logits={0: -INF, 5: -INF}), Status.SCORED),
    "NaN outside the support": (row(GOOD, logits={0: NAN, 5: INF}), Status.SCORED),
    "a -inf member": (row(GOOD, logits={7: -INF}), Status.SCORED),
    "mask False": (row(GOOD, mask=False), Status.IGNORED),
    "target -1": (row(GOOD, -1), Status.IGNORED),
    "target -100": (row(GOOD, -100), Status.IGNORED),
    "no member": (row([]), Status.EMPTY),
    "only padding": (row([-1, -1]), Status.EMPTY),
    "every member -inf": (row(GOOD, logits=dict.fromkeys(GOOD, -INF)), Status.EMPTY),
    "target elsewhere": (row(GOOD, 4), Status.MISSING),
    "target -inf": (row(GOOD, logits={3: -INF}), Status.MISSING),
    "id = V": (row([1, 3, V]), Status.BAD_SUPPORT),
    "id < -1": (row([1, -2, 3]), Status.BAD_SUPPORT),
    "a negative extent": (row(GOOD, extent=(-1, 3)), Status.BAD_SUPPORT),
    "a reversed extent": (row(GOOD, extent=(3, 1)), Status.BAD_SUPPORT),
    "an extent past the capacity": (row(GOOD, extent=(0, 5)), Status.BAD_SUPPORT),
    "target = V": (row(GOOD, V), Status.BAD_TARGET),
    "target far past V": (row(GOOD, 2**31 - 1), Status.BAD_TARGET),
    "T = 0": (row(GOOD, temperature=0.0), Status.BAD_TEMPERATURE),
    "T < 0": (row(GOOD, temperature=-1.0), Status.BAD_TEMPERATURE),
    "T NaN": (row(GOOD, temperature=NAN), Status.BAD_TEMPERATURE),
    "T infinite": (row(GOOD, temperature=INF), Status.BAD_TEMPERATURE),
    "T 0 in float32": (row(GOOD).with_(temperature=np.array([1e-60])), Status.BAD_TEMPERATURE),
    "T infinite in float32": (
        row(GOOD).with_(temperature=np.array([1e60])),
        Status.BAD_TEMPERATURE,
    ),
    "a NaN member": (row(GOOD, logits={7: NAN}), Status.NOT_FINITE),
    "a +inf member": (row(GOOD, logits={7: INF}), Status.NOT_FINITE),
    "overflow in the division": (row(GOOD, logits={7: 3e38}), Status.NOT_FINITE),
    # precedence: 1, then 6, 4, 5, then 2, then 7, then 3
    "ignored before all": (row([V, -5], -1, temperature=0.0), Status.IGNORED),
    "masked before all": (row([V], V, temperature=NAN, mask=False), Status.IGNORED),
    "temperature before support": (row([V], V, temperature=0.0), Status.BAD_TEMPERATURE),
    "support before target": (row([1, V], V), Status.BAD_SUPPORT),
    "target before empty": (row([], V), Status.BAD_TARGET),
    "bad support before not finite": (row([1, 7, V], logits={7: NAN}), Status.BAD_SUPPORT),
    "empty before missing": (row([], 3), Status.EMPTY),
    "not finite before missing": (row(GOOD, 4, logits={7: NAN}), Status.NOT_FINITE),
}
each_row = pytest.mark.parametrize("name", ROWS)


def ones(case: Case) -> Cotangents:
    """Five different cotangents, none 0."""
    slots = np.linspace(0.5, 1.5, case.support.token_ids.size, dtype=F32)
    values = [np.full(case.rows, c, F32) for c in (1.0, 0.75, -0.5, 0.25)]
    return Cotangents(*values, slots.reshape(case.support.token_ids.shape))


@each_frontend
@each_row
def test_values(frontend, name):
    case, status = ROWS[name]
    r = frontend.replay(case)
    assert r.status.dtype == np.int32 and r.status.shape == case.rows
    assert r.status[0] == status
    got = tuple(float(getattr(r, v)[0]) for v in VALUES)
    if status == Status.SCORED:
        assert np.isfinite(got).all()
    elif status == Status.IGNORED:
        for v in VALUES:
            assert_bits_equal(getattr(r, v), np.zeros(1, F32), v)
    elif status == Status.EMPTY:
        assert got == (-INF, -INF, 0.0, 0.0)
    elif status == Status.MISSING:
        assert got[0] == got[3] == -INF
        assert np.isfinite(got[1:3]).all()
    else:
        for v in VALUES:  # the NaN that every backend writes
            assert_bits_equal(getattr(r, v), np.array([0x7FC00000], np.uint32).view(F32), v)
    expected = reference.replay(*case.operands, **case.options)
    bounds = value_bounds(expected, member_bounds(case))
    for v in VALUES:
        assert_within(getattr(r, v), getattr(expected, v), getattr(bounds, v), v)


@each_frontend
@each_row
def test_gradients(frontend, name):
    case, status = ROWS[name]
    cotangents = ones(case)
    gradient = frontend.gradient(case, cotangents)
    expected = reference.gradient(*case.operands, **case.options, cotangents=cotangents)
    assert_within(
        gradient, expected, gradient_bound(expected, case, cotangents, member_bounds(case))
    )
    outside = np.ones(V, bool)
    outside[[i for i in case.support.token_ids if 0 <= i < V]] = False
    assert not gradient.view(np.uint32)[0, outside].any(), "not +0 outside the support"
    inside = gradient[0, ~outside]
    if status in (Status.IGNORED, Status.EMPTY):
        assert not gradient.view(np.uint32).any()
    elif status >= Status.BAD_SUPPORT and name != "a reversed extent":
        assert np.isnan(inside[: 3 if name == "a negative extent" else None]).all()
    elif status in (Status.SCORED, Status.MISSING):
        assert np.isfinite(inside).all()


@each_frontend
@each_row
def test_no_gradient_without_a_cotangent(frontend, name):
    """where(valid, log_prob, 0) hands a bad row zeros, and 0 * inf must not come of it."""
    case, _ = ROWS[name]
    nothing = Cotangents(*(np.zeros_like(c) for c in ones(case)))
    assert not frontend.gradient(case, nothing).view(np.uint32).any()


@each_frontend
def test_missing_target_has_no_gradient_of_its_own(frontend):
    """log_prob's and target_logit's cotangents are 0 there; the others count."""
    case, _ = ROWS["target elsewhere"]
    only = ones(case)._replace(
        logsumexp=np.zeros(1, F32),
        support_entropy=np.zeros(1, F32),
        member_log_probs=np.zeros(case.support.token_ids.shape, F32),
    )
    assert not np.any(frontend.gradient(case, only))
    others = ones(case)
    none = others._replace(log_prob=np.zeros(1, F32), target_logit=np.zeros(1, F32))
    assert_bits_equal(frontend.gradient(case, others), frontend.gradient(case, none))


# Policies -------------------------------------------------------------------------------------------------------------


@each_frontend
def test_include_scores_the_support_and_the_target(frontend):
    case, _ = ROWS["target elsewhere"]
    r = frontend.replay(case, missing="include")
    whole = frontend.replay(row([*GOOD, 4], 4))
    for got, expected in zip(r[:5], whole[:5], strict=True):
        assert_bits_equal(got, expected)
    cotangents = ones(case)
    gradient = frontend.gradient(case, cotangents, missing="include")
    longer = row([*GOOD, 4], 4)
    wider = np.append(cotangents.member_log_probs, F32(0))
    assert_bits_equal(
        gradient, frontend.gradient(longer, cotangents._replace(member_log_probs=wider))
    )


@each_frontend
def test_include_with_an_empty_support_is_the_target_alone(frontend):
    case, _ = ROWS["no member"]
    r = frontend.replay(case, missing="include")
    assert r.status[0] == Status.SCORED
    assert_bits_equal(r.log_prob, np.zeros(1, F32))
    assert_bits_equal(r.support_entropy, np.zeros(1, F32))
    assert r.logsumexp[0] == r.target_logit[0] == F32(case.logits[0, 3] / case.temperature[0])


@each_frontend
@pytest.mark.parametrize("name", ["no member", "only padding"])
@pytest.mark.parametrize("missing", ["neg_inf", "include"])
def test_full_vocab_scores_an_empty_row_over_all_ids(frontend, name, missing):
    case, _ = ROWS[name]
    r = frontend.replay(case, empty="full_vocab", missing=missing)
    whole = frontend.replay(row(list(range(V))))
    for got, expected in zip(r[:5], whole[:5], strict=True):
        assert_bits_equal(got, expected)
    cotangents = ones(case)._replace(member_log_probs=np.zeros(case.support.token_ids.shape, F32))
    gradient = frontend.gradient(case, cotangents, empty="full_vocab", missing=missing)
    same = cotangents._replace(member_log_probs=np.zeros(V, F32))
    assert_bits_equal(gradient, frontend.gradient(row(list(range(V))), same))


@each_frontend
def test_full_vocab_leaves_other_rows_alone(frontend):
    """All members -inf is not an empty row, and an ignored row stays ignored."""
    assert frontend.replay(ROWS["every member -inf"][0], empty="full_vocab").status[0] == 2
    assert frontend.replay(row([], -1), empty="full_vocab").status[0] == 1
    assert frontend.replay(row([], mask=False), empty="full_vocab").status[0] == 1


@each_frontend
def test_full_vocab_row_with_a_nan_logit(frontend):
    case = row([], logits={5: NAN})
    assert frontend.replay(case, empty="full_vocab").status[0] == Status.NOT_FINITE
    assert np.isnan(frontend.gradient(case, ones(case), empty="full_vocab")).all()


@each_frontend
def test_full_vocab_stops_at_vocab_size(frontend):
    case = row([], logits={10: NAN, 11: INF}).with_(vocab_size=10)
    r = frontend.replay(case, empty="full_vocab")
    assert r.status[0] == Status.SCORED
    gradient = frontend.gradient(case, ones(case), empty="full_vocab")
    assert np.isfinite(gradient).all() and not gradient.view(np.uint32)[0, 10:].any()


# Whole batches of odd rows --------------------------------------------------------------------------------------------


@each_frontend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("missing", ["neg_inf", "include"])
@pytest.mark.parametrize("empty", ["neg_inf", "full_vocab"])
def test_batches_of_odd_rows(frontend, dtype, layout, missing, empty, rng):
    policies = {"missing": missing, "empty": empty}
    case = odd_case(rng, rows=(3, 40), vocab_size=57, dtype=dtype, layout=layout)
    r = frontend.replay(case, **policies)
    expected = reference.replay(*case.operands, **case.options, **policies)
    np.testing.assert_array_equal(r.status, expected.status)
    members = member_bounds(case, empty=empty)
    bounds = value_bounds(expected, members)
    for v in VALUES:
        assert_within(getattr(r, v), getattr(expected, v), getattr(bounds, v), v)
    cotangents = random_cotangents(rng, case)
    gradient = frontend.gradient(case, cotangents, **policies)
    wanted = reference.gradient(*case.operands, **case.options, **policies, cotangents=cotangents)
    assert_within(gradient, wanted, gradient_bound(wanted, case, cotangents, members), "gradient")


@each_frontend
@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_a_bad_row_leaves_its_neighbours_alone(frontend, layout, rng):
    """The good rows of a batch have the bits that they have when the odd ones are taken out."""
    case = odd_case(rng, rows=(200,), vocab_size=64, layout=layout)
    r = frontend.replay(case)
    good = np.flatnonzero(np.asarray(r.status) == Status.SCORED)
    assert 20 < good.size < 180
    alone = case.with_(
        logits=case.logits[good],
        targets=case.targets[good],
        support=case.support.take(good),
        temperature=np.broadcast_to(case.temperature, case.rows)[good],
        loss_mask=None if case.loss_mask is None else case.loss_mask[good],
    )
    for name, got in zip(VALUES, frontend.replay(alone), strict=False):
        assert_bits_equal(got, np.asarray(getattr(r, name))[good], name)
    cotangents = random_cotangents(rng, case)._replace(
        member_log_probs=np.zeros(case.support.token_ids.shape, F32)
    )
    few = Cotangents(
        *(c[good] for c in cotangents[:4]), np.zeros(alone.support.token_ids.shape, F32)
    )
    assert_bits_equal(frontend.gradient(case, cotangents)[good], frontend.gradient(alone, few))
