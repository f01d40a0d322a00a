"""The kernels as XLA custom calls: registration, result types, and one function a target."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

OLDEST_JAX = (0, 10)
TARGETS = ("jax_topp.forward.v1", "jax_topp.members.v1", "jax_topp.backward.v1")


@functools.cache
def register() -> None:
    """Registers every target once. Lazy in JAX: no backend starts, and a missing CUDA plugin costs nothing."""
    if jax.__version_info__[:2] < OLDEST_JAX:
        raise RuntimeError(
            f"jax_topp needs jax {'.'.join(map(str, OLDEST_JAX))} or newer, found {jax.__version__}"
        )
    from . import _core

    for name, platforms in _core.ffi_targets().items():
        for platform, capsule in platforms.items():
            jax.ffi.register_ffi_target(name, capsule, platform=platform)


def _varying(*arrays: Any) -> frozenset[str]:
    """Mesh axes over which any of the arrays varies, inside shard_map(check_vma=True)."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def _align(*arrays: Any) -> list[Any]:
    """ffi_call wants every operand to vary over the same axes; pcast transposes to a psum."""
    axes = _varying(*arrays)
    aligned = []
    for x in arrays:
        missing = axes - _varying(x)
        aligned.append(lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x)
    return aligned


def _result(shape: tuple[int, ...], dtype: Any, operands: list[Any]) -> jax.ShapeDtypeStruct:
    """A bare ShapeDtypeStruct would claim a result that is the same on every device of a shard_map."""
    axes = _varying(*operands)
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    mesh = jax.typeof(operands[0]).sharding.mesh
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(mesh, P()),
        manual_axis_type=jax.sharding.ManualAxisType(varying=axes),
    )


def _call(target: str, results: Any, operands: list[Any], vocab_size: int, options: int) -> Any:
    register()
    return jax.ffi.ffi_call(target, results)(
        *operands, vocab_size=np.int64(vocab_size), options=np.int32(options)
    )


def forward(operands: tuple[Any, ...], *, vocab_size: int, options: int) -> list[Any]:
    """log_prob, logsumexp, support_entropy, target_logit, status, max, sum, weighted_sum; one entry a row."""
    aligned = _align(*operands)
    rows = aligned[0].shape[:-1]
    dtypes = [np.float32] * 4 + [np.int32, np.float32, np.int64, np.int64]
    results = [_result(rows, dtype, aligned) for dtype in dtypes]
    return _call("jax_topp.forward.v1", results, aligned, vocab_size, options)


def members(operands: tuple[Any, ...], *, vocab_size: int, options: int) -> Any:
    """Member log-probs, shaped as the token ids; the operands end with status, max, sum."""
    aligned = _align(*operands)
    result = _result(aligned[1].shape, np.float32, aligned)
    return _call("jax_topp.members.v1", result, aligned, vocab_size, options)


def backward(operands: tuple[Any, ...], *, vocab_size: int, options: int) -> Any:
    """The logits' gradient; the operands end with status, max, sum, weighted_sum and five cotangents."""
    aligned = _align(*operands)
    result = _result(aligned[0].shape, aligned[0].dtype, aligned)
    return _call("jax_topp.backward.v1", result, aligned, vocab_size, options)
