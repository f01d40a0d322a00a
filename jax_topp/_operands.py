"""Checks a JAX call's arguments and turns them into what the kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _arrays, contract
from .support import Support


class Rows(NamedTuple):
    """A call's array arguments, checked; still the caller's own arrays."""

    logits: Any
    support: Support
    targets: Any  # None: every row is active
    temperature: Any
    loss_mask: Any

    def kernel_operands(self) -> tuple[Any, ...]:
        """logits, token_ids, begins, ends, targets, temperature; traced, so that nothing is dispatched twice."""
        rows = self.logits.shape[:-1]
        no_extents = jnp.zeros((0,), jnp.int32)
        padded = self.support.begins is None
        temperature = jnp.asarray(self.temperature, jnp.float32)
        return (
            self.logits,
            self.support.token_ids,
            no_extents if padded else self.support.begins,
            no_extents if padded else self.support.ends,
            _row_targets(self.targets, self.loss_mask, rows),
            temperature if temperature.ndim == 0 else jnp.broadcast_to(temperature, rows),
        )


def _row_targets(targets: Any, loss_mask: Any, rows: tuple[int, ...]) -> jax.Array:
    """int32, negative where the row is ignored: all that the kernels need to know of a loss mask."""
    ids = jnp.zeros(rows, jnp.int32) if targets is None else _saturate(targets)
    return ids if loss_mask is None else jnp.where(loss_mask != 0, ids, -1)


def _saturate(targets: Any) -> jax.Array:
    """int32 of any integers: out-of-range ones keep their side of the vocabulary instead of wrapping."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    info = jnp.iinfo(targets.dtype)
    if info.max > high or info.min < low:
        targets = lax.clamp(
            np.asarray(max(low, int(info.min)), targets.dtype),
            targets,
            np.asarray(high, targets.dtype),
        )
    return lax.convert_element_type(targets, jnp.int32)


def prepare(logits: Any, targets: Any, support: Support, temperature: Any, loss_mask: Any) -> Rows:
    """Checks shapes and dtypes; raises TypeError or ValueError with the names and the shapes."""
    if not isinstance(support, Support):
        raise TypeError(contract.not_a_support(support))
    logits = _array("logits", logits)
    contract.check_logits(logits.shape, str(logits.dtype))
    for name in ("token_ids", "begins", "ends"):
        leaf = getattr(support, name)
        if leaf is not None:
            _array(f"support.{name}", leaf)
    if targets is not None:
        targets = _targets(targets)
    if loss_mask is not None:
        loss_mask = _loss_mask(loss_mask)
    rows = logits.shape[:-1]
    contract.check_rows(
        logits.shape,
        tuple(support.row_shape),
        None if targets is None else targets.shape,
        None if loss_mask is None else loss_mask.shape,
    )
    return Rows(logits, support, targets, _temperature(temperature, rows), loss_mask)


def _array(name: str, value: Any) -> Any:
    if isinstance(value, (jax.Array, np.ndarray)):
        return value
    if type(value).__module__.split(".")[0] == "torch":
        raise TypeError(f"{name} is a torch tensor: use jax_topp.torch, or pass a JAX array")
    raise TypeError(f"{name} must be a JAX or NumPy array, got {contract.kind_of(value)}")


def _targets(targets: Any) -> Any:
    if isinstance(targets, (list, tuple)):
        targets = _arrays.host_integers("targets", targets)
    elif isinstance(targets, (int, np.integer)) and not isinstance(targets, bool):
        targets = np.asarray(targets)
    targets = _array("targets", targets)
    if isinstance(targets, np.ndarray):
        return _arrays.host_ids("targets", targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be integers, got {targets.dtype}")
    return targets


def _loss_mask(loss_mask: Any) -> Any:
    if isinstance(loss_mask, (list, tuple, bool)):
        loss_mask = np.asarray(loss_mask)
    loss_mask = _array("loss_mask", loss_mask)
    if not (loss_mask.dtype == bool or _is_real(loss_mask.dtype)):
        raise TypeError(f"loss_mask must be bool or numbers, got {loss_mask.dtype}")
    # 64-bit numpy numbers would be narrowed first, and a tiny one would become 0.
    return loss_mask != 0 if isinstance(loss_mask, np.ndarray) else loss_mask


def _temperature(temperature: Any, rows: tuple[int, ...]) -> Any:
    if isinstance(temperature, (bool, np.bool_)):
        raise TypeError("temperature must be a number or a float array, got a bool")
    if isinstance(temperature, (int, float, np.integer, np.floating)):
        return np.float32(contract.check_temperature_number(temperature))
    if isinstance(temperature, (list, tuple)):
        temperature = np.asarray(temperature)
    temperature = _array("temperature", temperature)
    if not _is_real(temperature.dtype):
        raise TypeError(f"temperature must be real numbers, got {temperature.dtype}")
    contract.check_temperature(temperature.shape, rows)
    if isinstance(temperature, np.ndarray):
        with np.errstate(over="ignore"):
            temperature = temperature.astype(np.float32)  # float64 must be rounded once
    return temperature


def _is_real(dtype: Any) -> bool:
    """Integers and floats, those that NumPy lacks too; no bools."""
    return jnp.issubdtype(dtype, jnp.number) and not jnp.issubdtype(dtype, jnp.complexfloating)
