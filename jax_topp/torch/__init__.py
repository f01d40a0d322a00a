"""jax_topp for PyTorch: the functions of :mod:`jax_topp`, over tensors and with the same bits.

Importing this does not load JAX. Double backward and ``torch.func.grad`` are not supported.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "jax_topp.torch needs torch, which is not installed: pip install 'jax_topp[torch]'",
        name="torch",
    ) from error

from .. import _pytree
from ..contract import Status
from ..result import Replay
from ..support import Support
from .logits import log_prob, member_log_probs, replay

_pytree.ensure_registered()

__all__ = ["Replay", "Status", "Support", "log_prob", "member_log_probs", "replay"]
