"""Faults that trainers and engines reported, each with the right value.

The names say which project reported it; docs/numerics.md has the rules. Formats are in test_readers.py, odd inputs in
test_statuses.py, orders and shapes in test_bits.py, compilation in test_jax.py and test_torch.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from jax_topp import Status, Support, reference
from jax_topp.reference import Cotangents

from cases import DTYPES, Case, member_bounds, random_case, random_cotangents
from compare import assert_bits_equal, assert_within, ulp, value_bounds
from frontends import each_frontend

F32 = np.float32
V = 200


def dense_log_prob(logits: np.ndarray, ids: list[int], target: int, temperature: float) -> float:
    """float64 log-softmax over some ids."""
    x = logits.astype(np.float64)[ids] / temperature
    return float(
        logits.astype(np.float64)[target] / temperature
        - x.max()
        - np.log(np.exp(x - x.max()).sum())
    )


def rows_of(rng: np.random.Generator, count: int = 30, temperature: float = 1.0) -> Case:
    return random_case(
        rng,
        rows=(count,),
        vocab_size=V,
        temperature=temperature,
        ignored=0,
        layout="padded",
        narrow_vocabulary=False,
    ).with_(loss_mask=None)


def members_of(case: Case, n: int) -> list[int]:
    return [i for i in case.support.token_ids[n].tolist() if i >= 0]


def cotangents_of(case: Case, **given: float) -> Cotangents:
    """Constant cotangents of row values, 0 for the others."""
    names = ("log_prob", "logsumexp", "support_entropy", "target_logit")
    rows = [np.full(case.rows, given.get(name, 0.0), F32) for name in names]
    return Cotangents(*rows, np.zeros(case.support.token_ids.shape, F32))


@each_frontend
def test_trl_6789_the_whole_vocabulary_is_off_by_the_kept_mass(frontend, rng):
    """Replayed minus whole-vocabulary log-prob is -log of the probability that the support keeps."""
    case = rows_of(rng)
    whole = case.with_(support=Support(np.full((*case.rows, 1), -1)))
    replayed = frontend.replay(case).log_prob.astype(np.float64)
    over_all = frontend.replay(whole, empty="full_vocab").log_prob.astype(np.float64)
    for n in range(len(replayed)):
        x = case.logits[n].astype(np.float64)
        kept = np.exp(x - x.max())[members_of(case, n)].sum() / np.exp(x - x.max()).sum()
        # both are rounded to float32 once
        bound = ulp(replayed[n], F32) + ulp(over_all[n], F32)
        assert abs(replayed[n] - over_all[n] + np.log(kept)) <= bound


@each_frontend
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_verl_6240_prime_rl_679_temperature_counts_once(frontend, temperature, rng):
    """Values are those of z / T, and the gradient has one factor 1 / T."""
    case = rows_of(rng, temperature=temperature)
    scaled = case.with_(logits=case.logits / F32(temperature), temperature=1.0)
    for a, b in zip(frontend.replay(case)[:5], frontend.replay(scaled)[:5], strict=True):
        assert_bits_equal(a, b)
    cotangents = cotangents_of(case, log_prob=1.0)
    gradient = frontend.gradient(case, cotangents).astype(np.float64)
    once = frontend.gradient(scaled, cotangents).astype(np.float64) / float(F32(temperature))
    # both are roundings to float32 of the same number, one before the division
    assert_within(gradient.astype(F32), once, 1.5 * ulp(once, F32))


@each_frontend
def test_nemo_rl_69_equal_logits_give_a_ratio_of_exactly_one(frontend, rng):
    case = rows_of(rng)
    old, new = (frontend.replay(case).log_prob for _ in range(2))
    assert (np.exp(new - old) == 1.0).all()


@each_frontend
def test_prime_rl_2601_perturbed_logits_do_not_lose_the_target(frontend, rng):
    """Recomputing the support from other logits drops tokens; replaying it cannot."""
    case = rows_of(rng)
    noise = rng.normal(0, 1e-2, case.logits.shape).astype(F32)
    logits = np.where(np.isfinite(case.logits), case.logits + noise, case.logits)
    r = frontend.replay(case.with_(logits=logits))
    assert (r.status == Status.SCORED).all() and np.isfinite(r.log_prob).all()


@each_frontend
def test_trl_7269_what_remains_is_the_noise_of_the_logits(frontend, rng):
    """bfloat16 logits move a log-prob by at most twice their largest rounding, whatever the kept mass."""
    case = rows_of(rng, temperature=0.7)
    rounded = case.with_(logits=case.logits.astype(DTYPES["bfloat16"]))
    exact = frontend.replay(case).log_prob.astype(np.float64)
    noisy = frontend.replay(rounded).log_prob.astype(np.float64)
    for n in range(len(exact)):
        x = case.logits[n, members_of(case, n)].astype(np.float64)
        largest = np.abs(x[np.isfinite(x)]).max()
        # half a bfloat16 ulp for the target and for the normaliser, and the float32 roundings
        bound = 2 * ulp(largest, "bfloat16") / 2 / 0.7 + 4 * ulp(largest / 0.7, F32)
        assert abs(exact[n] - noisy[n]) <= bound


@each_frontend
def test_miles_1521_no_gradient_outside_the_support(frontend, rng):
    case = rows_of(rng)
    gradient = frontend.gradient(case, random_cotangents(rng, case))
    for n in range(len(gradient)):
        outside = np.setdiff1d(np.arange(V), members_of(case, n))
        assert not gradient[n, outside].view(np.uint32).any()


@each_frontend
def test_nemo_rl_4154_masked_rows_of_infinities_give_zeros(frontend, rng):
    """A weight times inf is NaN; a masked row is never computed at all."""
    case = rows_of(rng, 6)
    logits = np.full_like(case.logits, -np.inf)
    logits[3:] = case.logits[3:]
    mask = np.array([False] * 3 + [True] * 3)
    masked = case.with_(logits=logits, loss_mask=mask)
    assert not frontend.replay(masked).log_prob[:3].any()
    gradient = frontend.gradient(masked, random_cotangents(rng, case))
    assert not gradient[:3].view(np.uint32).any() and np.isfinite(gradient[3:]).all()


@each_frontend
def test_nemo_rl_2053_vllm_54166_a_token_outside_is_marked_and_counted(frontend, rng):
    """0 is a real log-prob and never stands for a missing one."""
    case = rows_of(rng)
    targets = case.targets.copy()
    outside = (
        [next(i for i in range(V) if i not in members_of(case, n)) for n in (1, 5)] if V else []
    )
    sizes = [len(members_of(case, n)) for n in (1, 5)]
    assert max(sizes) < V
    targets[[1, 5]] = outside
    r = frontend.replay(case.with_(targets=targets))
    assert r.valid.tolist() == [n not in (1, 5) for n in range(len(targets))]
    assert (r.log_prob[[1, 5]] == -np.inf).all() and (r.status == Status.MISSING).sum() == 2


@each_frontend
def test_skyrl_2259_entropy_with_a_member_of_minus_infinity(frontend, rng):
    """0 * -inf: finite, and equal to the support without it; the gradient too."""
    ids, less = [3, 9, 20, 41], [3, 9, 41]
    logits = rng.normal(size=(1, V)).astype(F32)
    logits[0, 20] = -np.inf
    case = Case(logits, np.array([9]), Support(np.array([ids])), 0.8)
    without = case.with_(support=Support(np.array([less])))
    for a, b in zip(frontend.replay(case)[:5], frontend.replay(without)[:5], strict=True):
        assert_bits_equal(a, b)
    given = {"log_prob": 1.0, "support_entropy": -0.3, "logsumexp": 0.2}
    a, b = (frontend.gradient(c, cotangents_of(c, **given)) for c in (case, without))
    assert_bits_equal(a, b)
    assert np.isfinite(a).all()


@each_frontend
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_flashinfer_2402_one_bad_row_is_one_bad_row(frontend, value, rng):
    case = rows_of(rng)
    bad = case.logits.copy()
    bad[4, members_of(case, 4)[0]] = value
    before, after = frontend.replay(case), frontend.replay(case.with_(logits=bad))
    others = np.arange(len(bad)) != 4
    assert after.status[4] == Status.NOT_FINITE and np.isnan(after.log_prob[4])
    for a, b in zip(after[:5], before[:5], strict=True):
        assert_bits_equal(a[others], b[others])
    cotangents = random_cotangents(rng, case)
    good, spoilt = (frontend.gradient(case.with_(logits=z), cotangents) for z in (case.logits, bad))
    assert_bits_equal(spoilt[others], good[others])


@each_frontend
@pytest.mark.parametrize("target", [-1, -100, -(2**31)])
def test_prime_rl_1525_ignored_targets_read_nothing(frontend, target, rng):
    case = rows_of(rng, 5)
    targets = case.targets.copy()
    targets[2] = target
    ignored = case.with_(targets=targets)
    r = frontend.replay(ignored)
    assert r.log_prob[2] == 0 and not r.valid[2] and r.status[2] == Status.IGNORED
    gradient = frontend.gradient(ignored, random_cotangents(rng, case))
    assert not gradient[2].view(np.uint32).any()


@each_frontend
def test_skyrl_2083_an_absent_target_can_join_its_support(frontend, rng):
    """Without overwriting the weakest member: scored over S and y."""
    case = rows_of(rng)
    targets = rng.integers(V, size=len(case.targets))
    logits = rng.normal(0, 3, case.logits.shape).astype(F32)
    loose = case.with_(targets=targets, logits=logits)
    r = frontend.replay(loose, missing="include")
    assert (r.status == Status.SCORED).all()
    for n, y in enumerate(targets.tolist()):
        expected = dense_log_prob(logits[n], sorted({*members_of(case, n), y}), y, 1.0)
        assert abs(r.log_prob[n] - expected) <= ulp(expected, F32) / 2 + V * 2.0**-45


@each_frontend
def test_prime_rl_int8_300_copies_of_one_id_count_once(frontend, rng):
    case = rows_of(rng, 1)
    logits = rng.normal(size=(1, V)).astype(F32)
    few = case.with_(logits=logits, targets=np.array([7]), support=Support(np.array([[3, 7]])))
    many = few.with_(support=Support(np.array([[3] * 300 + [7] * 256])))
    for a, b in zip(frontend.replay(many)[:5], frontend.replay(few)[:5], strict=True):
        assert_bits_equal(a, b)
    given = {"log_prob": 1.0, "support_entropy": 0.5}
    a, b = (frontend.gradient(c, cotangents_of(c, **given)) for c in (many, few))
    assert_bits_equal(a, b)


@each_frontend
def test_skyrl_an_added_eos_has_no_set_and_is_scored_over_all_ids(frontend, rng):
    """Mixed batch: the policy touches the empty rows only."""
    case = rows_of(rng)
    ids = case.support.token_ids.copy()
    ids[[2, 9]] = -1
    mixed = case.with_(support=Support(ids))
    r = frontend.replay(mixed, empty="full_vocab")
    before = frontend.replay(case)
    others = np.setdiff1d(np.arange(len(ids)), [2, 9])
    for a, b in zip(r[:5], before[:5], strict=True):
        assert_bits_equal(a[others], b[others])
    for n in (2, 9):
        expected = dense_log_prob(case.logits[n], list(range(V)), int(case.targets[n]), 1.0)
        assert abs(r.log_prob[n] - expected) <= ulp(expected, F32) / 2 + V * 2.0**-45


@each_frontend
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_31267_half_precision_is_exact_after_its_own_rounding(frontend, dtype, rng):
    """bfloat16 in, float32 out; the field saw 0.008 to 0.126 nat, here it is the rounding of float32."""
    case = random_case(rng, rows=(50,), vocab_size=V, dtype=dtype, ignored=0)
    r = frontend.replay(case)
    expected = reference.replay(*case.operands, **case.options)
    bounds = value_bounds(expected, member_bounds(case))
    assert r.log_prob.dtype == F32
    for name in ("log_prob", "logsumexp", "support_entropy"):
        assert_within(getattr(r, name), getattr(expected, name), getattr(bounds, name), name)


@each_frontend
def test_openrlhf_1319_entropy_is_that_of_the_scaled_logits(frontend, rng):
    case = rows_of(rng, temperature=0.6)
    before = case.logits.copy()
    entropy = frontend.replay(case).support_entropy
    for n in range(len(entropy)):
        x = case.logits[n, members_of(case, n)] / F32(0.6)
        p = np.exp(x.astype(np.float64) - x.max())
        p = p[p > 0] / p.sum()
        expected = -(p * np.log(p)).sum()
        # half a float32 ulp, and float64 sums of up to V terms in the expectation
        assert abs(entropy[n] - expected) <= ulp(expected, F32) / 2 + V * 2.0**-44
    assert_bits_equal(case.logits, before)


@each_frontend
def test_prime_rl_3326_unselected_rows_cost_and_change_nothing(frontend, rng):
    """They may hold anything at all, and their gradient is exactly 0."""
    case = rows_of(rng)
    mask = rng.random(len(case.targets)) < 0.3
    logits, targets, ids = case.logits.copy(), case.targets.copy(), case.support.token_ids.copy()
    logits[~mask], targets[~mask], ids[~mask] = np.nan, 2**31 - 1, 2**31 - 1
    spoilt = case.with_(logits=logits, targets=targets, support=Support(ids), loss_mask=mask)
    r, clean = frontend.replay(spoilt), frontend.replay(case)
    for a, b in zip(r[:5], clean[:5], strict=True):
        assert_bits_equal(a[mask], b[mask])
    for name in ("log_prob", "logsumexp", "support_entropy", "target_logit"):
        assert not getattr(r, name)[~mask].view(np.uint32).any()
    cotangents = random_cotangents(rng, case)
    gradient = frontend.gradient(spoilt, cotangents)
    assert not gradient[~mask].view(np.uint32).any()
    assert_bits_equal(gradient[mask], frontend.gradient(case, cotangents)[mask])
