"""The kernels as torch custom ops over raw addresses: results, fake results, autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import _core, contract

OLDEST_TORCH = (2, 11)
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise RuntimeError(
        f"jax_topp needs torch {'.'.join(map(str, OLDEST_TORCH))} or newer, found {torch.__version__}"
    )

LOGIT_DTYPES = {getattr(torch, name): code for code, name in enumerate(contract.LOGIT_DTYPES)}
MAX_ROW_AXES = 4  # csrc/contract.h, kMaxRank

# log_prob, logsumexp, support_entropy, target_logit, status, max, sum, weighted_sum; then member log-probs.
_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_ROW_DTYPES = (*[torch.float32] * 4, torch.int32, torch.float32, torch.int64, torch.int64)
_SAVED = slice(4, 8)  # what the backward reads


def _empty_results(logits: Tensor, token_ids: Tensor, members: bool) -> _Results:
    rows = logits.shape[:-1]
    slots = token_ids.shape if members else (0,)
    by_row = [logits.new_empty(rows, dtype=dtype) for dtype in _ROW_DTYPES]
    return (*by_row, logits.new_empty(slots, dtype=torch.float32))  # type: ignore[return-value]


def merge_row_axes(logits: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of the row axes, axes that lie one inside the other merged; at least one axis."""
    sizes, strides = [1], [0]
    for size, stride in zip(logits.shape[:-1], logits.stride()[:-1], strict=True):
        if size == 1:
            continue
        if sizes[-1] == 1 or strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > MAX_ROW_AXES:
        raise ValueError(
            f"logits' rows have {len(sizes)} axes that cannot be read as fewer (shape {tuple(logits.shape)}, "
            f"strides {tuple(logits.stride())}); at most {MAX_ROW_AXES} are supported: call logits.contiguous()"
        )
    return sizes, strides


def _problem(
    logits: Tensor,
    token_ids: Tensor,
    begins: Tensor | None,
    ends: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    vocab_size: int,
    options: int,
) -> Any:
    """Addresses only: the caller's tensors must outlive it, and all but the logits must be contiguous."""
    sizes, strides = merge_row_axes(logits)
    return _core.problem(
        dtype=LOGIT_DTYPES[logits.dtype],
        logits=logits.data_ptr(),
        shape=[*sizes, logits.shape[-1]],
        strides=[*strides, logits.stride(-1)],
        token_ids=token_ids.data_ptr(),
        begins=0 if begins is None else begins.data_ptr(),
        ends=0 if ends is None else ends.data_ptr(),
        capacity=token_ids.shape[-1],
        rows_per_piece=1 if begins is None else begins.shape[-1],
        pieces=math.prod(token_ids.shape[:-1]),
        targets=targets.data_ptr(),
        temperature=temperature.data_ptr(),
        temperature_stride=0 if temperature.dim() == 0 else 1,
        vocab_size=vocab_size,
        options=options,
    )


def _on_device(logits: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()


def _place(logits: Tensor) -> tuple[int, int]:
    """Device index and stream; -1 is the CPU."""
    if not logits.is_cuda:
        return -1, 0
    return logits.device.index, torch.cuda.current_stream(logits.device).cuda_stream


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@torch.library.custom_op("jax_topp::replay", mutates_args=())
def replay(
    logits: Tensor,
    token_ids: Tensor,
    begins: Tensor | None,
    ends: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    vocab_size: int,
    options: int,
    members: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The eight row results, then member log-probs (empty unless asked for)."""
    if members and begins is not None and ends is not None and begins.device.type == "cpu":
        contract.check_no_overlap(begins.numpy(), ends.numpy(), token_ids.shape[-1])
    results = _empty_results(logits, token_ids, members)
    problem = _problem(logits, token_ids, begins, ends, targets, temperature, vocab_size, options)
    with _on_device(logits):
        place = _place(logits)
        _core.forward(problem, _addresses(results[:8]), *place)
        if members:
            _core.members(problem, _addresses(results[4:8]), results[8].data_ptr(), *place)
    return results


@replay.register_fake
def _(
    logits: Tensor,
    token_ids: Tensor,
    begins: Tensor | None,
    ends: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    vocab_size: int,
    options: int,
    members: bool,
) -> _Results:
    return _empty_results(logits, token_ids, members)


@torch.library.custom_op("jax_topp::replay_backward", mutates_args=())
def replay_backward(
    logits: Tensor,
    token_ids: Tensor,
    begins: Tensor | None,
    ends: Tensor | None,
    targets: Tensor,
    temperature: Tensor,
    saved: list[Tensor],
    cotangents: list[Tensor],
    member_cotangents: Tensor | None,
    vocab_size: int,
    options: int,
) -> Tensor:
    """The logits' gradient, dense. `cotangents` are those of the four row values."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    problem = _problem(logits, token_ids, begins, ends, targets, temperature, vocab_size, options)
    sizes, _ = merge_row_axes(logits)
    columns = logits.shape[-1]
    strides = [columns * math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    dense = [cotangent.contiguous() for cotangent in cotangents]  # a sum's cotangent is one number
    members = None if member_cotangents is None else member_cotangents.contiguous()
    with _on_device(logits):
        _core.backward(
            problem,
            _addresses(saved),
            [*_addresses(dense), 0 if members is None else members.data_ptr()],
            gradient.data_ptr(),
            [*strides, 1],
            *_place(logits),
        )
    return gradient


@replay_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: _Results) -> None:
    *tensors, ctx.vocab_size, ctx.options, ctx.members = inputs
    ctx.save_for_backward(*tensors, *output[_SAVED])
    ctx.mark_non_differentiable(*output[_SAVED])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    no_gradient = (None,) * 8
    values, members = cotangents[:4], cotangents[8] if ctx.members else None
    if members is None and all(value is None for value in values):
        return None, *no_gradient
    kept = ctx.saved_tensors  # once: checkpointing frees them as they are read
    tensors, saved = kept[:6], list(kept[6:])
    zero = torch.zeros_like(saved[1])
    given = [zero if value is None else value for value in values]
    gradient = replay_backward(*tensors, saved, given, members, ctx.vocab_size, ctx.options)
    return gradient, *no_gradient


replay.register_autograd(_differentiate, setup_context=_save)
