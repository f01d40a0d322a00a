"""Replay from logits in torch: the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import contract
from ..result import Replay
from ..support import Support
from . import _ops
from ._operands import Operands, prepare


def replay(
    logits: Tensor,
    targets: Tensor,
    support: Support,
    *,
    temperature: float | Tensor,
    loss_mask: Tensor | None = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
    member_log_probs: bool = False,
) -> Replay:
    """Scores each target under its recorded support: ``x[y] - logsumexp(x[i] for i in S)``, ``x = z / T``.

    Args:
      logits: [..., V] bfloat16, float16 or float32; undivided, since the temperature is applied here in float32.
        Rows may be strided (``logits[:, :-1]``): they are read where they lie.
      targets: [...] integers of any width; a negative one (-1, -100) marks an ignored row.
      support: one row for each row of the logits, on their device (NumPy leaves are taken for CPU logits).
      temperature: a positive number, or a tensor with the rank of ``targets`` and dimensions equal to its or 1.
        Not differentiable (TypeError).
      loss_mask: [...] bool, or numbers with 0 as False; a False row is ignored whatever else it holds.
      missing: a target outside its support gives -inf ("neg_inf"), or is scored over S + {y} ("include").
      empty: a row without a member gives -inf ("neg_inf"), or is scored over all ids ("full_vocab").
      vocab_size: ids at or above it do not exist, and columns past it never count; V if None.
      member_log_probs: also return the log-prob of every member, from the same gradient pass.

    Returns:
      A :class:`Replay` of float32 values and an int32 status with the shape of ``targets``. Differentiable with
      respect to the logits through every float value; the gradient is dense, in the logits' dtype.

    Raises:
      TypeError, ValueError: wrong dtypes, shapes, devices or options, or a Python temperature that is not positive
        and finite. What only the data shows (a bad id, a NaN logit) never raises: it marks its row, see
        :class:`Status`.
    """
    contract.check_targets_given(targets)
    options = contract.option_bits(missing, empty)
    operands, size = _prepare(logits, targets, support, temperature, loss_mask, vocab_size)
    results = _ops.replay(*operands, size, options, member_log_probs)
    return Replay._make((*results[:5], results[8] if member_log_probs else None))


def log_prob(
    logits: Tensor,
    targets: Tensor,
    support: Support,
    *,
    temperature: float | Tensor,
    loss_mask: Tensor | None = None,
    missing: str = "neg_inf",
    empty: str = "neg_inf",
    vocab_size: int | None = None,
) -> Tensor:
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
    logits: Tensor,
    support: Support,
    *,
    temperature: float | Tensor,
    loss_mask: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """The log-prob of every member of every support, at its own slot.

    Args: as for :func:`replay`; there is no target, so only ``loss_mask`` makes a row ignored.

    Returns:
      float32 with the shape of ``support.token_ids``, in nat. A repeated id carries its value at every slot;
      padding, slots that no row owns and rows without a score are -inf; rows with a bad input are NaN.
      Differentiable with respect to the logits.

    Raises:
      ValueError: also where two rows of a support on the host share slots. On a GPU that is not looked for, and
        the first row gets them.
    """
    operands, size = _prepare(logits, None, support, temperature, loss_mask, vocab_size)
    return _ops.replay(*operands, size, contract.NO_TARGET, True)[8]


def _prepare(
    logits: Any,
    targets: Any,
    support: Any,
    temperature: Any,
    loss_mask: Any,
    vocab_size: int | None,
) -> tuple[Operands, int]:
    operands = prepare(logits, targets, support, temperature, loss_mask)
    return operands, contract.check_vocab_size(vocab_size, logits.shape[-1])
