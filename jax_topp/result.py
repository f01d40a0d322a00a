"""What a replay returns, in either framework."""

from __future__ import annotations

from typing import Any, NamedTuple


class Replay(NamedTuple):
    """One value a row, each with the shape of ``targets``: JAX arrays or torch tensors.

    Attributes:
      log_prob: float32, nat; ``x[y] - logsumexp(x[i] for i in S)`` with ``x = logits / temperature``.
      logsumexp: float32, nat; the normaliser over the support.
      support_entropy: float32, nat; entropy of the distribution over the support.
      target_logit: float32; ``x[y]``, after the temperature.
      status: int32; a :class:`jax_topp.Status` a row, 0 where the row was scored.
      member_log_probs: float32 with the shape of ``support.token_ids``, or None if not asked for.
    """

    log_prob: Any
    logsumexp: Any
    support_entropy: Any
    target_logit: Any
    status: Any
    member_log_probs: Any = None

    @property
    def valid(self) -> Any:
        """bool, True where the row was scored (``status == 0``)."""
        return self.status == 0
