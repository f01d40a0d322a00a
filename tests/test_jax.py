"""The JAX front end: transforms, dtypes, what compiles once, and what never becomes vocabulary-sized."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import jax_topp
from jax_topp import Status, Support

from cases import DTYPES, Case, random_case, random_cotangents
from compare import assert_bits_equal
from supports import each_layout

jax = pytest.importorskip("jax")
jnp = jax.numpy

F32 = np.float32
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_device(case: Case) -> Case:
    """The same case in JAX arrays."""
    temperature = case.temperature
    return case.with_(
        logits=jnp.asarray(case.logits),
        targets=jnp.asarray(case.targets.astype(np.int32)),
        support=jax.tree.map(jnp.asarray, case.support),
        temperature=jnp.asarray(temperature) if np.ndim(temperature) else temperature,
        loss_mask=None if case.loss_mask is None else jnp.asarray(case.loss_mask),
    )


def score(case: Case, logits: Any = None, **options: Any) -> jax_topp.Replay:
    logits = case.logits if logits is None else logits
    return jax_topp.replay(logits, case.targets, case.support, **case.options, **options)


def mixed(r: jax_topp.Replay, weights: Any) -> Any:
    """A loss that sends a cotangent into all five float results. Its own terms are ordinary XLA."""
    names = ("log_prob", "logsumexp", "support_entropy", "target_logit", "member_log_probs")
    return sum(
        jnp.sum(jnp.where(jnp.isfinite(getattr(r, name)), getattr(r, name) * w, 0))
        for name, w in zip(names, weights, strict=True)
    )


# Transforms -----------------------------------------------------------------------------------------------------------


@each_dtype
@each_layout
def test_grad_and_value_and_grad_equal_the_vjp(dtype, layout, rng):
    case = on_device(random_case(rng, rows=(2, 9), vocab_size=70, dtype=dtype, layout=layout))
    weights = random_cotangents(rng, case)

    def loss(logits):
        return mixed(score(case, logits, member_log_probs=True), weights)

    gradient = jax.grad(loss)(case.logits)
    assert gradient.dtype == case.logits.dtype and gradient.shape == case.logits.shape
    value, same = jax.jit(jax.value_and_grad(loss))(case.logits)
    assert_bits_equal(same, gradient)
    assert_bits_equal(jax.grad(jax.checkpoint(loss))(case.logits), gradient)
    np.testing.assert_array_equal(value, jax.jit(loss)(case.logits))


@each_dtype
@each_layout
def test_vmap_equals_the_batched_call(dtype, layout, rng):
    case = on_device(random_case(rng, rows=(4, 3, 5), vocab_size=60, dtype=dtype, layout=layout))
    temperature = jnp.broadcast_to(jnp.asarray(case.temperature, jnp.float32), case.rows)
    mask = jnp.ones(case.rows, bool) if case.loss_mask is None else case.loss_mask

    def one(logits, targets, support, temperature, mask):
        return jax_topp.replay(
            logits,
            targets,
            support,
            temperature=temperature,
            loss_mask=mask,
            vocab_size=case.vocab_size,
            member_log_probs=True,
        )

    arguments = (case.logits, case.targets, case.support, temperature, mask)
    whole = one(*arguments)
    mapped = jax.vmap(jax.vmap(one))(*arguments)
    for name, a, b in zip(whole._fields, mapped, whole, strict=True):
        assert_bits_equal(a, b, name)
    weights = random_cotangents(rng, case)

    def loss(logits, weights, *rest):
        return mixed(one(logits, *rest), weights)

    gradient = jax.grad(loss)(case.logits, weights, *arguments[1:])
    of_each = jax.vmap(jax.vmap(jax.grad(loss)))(case.logits, weights, *arguments[1:])
    assert_bits_equal(of_each, gradient)
    through = jax.grad(lambda z: jnp.sum(jax.vmap(loss)(z, weights, *arguments[1:])))(case.logits)
    assert_bits_equal(through, gradient)


@each_layout
@pytest.mark.parametrize("shared", ["logits", "targets", "support", "temperature", "loss_mask"])
def test_vmap_with_one_argument_shared(layout, shared, rng):
    """in_axes None on each argument: the same bits as a loop."""
    cases = [
        on_device(
            random_case(
                rng, rows=(6,), vocab_size=40, layout=layout, temperature=t, narrow_vocabulary=False
            )
        )
        for t in rng.uniform(0.3, 2, (3, 6)).astype(F32)
    ]
    width = max(case.support.capacity for case in cases)
    columns = {
        "logits": [c.logits for c in cases],
        "targets": [c.targets for c in cases],
        "support": [c.support.with_capacity(width) for c in cases],
        "temperature": [c.temperature for c in cases],
        "loss_mask": [c.loss_mask for c in cases],
    }
    stacked = {k: jax.tree.map(lambda *x: jnp.stack(x), *v) for k, v in columns.items()}
    stacked[shared] = columns[shared][0]
    axes = {k: None if k == shared else 0 for k in columns}

    def one(x):
        def loss(logits):
            r = jax_topp.replay(
                logits,
                x["targets"],
                x["support"],
                temperature=x["temperature"],
                loss_mask=x["loss_mask"],
                missing="include",
                member_log_probs=True,
            )
            return jnp.sum(jnp.where(r.valid, r.log_prob + r.support_entropy, 0)), r

        (_, r), gradient = jax.value_and_grad(loss, has_aux=True)(x["logits"])
        return (*r, gradient)

    mapped = jax.vmap(one, in_axes=(axes,))(stacked)
    for i in range(3):
        alone = one({k: v[0] if k == shared else v[i] for k, v in columns.items()})
        for a, b in zip(mapped, alone, strict=True):
            assert_bits_equal(a[i], b)


@each_layout
def test_scan_and_map_over_pieces(layout, rng):
    case = on_device(random_case(rng, rows=(3, 7), vocab_size=40, layout=layout, temperature=0.7))
    whole = score(case)
    pieces = (case.logits, case.targets, case.support, case.loss_mask)

    def one(piece):
        logits, targets, support, mask = piece
        return jax_topp.replay(
            logits, targets, support, temperature=0.7, loss_mask=mask, vocab_size=case.vocab_size
        )

    for r in (jax.lax.map(one, pieces), jax.lax.scan(lambda c, p: (c, one(p)), 0, pieces)[1]):
        for a, b in zip(r[:5], whole[:5], strict=True):
            assert_bits_equal(a, b)


# What compiles once ---------------------------------------------------------------------------------------------------


def test_a_temperature_is_an_operand(rng):
    """Another value never compiles again: neither a Python number nor an array."""
    case = on_device(random_case(rng, rows=(6,), vocab_size=30, temperature=1.0, ignored=0))
    count = 0

    @jax.jit
    def step(logits, temperature):
        nonlocal count
        count += 1
        return jax_topp.log_prob(
            logits, case.targets, case.support, temperature=temperature, vocab_size=case.vocab_size
        )

    for t in (0.5, 1.0, 2.0):
        step(case.logits, t)
    assert count == 1
    inner = jax_topp.logits._scored._cache_size()
    for t in (0.5, 0.6, 0.7):  # eager calls with Python numbers
        score(case.with_(temperature=t))
    assert jax_topp.logits._scored._cache_size() <= inner + 1


def test_temperature_scalar_and_per_row_agree_with_row_by_row_calls(rng):
    """field.md D 5: packed micro-batches mix temperatures."""
    t = rng.uniform(0.1, 2, 8).astype(F32)
    case = on_device(random_case(rng, rows=(8,), vocab_size=40, temperature=t, layout="padded"))
    whole = score(case)
    for n in range(8):
        alone = case.with_(
            logits=case.logits[n : n + 1],
            targets=case.targets[n : n + 1],
            support=case.support[n : n + 1],
            loss_mask=case.loss_mask[n : n + 1],
            temperature=float(t[n]),
        )
        for a, b in zip(score(alone)[:5], whole[:5], strict=True):
            assert_bits_equal(a, b[n : n + 1])


def test_temperature_has_no_gradient(rng):
    """It is said, rather than given as zero."""
    case = on_device(random_case(rng, rows=(3,), vocab_size=20, temperature=1.0))
    loss = lambda t: jnp.sum(score(case.with_(temperature=t)).log_prob)  # noqa: E731
    with pytest.raises(TypeError, match=r"temperature is not differentiable .*stop_gradient"):
        jax.grad(loss)(1.0)
    assert jax.grad(lambda t: loss(jax.lax.stop_gradient(t)))(1.0) == 0.0


# Dtypes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
@pytest.mark.parametrize("jitted", [False, True])
def test_targets_of_any_width(dtype, jitted, rng):
    case = random_case(rng, rows=(12,), vocab_size=100, ignored=0)
    expected = score(case)
    call = jax.jit(score_targets, static_argnums=0) if jitted else score_targets
    got = call(Hashed(case), case.targets.astype(dtype))
    assert_bits_equal(got.log_prob, expected.log_prob)
    assert got.status.dtype == np.int32


class Hashed:
    """A case as a static argument."""

    def __init__(self, case: Case) -> None:
        self.case = case


def score_targets(case: Hashed, targets: Any) -> jax_topp.Replay:
    return score(case.case.with_(targets=targets))


def test_wide_targets_under_x64_are_not_wrapped(rng):
    """2^32 + 3 is no id, though its low half is one; -2^40 is ignored."""
    case = random_case(rng, rows=(3,), vocab_size=10, ignored=0, temperature=1.0)
    with jax.enable_x64(True):
        targets = jnp.asarray(np.array([2**32 + 3, -(2**40), case.targets[2]]))
        assert targets.dtype == jnp.int64
        r = jax.jit(score_targets, static_argnums=0)(Hashed(case), targets)
        assert np.asarray(r.status).tolist()[:2] == [Status.BAD_TARGET, Status.IGNORED]
        unsigned = jnp.asarray(np.array([2**63 + 3, 2**64 - 1, case.targets[2]], np.uint64))
        r = jax.jit(score_targets, static_argnums=0)(Hashed(case), unsigned)
        assert np.asarray(r.status).tolist()[:2] == [Status.BAD_TARGET, Status.BAD_TARGET]
    with pytest.raises(ValueError, match=r"targets\[0\] is 1099511627776, outside int32"):
        score(case.with_(targets=np.array([2**40, 1, 2])))


@pytest.mark.parametrize("x64", [False, True])
def test_sums_are_64_bits_wide_whatever_x64_says(x64, rng):
    """The forward keeps int64 sums, which JAX would narrow silently if they were made in Python."""
    case = random_case(rng, rows=(5,), vocab_size=5000, ignored=0, temperature=1.0)
    expected_gradient = None
    with jax.enable_x64(x64):
        loss = lambda z: jnp.sum(score(case, z).log_prob)  # noqa: E731
        gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(case.logits)))
        text = jax.jit(jax.grad(loss)).lower(jnp.asarray(case.logits)).as_text()
    assert re.search(r"tensor<5xi64>", text)
    with jax.enable_x64(not x64):
        expected_gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(case.logits)))
    assert_bits_equal(gradient, expected_gradient)


def test_float64_numpy_temperatures_are_rounded_once(rng):
    """Under x64 or not, an array of float64 temperatures is what float32 of it would be."""
    t = rng.uniform(0.1, 2, 6)
    case = random_case(rng, rows=(6,), vocab_size=30, temperature=t)
    expected = score(case.with_(temperature=t.astype(F32)))
    assert_bits_equal(score(case).log_prob, expected.log_prob)
    with jax.enable_x64(True):
        assert_bits_equal(score(case).log_prob, expected.log_prob)


@pytest.mark.parametrize("make", [list, tuple, np.asarray])
def test_lists_for_row_arguments(make):
    support = Support.from_lists([[1, 2], [3]])
    logits = np.linspace(-1, 1, 8, dtype=F32).reshape(2, 4)
    expected = jax_topp.replay(
        logits,
        np.array([1, 3]),
        support,
        temperature=np.array([0.5, 1.0]),
        loss_mask=np.array([True, False]),
    )
    got = jax_topp.replay(
        logits, make([1, 3]), support, temperature=make([0.5, 1.0]), loss_mask=make([1, 0])
    )
    for a, b in zip(got[:5], expected[:5], strict=True):
        assert_bits_equal(a, b)


def test_no_row_axis_at_all():
    """logits [V] and a target of shape (): one row."""
    logits = np.array([0.0, 1.0, 2.0], F32)
    with pytest.raises(ValueError, match="support must have one row for each row of the logits"):
        jax_topp.log_prob(logits, 1, Support.from_lists([[0, 1]]), temperature=1.0)


@each_layout
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)])
def test_no_rows(layout, rows, rng):
    case = random_case(rng, rows=rows, vocab_size=9, layout=layout, temperature=1.0)
    r = score(case, member_log_probs=True)
    assert r.log_prob.shape == r.status.shape == rows
    assert r.member_log_probs.shape == case.support.token_ids.shape
    gradient = jax.grad(lambda z: jnp.sum(score(case, z).log_prob))(jnp.asarray(case.logits))
    assert gradient.shape == case.logits.shape


# Nothing vocabulary-sized ---------------------------------------------------------------------------------------------


@each_layout
@each_dtype
def test_no_copy_of_the_logits(layout, dtype, rng):
    """In the compiled program only the argument, the gradient and plain references to them have V columns."""
    vocab_size = 4099
    case = on_device(
        random_case(
            rng,
            rows=(2, 3),
            vocab_size=vocab_size,
            dtype=dtype,
            layout=layout,
            max_members=50,
            narrow_vocabulary=False,
        )
    )
    weights = random_cotangents(rng, case)

    def forward(logits):
        return score(case, logits, member_log_probs=True)

    def backward(logits):
        return jax.grad(lambda z: mixed(forward(z), weights))(logits)

    for f, wide in ((forward, 0), (backward, 1)):
        text = jax.jit(f).lower(case.logits).compile().as_text()
        made = [
            line.strip()
            for line in text.splitlines()
            if re.search(rf"= \S*\[[\d,]*\b{vocab_size}\]", line)
            and not re.search(r"\b(parameter|get-tuple-element|bitcast|tuple)\(", line)
        ]
        assert len(made) == wide and all("custom-call" in line for line in made), made


def test_the_gradient_is_not_computed_where_none_is_asked_for(rng):
    case = on_device(random_case(rng, rows=(3,), vocab_size=20))
    text = jax.jit(jax.grad(lambda w: w * jnp.sum(score(case).log_prob))).lower(1.0).as_text()
    assert "jax_topp.forward" in text and "jax_topp.backward" not in text


def test_arguments_are_not_changed(rng):
    """field.md D 34: a division in place once changed what the entropy saw."""
    case = random_case(rng, rows=(5,), vocab_size=30)
    before = case.logits.copy()
    jax.grad(lambda z: jnp.sum(score(case, z).log_prob))(case.logits)
    assert_bits_equal(case.logits, before)
