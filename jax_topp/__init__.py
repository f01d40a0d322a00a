"""jax_topp: log-probabilities under the truncated distribution that the rollout engine sampled from.

JAX functions live here, PyTorch ones in :mod:`jax_topp.torch`; neither loads the other framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract import Status
    from .logits import log_prob, member_log_probs, replay
    from .result import Replay
    from .support import Support

_HOME = {
    "Replay": "result",
    "Status": "contract",
    "Support": "support",
    "log_prob": "logits",
    "member_log_probs": "logits",
    "replay": "logits",
}

__all__ = ["Replay", "Status", "Support", "log_prob", "member_log_probs", "replay"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("jax_topp")
    if name not in _HOME:
        raise AttributeError(f"module 'jax_topp' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "__version__"])
