"""Mistaken calls, in both front ends: a TypeError or ValueError that names the argument and the shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_topp import Support

from frontends import needs_torch, to_torch
from supports import in_kind

F32 = np.float32


class Jax:
    name = "jax"

    @staticmethod
    def array(x: np.ndarray) -> Any:
        import jax.numpy as jnp

        return jnp.asarray(x)

    @staticmethod
    def module() -> Any:
        import jax_topp

        return jax_topp


class Torch:
    name = "torch"

    @staticmethod
    def array(x: np.ndarray) -> Any:
        return to_torch(x)

    @staticmethod
    def module() -> Any:
        import jax_topp.torch

        return jax_topp.torch


each = pytest.mark.parametrize(
    "side", [Jax, pytest.param(Torch, marks=needs_torch)], ids=lambda side: side.name
)


def arguments(side: Any, **changes: Any) -> dict[str, Any]:
    """A good call of [2, 3] rows over 8 ids; arrays among the changes are converted."""
    given = {
        "logits": np.zeros((2, 3, 8), F32),
        "targets": np.ones((2, 3), np.int32),
        "support": Support.from_lists([[[1, 2]] * 3] * 2),
        "temperature": 1.0,
    }
    given.update(changes)
    out = {}
    for name, x in given.items():
        if isinstance(x, np.ndarray):
            x = side.array(x)
        elif isinstance(x, Support):
            x = in_kind(x, side.name)
        out[name] = x
    return out


def call(side: Any, function: str, given: dict[str, Any]) -> Any:
    given = dict(given)
    positional = [given.pop(n) for n in ("logits", "targets", "support") if n in given]
    return getattr(side.module(), function)(*positional, **given)


SIX = np.zeros((2, 3), np.int32)
# changes to the good call, error, what the message must say
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "integer logits": (
        {"logits": np.zeros((2, 3, 8), np.int32)},
        TypeError,
        "logits must be bfloat16, float16 or float32, got int32",
    ),
    "logits without an axis": (
        {"logits": np.zeros((), F32)},
        ValueError,
        r"logits must be \[\.\.\., V\], got the shape \(\)",
    ),
    "logits as a list": ({"logits": [[0.0]]}, TypeError, "logits must be a .*got list"),
    "logits None": ({"logits": None}, TypeError, "logits must be .*got NoneType"),
    "targets transposed": (
        {"targets": SIX.T.copy()},
        ValueError,
        r"targets are \(3, 2\), logits are \(2, 3, 8\)",
    ),
    "targets flat": (
        {"targets": SIX.reshape(-1)},
        ValueError,
        r"targets are \(6,\), logits are \(2, 3, 8\)",
    ),
    "targets with a last axis": (
        {"targets": SIX[..., None]},
        ValueError,
        r"targets are \(2, 3, 1\)",
    ),
    "float targets": (
        {"targets": SIX.astype(F32)},
        TypeError,
        "targets must be integers, got .*float32",
    ),
    "bool targets": (
        {"targets": SIX.astype(bool)},
        TypeError,
        "targets must be integers, got .*bool",
    ),
    "targets None": ({"targets": None}, TypeError, "targets must be .*got NoneType"),
    "a support of lists": (
        {"support": [[1]]},
        TypeError,
        r"support must be a jax_topp.Support, got list \(Support.from_lists",
    ),
    "a dense mask": (
        {"support": np.ones((2, 3, 8), bool)},
        TypeError,
        "support must be a jax_topp.Support, got",
    ),
    "a flat support": (
        {"support": Support.from_lists([[1]] * 6)},
        ValueError,
        r"support has rows \(6,\), logits are \(2, 3, 8\)",
    ),
    "a support of fewer rows": (
        {"support": Support.from_lists([[[1]] * 2] * 2)},
        ValueError,
        r"support has rows \(2, 2\)",
    ),
    "loss_mask flat": (
        {"loss_mask": np.ones(6, bool)},
        ValueError,
        r"loss_mask is \(6,\), the rows are \(2, 3\)",
    ),
    "loss_mask that would broadcast": (
        {"loss_mask": np.ones((1, 3), bool)},
        ValueError,
        r"loss_mask is \(1, 3\)",
    ),
    "loss_mask as text": ({"loss_mask": "all"}, TypeError, "loss_mask must be .*got str"),
    "complex loss_mask": (
        {"loss_mask": SIX.astype(np.complex64)},
        TypeError,
        "loss_mask must be bool or numbers, got .*complex64",
    ),
    "T = 0": (
        {"temperature": 0.0},
        ValueError,
        "temperature must be positive and finite in float32, got 0.0",
    ),
    "T < 0": ({"temperature": -1}, ValueError, "positive and finite in float32, got -1"),
    "T NaN": ({"temperature": float("nan")}, ValueError, "got nan"),
    "T infinite": ({"temperature": float("inf")}, ValueError, "got inf"),
    "T that float32 rounds to 0": ({"temperature": 1e-60}, ValueError, "got 1e-60"),
    "T that float32 rounds to infinity": (
        {"temperature": 10**60},
        ValueError,
        "positive and finite",
    ),
    "T past any float": ({"temperature": 10**400}, ValueError, "positive and finite"),
    "T of NumPy": ({"temperature": np.float64(0)}, ValueError, "positive and finite"),
    "T True": (
        {"temperature": True},
        TypeError,
        "temperature must be a number or a float .*got a bool",
    ),
    "T None": ({"temperature": None}, TypeError, "temperature must be .*got NoneType"),
    "T as text": ({"temperature": "1"}, TypeError, "temperature must be .*got str"),
    "T complex": (
        {"temperature": SIX.astype(np.complex64)},
        TypeError,
        "temperature must be real numbers, got .*complex64",
    ),
    "T per column": (
        {"temperature": np.ones(3, F32)},
        ValueError,
        r"temperature is \(3,\), the rows are \(2, 3\)",
    ),
    "T per row of another shape": (
        {"temperature": np.ones((3, 2), F32)},
        ValueError,
        r"temperature is \(3, 2\)",
    ),
    "T with a last axis": (
        {"temperature": np.ones((2, 3, 1), F32)},
        ValueError,
        r"temperature is \(2, 3, 1\)",
    ),
    "missing": (
        {"missing": "error"},
        ValueError,
        "missing must be 'neg_inf' or 'include', got 'error'",
    ),
    "missing None": ({"missing": None}, ValueError, "missing must be .*got None"),
    "empty": ({"empty": True}, ValueError, "empty must be 'neg_inf' or 'full_vocab', got True"),
    "vocab_size past the logits": (
        {"vocab_size": 9},
        ValueError,
        r"vocab_size \(9\) must lie between 0 and the logits' last axis \(8\)",
    ),
    "vocab_size negative": ({"vocab_size": -1}, ValueError, r"vocab_size \(-1\)"),
    "vocab_size float": ({"vocab_size": 8.0}, TypeError, "vocab_size must be an int, got float"),
    "vocab_size bool": ({"vocab_size": True}, TypeError, "vocab_size must be an int, got bool"),
    "a vocabulary too large": (
        {"logits": np.broadcast_to(np.zeros((), np.float16), (2, 3, 2**18 + 1))},
        ValueError,
        r"the logits' last axis \(262145\) is above 262144",
    ),
}
FUNCTIONS = {
    (mistake, function)
    for mistake, (changes, _, _) in MISTAKES.items()
    for function in ("replay", "log_prob", "member_log_probs")
    if function != "member_log_probs" or not {"targets", "missing", "empty"} & changes.keys()
}


@each
@pytest.mark.parametrize(("mistake", "function"), sorted(FUNCTIONS))
def test_mistakes_are_named(side, mistake, function):
    changes, error, message = MISTAKES[mistake]
    given = arguments(side, **changes)
    if function == "member_log_probs":
        del given["targets"]
    with pytest.raises(error, match=message):
        call(side, function, given)


@each
def test_the_good_call_is_good(side):
    assert call(side, "log_prob", arguments(side)).shape == (2, 3)


@each
def test_temperature_is_never_guessed(side):
    """field.md D 2: a default of 1 would hide that the engine had another."""
    given = arguments(side)
    del given["temperature"]
    with pytest.raises(TypeError, match="temperature"):
        call(side, "log_prob", given)


@needs_torch
@pytest.mark.parametrize("name", ["logits", "targets", "support", "temperature", "loss_mask"])
def test_arrays_of_the_other_framework(name):
    more = {"temperature": np.ones((2, 3), F32), "loss_mask": np.ones((2, 3), bool)}
    for side, other, message in (
        (Jax, Torch, "is a torch tensor: use jax_topp.torch"),
        (Torch, Jax, "must be a torch tensor, got a JAX array"),
    ):
        given = arguments(side, **more)
        given[name] = arguments(other, **more)[name]
        with pytest.raises(TypeError, match=name + r"(\.\w+)? " + message):
            call(side, "replay", given)


@needs_torch
def test_tensors_on_several_devices():
    given = arguments(Torch, loss_mask=np.ones((2, 3), bool), temperature=np.ones((2, 3), F32))
    for name in ("targets", "loss_mask", "temperature"):
        moved = {**given, name: given[name].to("meta")}
        with pytest.raises(
            ValueError, match=f"{name} must be on the logits' device: {name} on meta, logits on cpu"
        ):
            call(Torch, "replay", moved)
    with pytest.raises(ValueError, match=r"support.token_ids must be on the logits' device"):
        call(Torch, "replay", {**given, "support": given["support"].to("meta")})
    host = given["support"].numpy()
    with pytest.raises(
        ValueError, match=r"support.token_ids is on the host.*support.to\(logits.device\)"
    ):
        call(Torch, "replay", {**given, "support": host, "logits": given["logits"].to("meta")})


@needs_torch
def test_float64_logits():
    with pytest.raises(
        TypeError, match="logits must be bfloat16, float16 or float32, got float64; cast"
    ):
        call(Torch, "replay", arguments(Torch, logits=np.zeros((2, 3, 8))))
    import jax

    with jax.enable_x64(True), pytest.raises(TypeError, match="got float64; cast"):
        call(Jax, "replay", arguments(Jax, logits=np.zeros((2, 3, 8))))


@each
@pytest.mark.parametrize("in_replay", [True, False])
def test_rows_that_share_slots_have_no_member_log_probs(side, in_replay):
    """A slot holds one row's value; on the host it is refused, and the scores alone need no slots."""
    ids = np.array([1, 2, 3], np.int32)
    support = Support(ids, np.array([0, 1]), np.array([2, 3]))
    given = arguments(
        side, logits=np.zeros((2, 8), F32), targets=np.ones(2, np.int32), support=support
    )
    assert call(side, "log_prob", given).shape == (2,)
    message = "rows 0 and 1 of piece 0 share slots"
    if in_replay:
        with pytest.raises(ValueError, match=message):
            call(side, "replay", {**given, "member_log_probs": True})
    else:
        del given["targets"]
        with pytest.raises(ValueError, match=message):
            call(side, "member_log_probs", given)


@needs_torch
def test_a_dtensor_is_refused_with_the_way_out():
    import torch

    class DTensor(torch.Tensor):
        pass

    given = arguments(Torch)
    given["logits"] = given["logits"].as_subclass(DTensor)
    with pytest.raises(TypeError, match=r"logits is a DTensor: pass local tensors, or .*local_map"):
        call(Torch, "replay", given)
