"""Replay from logits in JAX: the public functions, their gradient, and how they fold under vmap."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from . import _ffi, _pytree, contract
from ._operands import Rows, prepare
from .result import Replay
from .support import Support

_pytree.ensure_registered()


class _Config(NamedTuple):
    """What is fixed when a call is traced."""

    vocab_size: int
    options: int
    members: bool

    @property
    def padded(self) -> bool:
        return bool(self.options & contract.PADDED)


# The operands that all three kernels begin with, in the order of csrc/ffi.cc.
_LOGITS, _TOKEN_IDS, _BEGINS, _ENDS, _TARGETS, _TEMPERATURE = range(6)


@functools.cache
def _kernel(name: str, config: _Config) -> Any:
    """The custom call `name`, foldable under vmap: a mapped axis becomes one more leading axis of rows."""
    attributes = {"vocab_size": config.vocab_size, "options": config.options}

    @custom_vmap
    def call(*operands: Any) -> Any:
        return getattr(_ffi, name)(operands, **attributes)

    @call.def_vmap
    def _fold(axis_size: int, in_batched: list[bool], *operands: Any) -> Any:
        if not in_batched[_LOGITS]:  # folding would copy the logits axis_size times
            return _map_over_shared_logits(call, in_batched, operands)
        out = call(*_with_mapped_axis(axis_size, in_batched, operands, config))
        return out, jax.tree.map(lambda _: True, out)

    return call


def _with_mapped_axis(
    axis_size: int, in_batched: list[bool], operands: tuple[Any, ...], config: _Config
) -> list[Any]:
    """Gives every operand the mapped axis that the logits have; only row- and member-sized ones are repeated."""
    rows = operands[_LOGITS].shape[:-1]
    folded = []
    for position, (batched, x) in enumerate(zip(in_batched, operands, strict=True)):
        no_extents = config.padded and position in (_BEGINS, _ENDS)
        no_member_cotangent = position > _TEMPERATURE and x.shape == (0,) and not config.members
        if batched and position == _TEMPERATURE and x.ndim == 1 and len(rows) > 1:
            x = x.reshape((axis_size,) + (1,) * (len(rows) - 1))  # was one for all rows of its call
        if position == _TEMPERATURE and (batched or x.ndim > 0):
            x = jnp.broadcast_to(x, rows)
        elif not batched and position != _TEMPERATURE and not (no_extents or no_member_cotangent):
            x = jnp.broadcast_to(x, (axis_size, *x.shape))
        folded.append(x)
    return folded


def _map_over_shared_logits(call: Any, in_batched: list[bool], operands: tuple[Any, ...]) -> Any:
    mapped = [x for batched, x in zip(in_batched, operands, strict=True) if batched]

    def one(slices: list[Any]) -> Any:
        left = iter(slices)
        return call(*(next(left) if b else x for b, x in zip(in_batched, operands, strict=True)))

    out = lax.map(one, mapped)
    return out, jax.tree.map(lambda _: True, out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(config: _Config, *operands: Any) -> tuple[Any, ...]:
    """Row values and status, then member log-probs if the config asks for them."""
    return _score_and_save(config, operands)[0]


def _score_and_save(config: _Config, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    *values, status, row_max, row_sum, weighted = _kernel("forward", config)(*operands)
    outputs = (*values, status)
    if config.members:
        outputs += (_kernel("members", config)(*operands, status, row_max, row_sum),)
    return outputs, (status, row_max, row_sum, weighted)


def _score_fwd(config: _Config, *primals: Any) -> tuple[tuple[Any, ...], Any]:
    if primals[_TEMPERATURE].perturbed:
        raise TypeError(
            "temperature is not differentiable in jax_topp: pass lax.stop_gradient(temperature)"
        )
    operands = tuple(primal.value for primal in primals)
    outputs, saved = _score_and_save(config, operands)
    # Logits that need no gradient are not kept alive either.
    return outputs, ((operands, saved) if primals[_LOGITS].perturbed else None)


def _score_bwd(config: _Config, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    no_gradient = (None,) * 6
    given = [*cotangents[:4], *cotangents[5:]]
    if residuals is None or all(isinstance(c, SymbolicZero) for c in given):
        return no_gradient
    operands, saved = residuals
    rows = operands[_LOGITS].shape[:-1]
    row_cotangents = [_instantiate(c, rows) for c in cotangents[:4]]
    slots = operands[_TOKEN_IDS].shape if config.members else (0,)
    member_cotangent = _instantiate(cotangents[5] if config.members else None, slots)
    gradient = _kernel("backward", config)(*operands, *saved, *row_cotangents, member_cotangent)
    return (gradient, *no_gradient[1:])


def _instantiate(cotangent: Any, shape: tuple[int, ...]) -> Any:
    if cotangent is None or isinstance(cotangent, SymbolicZero):
        return jnp.zeros(shape, jnp.float32)
    return cotangent


_score.defvjp(_score_fwd, _score_bwd, symbolic_zeros=True)


# Checks run in Python at every call; everything else is one jitted function, so that an eager call dispatches once
# and never reshapes or copies the logits.
@functools.partial(jax.jit, static_argnums=(0,))
def _scored(config: _Config, rows: Rows) -> tuple[Any, ...]:
    return _score(config, *rows.kernel_operands())


def replay(
    logits: Any,
    targets: Any,
    support: Support,
    *,
    temperature: Any,
    loss_mask: Any = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
    member_log_probs: bool = False,
) -> Replay:
    """Scores each target under its recorded support: ``x[y] - logsumexp(x[i] for i in S)``, ``x = z / T``.

    Args:
      logits: [..., V] bfloat16, float16 or float32; undivided, since the temperature is applied here in float32.
      targets: [...] integers of any width; a negative one (-1, -100) marks an ignored row.
      support: one row for each row of the logits.
      temperature: a positive number, or an array with the rank of ``targets`` and dimensions equal to its or 1.
        An operand: another value never recompiles. Not differentiable (TypeError).
      loss_mask: [...] bool, or numbers with 0 as False; a False row is ignored whatever else it holds.
      missing: a target outside its support gives -inf ("neg_inf"), or is scored over S + {y} ("include").
      empty: a row without a member gives -inf ("neg_inf"), or is scored over all ids ("full_vocab").
      vocab_size: ids at or above it do not exist, and columns past it never count; V if None.
      member_log_probs: also return the log-prob of every member, from the same gradient pass.

    Returns:
      A :class:`Replay` of float32 values and an int32 status with the shape of ``targets``. Differentiable with
      respect to the logits through every float value.

    Raises:
      TypeError, ValueError: wrong dtypes, shapes, options, or a Python temperature that is not positive and finite.
        What only the data shows (a bad id, a NaN logit) never raises: it marks its row, see :class:`Status`.
    """
    contract.check_targets_given(targets)
    options = contract.option_bits(missing, empty)
    config, rows = _prepare(
        logits, targets, support, temperature, loss_mask, vocab_size, options, member_log_probs
    )
    return Replay(*_scored(config, rows))


def log_prob(
    logits: Any,
    targets: Any,
    support: Support,
    *,
    temperature: Any,
    loss_mask: Any = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
) -> jax.Array:
    """The ``log_prob`` of :func:`replay`: float32, nat, with the shape of ``targets``."""
    return replay(
        logits,
        targets,
        support,
        temperature=temperature,
        loss_mask=loss_mask,
        missing=missing,
        empty=empty,
        vocab_size=vocab_size,
    ).log_prob


def member_log_probs(
    logits: Any,
    support: Support,
    *,
    temperature: Any,
    loss_mask: Any = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """The log-prob of every member of every support, at its own slot.

    Args: as for :func:`replay`; there is no target, so only ``loss_mask`` makes a row ignored.

    Returns:
      float32 with the shape of ``support.token_ids``, in nat. A repeated id carries its value at every slot;
      padding, slots that no row owns and rows without a score are -inf; rows with a bad input are NaN.
      Differentiable with respect to the logits.

    Raises:
      ValueError: also where two rows share slots. Under jit that cannot be seen, and the first row gets them.
    """
    config, rows = _prepare(
        logits, None, support, temperature, loss_mask, vocab_size, contract.NO_TARGET, True
    )
    return _scored(config, rows)[5]


def _prepare(
    logits: Any,
    targets: Any,
    support: Support,
    temperature: Any,
    loss_mask: Any,
    vocab_size: int | None,
    options: int,
    members: bool,
) -> tuple[_Config, Rows]:
    rows = prepare(logits, targets, support, temperature, loss_mask)
    size = contract.check_vocab_size(vocab_size, rows.logits.shape[-1])
    if support.begins is None:
        options |= contract.PADDED
    elif members and not isinstance(support.begins, jax.core.Tracer):
        contract.check_no_overlap(
            np.asarray(support.begins), np.asarray(support.ends), support.token_ids.shape[-1]
        )
    return _Config(size, options, bool(members)), rows
