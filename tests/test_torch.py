"""The torch front end: registrations, compilation, strides, devices, and what autograd keeps and allocates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_topp import Replay, Status, Support

from cases import DTYPES, Case, random_case, random_cotangents
from compare import assert_bits_equal
from frontends import to_torch
from supports import each_layout, in_kind

torch = pytest.importorskip("torch")
topp = pytest.importorskip("jax_topp.torch")

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Call:
    """A case in tensors, ready to be called with other logits."""

    def __init__(self, case: Case, **policies: Any) -> None:
        self.logits = to_torch(case.logits)
        self.targets = to_torch(case.targets)
        self.support = in_kind(case.support, "torch")
        scale = case.temperature
        self.options = {
            "temperature": to_torch(scale) if isinstance(scale, np.ndarray) else scale,
            "loss_mask": None if case.loss_mask is None else to_torch(case.loss_mask),
            "vocab_size": case.vocab_size,
            **policies,
        }

    def __call__(self, logits: Any = None, **changes: Any) -> Replay:
        logits = self.logits if logits is None else logits
        return topp.replay(logits, self.targets, self.support, **{**self.options, **changes})


def assert_same(a: Replay, b: Replay) -> None:
    for name, x, y in zip(Replay._fields, a, b, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert_bits_equal(x, y, name)


# Registrations --------------------------------------------------------------------------------------------------------


@each_layout
@each_dtype
@pytest.mark.parametrize("members", [False, True])
def test_opcheck(layout, dtype, members, rng):
    """Schema, fake and autograd registrations, and both under AOT dispatch with dynamic shapes."""
    case = random_case(rng, rows=(2, 3), vocab_size=20, dtype=dtype, layout=layout)
    call = Call(case)
    from jax_topp.torch import _ops
    from jax_topp.torch._operands import prepare

    operands = prepare(
        call.logits.requires_grad_(), call.targets, call.support, call.options["temperature"], None
    )
    torch.library.opcheck(_ops.replay, (*operands, 20, 0, members))
    results = _ops.replay(*operands, 20, 0, members)
    saved = [x.detach() for x in results[4:8]]
    cotangents = [torch.ones(case.rows) for _ in range(4)]
    slots = torch.ones(call.support.token_ids.shape) if members else None
    arguments = (
        *(None if x is None else x.detach() for x in operands),
        saved,
        cotangents,
        slots,
        20,
        0,
    )
    torch.library.opcheck(_ops.replay_backward, arguments)


@each_layout
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(layout, dynamic, rng):
    case = random_case(rng, rows=(3, 4), vocab_size=40, layout=layout, dtype="bfloat16")
    call = Call(case, member_log_probs=True)

    def loss(logits, targets, support):
        r = topp.replay(logits, targets, support, **call.options)
        return torch.where(r.valid, r.log_prob + r.support_entropy, 0).sum(), r

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    gradients = []
    for f in (loss, compiled):
        logits = call.logits.clone().requires_grad_()
        value, r = f(logits, call.targets, call.support)
        value.backward()
        gradients.append(logits.grad)
        assert_same(r, call())
    assert_bits_equal(gradients[1], gradients[0])


def test_fake_tensors_have_the_shapes_of_real_ones(rng):
    from torch._subclasses import FakeTensorMode

    case = random_case(rng, rows=(2, 3), vocab_size=20, dtype="bfloat16", narrow_vocabulary=False)
    call = Call(case, member_log_probs=True)
    real = call()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = Call(case, member_log_probs=True)
        fake.logits, fake.targets = (mode.from_tensor(x) for x in (call.logits, call.targets))
        fake.support = call.support._map(mode.from_tensor)
        fake.options = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v
            for k, v in call.options.items()
        }
        logits = fake.logits.requires_grad_()
        r = fake(logits)
        for a, b in zip(r, real, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        (gradient,) = torch.autograd.grad(r.log_prob.sum(), logits)
        assert (gradient.shape, gradient.dtype) == (logits.shape, logits.dtype)


def test_a_compiled_step_does_not_compile_again_for_another_temperature(rng):
    call = Call(random_case(rng, rows=(5,), vocab_size=20, temperature=1.0, ignored=0))
    compiled = torch.compile(
        lambda t: call(temperature=t).log_prob, fullgraph=True, backend="aot_eager"
    )
    torch._dynamo.reset()
    counter = torch._dynamo.utils.counters
    counter.clear()
    for t in (0.5, 0.7, 1.3):
        assert_bits_equal(compiled(torch.tensor(t)), call(temperature=t).log_prob)
    assert counter["stats"]["unique_graphs"] == 1


# Strides --------------------------------------------------------------------------------------------------------------


def strided_views(logits: Any) -> dict[str, Any]:
    """The same values in other strides, none of them contiguous."""
    b, t, v = logits.shape
    shifted = torch.empty((b, t + 1, v), dtype=logits.dtype)
    shifted[:, :-1] = logits
    wide = torch.empty((b, t, v + 7), dtype=logits.dtype)
    wide[..., :v] = logits
    by_column = torch.empty((v, b, t), dtype=logits.dtype).permute(1, 2, 0)
    by_column.copy_(logits)
    swapped = torch.empty((t, b, v), dtype=logits.dtype).transpose(0, 1)
    swapped.copy_(logits)
    every_second = torch.empty((b, t, 2 * v), dtype=logits.dtype)[..., ::2]
    every_second.copy_(logits)
    return {
        "logits[:, :-1]": shifted[:, :-1],
        "logits[..., :v]": wide[..., :v],
        "columns outermost": by_column,
        "rows swapped": swapped,
        "every second column": every_second,
    }


@each_dtype
def test_strided_rows_are_read_where_they_lie(dtype, rng):
    case = random_case(rng, rows=(3, 4), vocab_size=50, dtype=dtype, narrow_vocabulary=False)
    call = Call(case, member_log_probs=True)
    weights = [to_torch(w) for w in random_cotangents(rng, case)]
    expected = call()

    def gradient(logits):
        logits = logits.detach().requires_grad_()
        r = call(logits)
        return torch.autograd.grad([*r[:4], r.member_log_probs], logits, weights)[0]

    whole = gradient(call.logits)
    for name, logits in strided_views(call.logits).items():
        assert not logits.is_contiguous(), name
        assert_same(call(logits), expected)
        assert_bits_equal(gradient(logits), whole, name)


def test_shared_and_repeated_logits(rng):
    """expand() rows have stride 0: all rows read one."""
    case = random_case(rng, rows=(1, 1), vocab_size=50, temperature=0.8, ignored=0)
    call = Call(case)
    n = 5
    call.targets = call.targets.expand(n, 1)
    call.support = Support.stack([call.support[0]] * n)
    logits = call.logits.expand(n, 1, -1)
    r = call(logits)
    assert_bits_equal(r.log_prob, r.log_prob[:1].expand(n, 1))


def test_too_many_axes_that_cannot_merge():
    logits = torch.zeros((2,) * 6)[..., :1].permute(4, 3, 2, 1, 0, 5)
    rows = tuple(logits.shape[:-1])
    support = Support(torch.zeros((*rows, 1), dtype=torch.int32))
    with pytest.raises(ValueError, match=r"5 axes .* call logits.contiguous\(\)"):
        topp.log_prob(logits, torch.zeros(rows, dtype=torch.int64), support, temperature=1.0)


# Dtypes, values, modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_targets_of_any_width(dtype, rng):
    case = random_case(rng, rows=(12,), vocab_size=100, ignored=0)
    call = Call(case)
    expected = call()
    call.targets = torch.from_numpy(case.targets.astype(dtype))
    assert_same(call(), expected)


def test_wide_targets_are_not_wrapped(rng):
    case = random_case(rng, rows=(4,), vocab_size=10, ignored=0, temperature=1.0)
    call = Call(case)
    call.targets = torch.tensor([2**32 + 3, 2**40, -(2**40), int(case.targets[3])])
    assert call().status.tolist()[:3] == [Status.BAD_TARGET, Status.BAD_TARGET, Status.IGNORED]
    call.targets = torch.from_numpy(np.array([2**63 + 3, 2**64 - 1, 2**32 + 3, 10], np.uint64))
    assert call().status.tolist() == [Status.BAD_TARGET] * 4


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int64"])
def test_temperatures_of_other_dtypes(dtype, rng):
    case = random_case(rng, rows=(6,), vocab_size=30)
    t = torch.tensor([1, 2, 1, 2, 1, 2]).to(getattr(torch, dtype))
    call = Call(case.with_(temperature=1.0))
    assert_same(call(temperature=t), call(temperature=t.float()))


@pytest.mark.parametrize("shape", [(), (1, 1), (3, 1), (1, 4), (3, 4)])
def test_temperature_shapes(shape, rng):
    t = rng.uniform(0.2, 2, shape).astype(np.float32)
    case = random_case(rng, rows=(3, 4), vocab_size=30)
    call = Call(case)
    every = np.broadcast_to(t, (3, 4)).copy()
    assert_same(call(temperature=torch.tensor(t)), call(temperature=torch.tensor(every)))


def test_numpy_supports_are_taken_for_logits_on_the_cpu(rng):
    case = random_case(rng, rows=(6,), vocab_size=30)
    call = Call(case)
    expected = call()
    call.support = case.support
    assert_same(call(), expected)


def test_inference_mode_and_no_grad(rng):
    call = Call(random_case(rng, rows=(6,), vocab_size=30), member_log_probs=True)
    logits = call.logits.clone().requires_grad_()
    expected = call(logits)
    assert expected.log_prob.requires_grad and not expected.status.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            r = call(logits)
            assert not r.log_prob.requires_grad
            assert_same(r, expected)


def test_autocast_leaves_the_score_alone(rng):
    call = Call(random_case(rng, rows=(6,), vocab_size=30, dtype="float32"))
    expected = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(call(), expected)


# Autograd -------------------------------------------------------------------------------------------------------------


def test_temperature_has_no_gradient(rng):
    call = Call(random_case(rng, rows=(3,), vocab_size=20))
    t = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(TypeError, match=r"temperature is not differentiable .*detach"):
        call(temperature=t)
    with torch.no_grad():
        call(temperature=t)


def test_second_derivatives_are_refused(rng):
    call = Call(random_case(rng, rows=(3,), vocab_size=20, ignored=0))
    logits = call.logits.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(logits).log_prob.sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), logits)


def test_checkpoint_and_hooks(rng):
    from torch.utils.checkpoint import checkpoint

    case = random_case(rng, rows=(5,), vocab_size=30, ignored=0)
    call = Call(case)
    gradients = []
    for f in (
        lambda z: call(z).log_prob,
        lambda z: checkpoint(lambda x: call(x).log_prob, z, use_reentrant=False),
    ):
        logits = call.logits.clone().requires_grad_()
        (f(logits) * 2).sum().backward()
        gradients.append(logits.grad)
    assert_bits_equal(gradients[1], gradients[0])


def test_no_gradient_is_made_where_none_is_asked_for(rng, monkeypatch):
    """A frozen head must not cost a buffer of V columns (field.md D 42)."""
    from jax_topp.torch import _ops

    calls = []
    kernel = _ops._core.backward
    monkeypatch.setattr(
        _ops._core, "backward", lambda *a, **k: (calls.append(1), kernel(*a, **k))[1]
    )
    call = Call(random_case(rng, rows=(3,), vocab_size=20, ignored=0))
    r = call()
    assert not r.log_prob.requires_grad
    weight = torch.ones(3, requires_grad=True)
    (r.log_prob * weight).sum().backward()
    assert not calls and call.logits.grad is None
    logits = call.logits.clone().requires_grad_()
    call(logits).log_prob.sum().backward()
    assert calls == [1]


def test_the_logits_are_kept_not_copied(rng):
    """Autograd saves the caller's own logits; changing them in between is an error, not a wrong gradient."""
    call = Call(random_case(rng, rows=(3,), vocab_size=20, ignored=0))
    saved = []
    logits = call.logits.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        call(logits)
    assert [x.data_ptr() for x in saved if x.shape == logits.shape] == [logits.data_ptr()]
    leaf = call.logits.clone().requires_grad_()
    z = leaf * 1
    loss = call(z).log_prob.sum()
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_only_some_results_have_a_cotangent(rng):
    case = random_case(rng, rows=(5,), vocab_size=30, ignored=0)
    call = Call(case, member_log_probs=True)
    for name in ("log_prob", "logsumexp", "support_entropy", "target_logit", "member_log_probs"):
        logits = call.logits.clone().requires_grad_()
        r = call(logits)
        value = getattr(r, name)
        weight = to_torch(rng.standard_normal(value.shape).astype(np.float32))
        (alone,) = torch.autograd.grad(value, logits, weight, retain_graph=True)
        every = [
            getattr(r, n)
            for n in (
                "log_prob",
                "logsumexp",
                "support_entropy",
                "target_logit",
                "member_log_probs",
            )
        ]
        zeros = [weight if v is value else torch.zeros_like(v) for v in every]
        (among,) = torch.autograd.grad(every, logits, zeros)
        assert_bits_equal(alone, among, name)
