"""One number everywhere: the same bits whatever the framework, the layout, the order, the batch and the threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jax_topp import Replay, Support, _core, reference

from cases import DTYPES, Case, lay_out, member_bounds, random_case, random_cotangents, row_ids
from compare import assert_bits_equal, assert_within, value_bounds
from frontends import JaxFrontend, TorchFrontend, each_frontend, needs_torch
from odd_cases import odd_case

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_layout = pytest.mark.parametrize("layout", ["ragged", "padded"])


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the number of threads, and sets it back."""
    before = _core.num_threads()
    yield _core.set_num_threads
    _core.set_num_threads(before)


def assert_same(actual: Replay, expected: Replay, what: str = "") -> None:
    for name, a, e in zip(Replay._fields, actual, expected, strict=True):
        assert (a is None) == (e is None), name
        if a is not None:
            assert_bits_equal(a, e, f"{what} {name}")


def take_rows(case: Case, rows: Any) -> Case:
    """Some rows of a case with one row axis."""
    temperature = case.temperature
    if np.ndim(temperature) and np.shape(temperature)[0] > 1:
        temperature = temperature[rows]
    return case.with_(
        logits=case.logits[rows],
        targets=case.targets[rows],
        support=case.support.take(np.arange(len(case.targets))[rows]),
        temperature=temperature,
        loss_mask=None if case.loss_mask is None else case.loss_mask[rows],
    )


# Frameworks
# ----------------------------------------------------------------------------------------------------------------------


@needs_torch
@each_dtype
@each_layout
@pytest.mark.parametrize("missing", ["neg_inf", "include"])
@pytest.mark.parametrize("empty", ["neg_inf", "full_vocab"])
def test_jax_equals_torch(rng, dtype, layout, missing, empty):
    options = {"missing": missing, "empty": empty}
    for make, rows in ((random_case, (6, 50)), (odd_case, (3, 100))):
        case = make(rng, rows=rows, vocab_size=257, dtype=dtype, layout=layout)
        jax_result, torch_result = (
            frontend.replay(case, member_log_probs=True, **options)
            for frontend in (JaxFrontend(), TorchFrontend())
        )
        assert_same(jax_result, torch_result)
        cotangents = random_cotangents(rng, case)
        assert_bits_equal(
            JaxFrontend().gradient(case, cotangents, **options),
            TorchFrontend().gradient(case, cotangents, **options),
            "gradient",
        )
        members = JaxFrontend().member_log_probs(case)
        assert_bits_equal(members, TorchFrontend().member_log_probs(case), "member_log_probs")
        c = rng.standard_normal(members.shape).astype(np.float32)
        assert_bits_equal(
            JaxFrontend().member_gradient(case, c), TorchFrontend().member_gradient(case, c)
        )


@each_dtype
def test_jit_equals_eager(rng, dtype):
    import jax_topp

    case = odd_case(rng, rows=(4, 60), vocab_size=130, dtype=dtype)
    eager = jax_topp.replay(*case.operands, member_log_probs=True, **case.options)
    assert_same(JaxFrontend().replay(case, member_log_probs=True), eager)


@needs_torch
@each_dtype
def test_grad_forward_equals_no_grad(rng, dtype):
    """What a forward keeps for its backward changes nothing of what it returns."""
    import jax
    import torch

    import jax_topp
    import jax_topp.torch as topp

    from frontends import to_torch

    case = random_case(rng, rows=(80,), vocab_size=300, dtype=dtype)
    plain = JaxFrontend().replay(case)

    def score(logits: Any) -> Any:
        return jax_topp.replay(logits, case.targets, case.support, **case.options)

    assert_same(jax.vjp(score, jax.numpy.asarray(case.logits))[0], plain, "jax.vjp")
    logits = to_torch(case.logits).requires_grad_()
    keywords = {
        "temperature": torch.as_tensor(case.temperature),
        "loss_mask": None if case.loss_mask is None else to_torch(case.loss_mask),
        "vocab_size": case.vocab_size,
    }
    assert_same(topp.replay(logits, to_torch(case.targets), case.support, **keywords), plain)
    with torch.no_grad():
        assert_same(topp.replay(logits, to_torch(case.targets), case.support, **keywords), plain)


# Supports
# ----------------------------------------------------------------------------------------------------------------------


def every_reader(members: list[np.ndarray], vocab_size: int) -> dict[str, Support]:
    """The same rows, read from each format."""
    lists = [ids.tolist() for ids in members]
    sizes = np.array([len(ids) for ids in members])
    flat = np.concatenate(members).astype(np.int32)
    padded = np.full((len(members), max(sizes) + 3), -1, np.int32)
    bits = np.zeros((len(members), vocab_size), bool)
    for n, ids in enumerate(members):
        padded[n, : len(ids)] = ids
        bits[n, ids] = True
    log_probs = np.where(padded < 0, -np.inf, -1.0).astype(np.float32)
    counted = np.where(padded < 0, 0, padded)  # 0 is an id, and the padding
    return {
        "lists": Support.from_lists(lists),
        "sampling mask": Support.from_sampling_mask(lists),
        "CSR": Support.from_csr(flat, np.concatenate([[0], np.cumsum(sizes)])),
        "padded": Support.from_padded(padded),
        "counts": Support.from_padded(counted, sizes),
        "bit mask": Support.from_bitmask(np.packbits(bits, -1, bitorder="little"), vocab_size),
        "top log-probs": Support.from_top_log_probs(np.maximum(padded, 0), log_probs),
    }


@each_frontend
@each_dtype
def test_every_reader(rng, frontend, dtype):
    case = random_case(rng, rows=(60,), vocab_size=600, dtype=dtype, narrow_vocabulary=False)
    members = [ids[ids >= 0] for ids in row_ids(case)]
    members[3] = np.union1d(members[3], 0)  # the id that zero padding could hide
    expected = frontend.replay(case.with_(support=lay_out(rng, members, case.rows, "ragged")))
    for name, support in every_reader(members, 600).items():
        assert_same(frontend.replay(case.with_(support=support)), expected, name)


@each_frontend
@each_dtype
@each_layout
@pytest.mark.parametrize("vocab_size", [70, 3000])  # pairs, and a bit map of the vocabulary
def test_order_and_repeats(rng, frontend, dtype, layout, vocab_size):
    case = random_case(rng, rows=(50,), vocab_size=vocab_size, dtype=dtype, layout=layout)
    expected = frontend.replay(case)
    shuffled = []
    for ids in row_ids(case):
        ids = np.append(ids, rng.choice(ids, size=rng.integers(0, 5)))  # repeats, padding too
        shuffled.append(rng.permutation(ids))
    support = lay_out(rng, shuffled, case.rows, layout)
    assert_same(frontend.replay(case.with_(support=support)), expected)


# Batches and threads
# ----------------------------------------------------------------------------------------------------------------------


@each_frontend
@each_dtype
def test_a_row_alone_and_in_a_batch_of_4096(rng, frontend, dtype):
    case = odd_case(rng, rows=(4096,), vocab_size=150, dtype=dtype)
    cotangents = random_cotangents(rng, case)._replace(
        member_log_probs=np.zeros(case.support.token_ids.shape, np.float32)
    )
    together = frontend.replay(case)
    gradient = frontend.gradient(case, cotangents)
    for n in [0, 4095, *rng.choice(4096, size=14, replace=False)]:
        rows = slice(n, n + 1)
        alone = take_rows(case, rows)
        assert_same(
            frontend.replay(alone), Replay(*(None if x is None else x[rows] for x in together))
        )
        c = cotangents._replace(**{k: v[rows] for k, v in cotangents._asdict().items() if v.ndim})
        c = c._replace(member_log_probs=cotangents.member_log_probs)
        assert_bits_equal(frontend.gradient(alone, c), gradient[rows], f"gradient of row {n}")


@each_frontend
def test_batch_shapes(rng, frontend):
    case = random_case(rng, rows=(120,), vocab_size=90, layout="padded", temperature=0.8)
    flat = frontend.replay(case)
    for rows in ((2, 60), (4, 5, 6), (120, 1), (1, 120), (2, 3, 4, 5)):
        shaped = case.with_(
            logits=case.logits.reshape(*rows, -1),
            targets=case.targets.reshape(rows),
            support=Support(case.support.token_ids.reshape(*rows, -1)),
            loss_mask=case.loss_mask.reshape(rows),
        )
        result = frontend.replay(shaped)
        assert_same(Replay(*(None if x is None else x.reshape(120) for x in result)), flat)


@each_frontend
@each_layout
def test_threads(rng, threads, frontend, layout):
    case = odd_case(rng, rows=(2, 3000), vocab_size=60, layout=layout)
    cotangents = random_cotangents(rng, case)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(
            (
                frontend.replay(case, member_log_probs=True, empty="full_vocab"),
                frontend.gradient(case, cotangents, empty="full_vocab"),
            )
        )
    for result, gradient in results[1:]:
        assert_same(result, results[0][0])
        assert_bits_equal(gradient, results[0][1], "gradient")


# Denormal numbers, which XLA:CPU flushes to zero in its own code
# ----------------------------------------------------------------------------------------------------------------------


def denormal_case(rng: np.random.Generator, dtype: str) -> Case:
    """Logits of the dtype's denormals, and temperatures that bring them back to ordinary size."""
    smallest = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[dtype]
    steps = rng.integers(-60, 60, (200, 40))
    logits = (steps * smallest).astype(np.float64).astype(np.float32).astype(DTYPES[dtype])
    assert (logits.astype(np.float64) == steps * smallest).all()
    members = [np.sort(rng.choice(40, size=rng.integers(1, 12), replace=False)) for _ in steps]
    temperature = np.where(rng.random(200) < 0.5, smallest * 8, 1.0).astype(np.float32)
    return Case(
        logits=logits,
        targets=np.array([rng.choice(ids) for ids in members]),
        support=lay_out(rng, members, (200,), "ragged"),
        temperature=temperature,
    )


@each_frontend
@each_dtype
def test_denormals(rng, frontend, dtype):
    case = denormal_case(rng, dtype)
    expected = reference.replay(*case.operands, **case.options)
    result = frontend.replay(case)
    assert not np.any(result.status)
    bounds = value_bounds(expected, member_bounds(case))
    for name in ("log_prob", "logsumexp", "support_entropy"):
        assert_within(getattr(result, name), getattr(expected, name), getattr(bounds, name), name)
    with np.errstate(under="ignore"):
        assert_bits_equal(result.target_logit, expected.target_logit.astype(np.float32))
    # tiny cotangents: denormal gradients
    c = random_cotangents(rng, case)
    c = c._replace(**{k: (v * np.float32(2.0**-140)) for k, v in c._asdict().items()})
    expected = reference.gradient(*case.operands, **case.options, cotangents=c)
    gradient = frontend.gradient(case, c).astype(np.float64)
    with np.errstate(under="ignore", over="ignore"):
        assert_within(gradient, expected.astype(DTYPES[dtype]), 2.0**-149 + np.abs(expected) / 64)
    if dtype == "float32":
        assert np.any((gradient != 0) & (np.abs(gradient) < 2.0**-126))
