"""Checks a torch call's arguments and turns them into what the kernels read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import contract
from ..support import Support


class Operands(NamedTuple):
    """The tensors that every kernel begins with; all but the logits contiguous."""

    logits: Tensor
    token_ids: Tensor
    begins: Tensor | None
    ends: Tensor | None
    targets: Tensor
    temperature: Tensor


def prepare(logits: Any, targets: Any, support: Any, temperature: Any, loss_mask: Any) -> Operands:
    """Checks shapes, dtypes and devices; raises TypeError or ValueError with the names and the shapes."""
    _check_tensor("logits", logits)
    contract.check_logits(tuple(logits.shape), str(logits.dtype).removeprefix("torch."))
    if not isinstance(support, Support):
        raise TypeError(contract.not_a_support(support))
    token_ids, begins, ends = (
        _support_leaf(f"support.{name}", getattr(support, name), logits)
        for name in ("token_ids", "begins", "ends")
    )
    assert token_ids is not None
    if targets is not None:
        _check_tensor("targets", targets, logits)
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise TypeError(f"targets must be integers, got {targets.dtype}")
    if loss_mask is not None:
        _check_tensor("loss_mask", loss_mask, logits)
        if loss_mask.is_complex():
            raise TypeError(f"loss_mask must be bool or numbers, got {loss_mask.dtype}")
    contract.check_rows(
        tuple(logits.shape),
        tuple(support.row_shape),
        None if targets is None else tuple(targets.shape),
        None if loss_mask is None else tuple(loss_mask.shape),
    )
    return Operands(
        logits,
        token_ids,
        begins,
        ends,
        _row_targets(targets, loss_mask, logits),
        _temperature(temperature, logits),
    )


def _check_tensor(name: str, value: Any, logits: Tensor | None = None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {contract.kind_of(value)}")
    if type(value).__name__ == "DTensor":
        raise TypeError(
            f"{name} is a DTensor: pass local tensors, or wrap the call in "
            f"torch.distributed.tensor.experimental.local_map"
        )
    if logits is not None and value.device != logits.device:
        raise ValueError(
            f"{name} must be on the logits' device: {name} on {value.device}, logits on {logits.device}"
        )


def _support_leaf(name: str, leaf: Any, logits: Tensor) -> Tensor | None:
    if leaf is None:
        return None
    if isinstance(leaf, np.ndarray):  # the readers make these
        if logits.device.type != "cpu":
            raise ValueError(
                f"{name} is on the host, logits on {logits.device}: call support.to(logits.device) first"
            )
        leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
    _check_tensor(name, leaf, logits)
    return leaf.contiguous()


def _row_targets(targets: Tensor | None, loss_mask: Tensor | None, logits: Tensor) -> Tensor:
    """int32, negative where the row is ignored: all that the kernels need to know of a loss mask."""
    if targets is None:
        ids = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    else:
        ids = _saturate(targets)
    if loss_mask is not None:
        ids = ids.masked_fill(loss_mask == 0, -1)
    return ids.contiguous()


def _saturate(targets: Tensor) -> Tensor:
    """int32 of any integers: out-of-range ones keep their side of the vocabulary instead of wrapping."""
    if targets.dtype == torch.uint64:  # few ops know it
        signed = targets.view(torch.int64)
        targets = torch.where(signed < 0, torch.iinfo(torch.int64).max, signed)
    if targets.dtype == torch.uint32:
        targets = targets.to(torch.int64)
    if targets.dtype == torch.int64:
        targets = targets.clamp(-1, torch.iinfo(torch.int32).max)
    return targets.to(torch.int32)


def _temperature(temperature: Any, logits: Tensor) -> Tensor:
    """float32, one for all rows or one a row."""
    if isinstance(temperature, bool):
        raise TypeError("temperature must be a number or a float tensor, got a bool")
    if isinstance(temperature, (int, float)):  # numpy's float64 is a float
        number = contract.check_temperature_number(temperature)
        return torch.full((), number, dtype=torch.float32, device=logits.device)
    if isinstance(temperature, (np.integer, np.floating)):
        return _temperature(float(temperature), logits)
    _check_tensor("temperature", temperature, logits)
    if temperature.dtype == torch.bool or temperature.is_complex():
        raise TypeError(f"temperature must be real numbers, got {temperature.dtype}")
    if temperature.requires_grad and torch.is_grad_enabled():
        raise TypeError("temperature is not differentiable in jax_topp: pass temperature.detach()")
    rows = tuple(logits.shape[:-1])
    contract.check_temperature(tuple(temperature.shape), rows)
    if temperature.dim() > 0:
        temperature = temperature.expand(rows)
    return temperature.detach().to(torch.float32).contiguous()
