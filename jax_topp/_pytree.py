"""Makes Support a pytree of the frameworks that are loaded; loads none itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

_NAMES = ("token_ids", "begins", "ends", "log_probs")
_lock = threading.Lock()
_pending: tuple[str, ...] = ("jax", "torch")  # replaced, never changed: it is read without the lock


def ensure_registered() -> None:
    """Registers Support (and the result types, for jax.export) with JAX and torch where they are loaded.

    To a framework that does not know it a Support would silently be a leaf. So every new Support calls this, and so
    does the import of each front end: a Support may be older than the framework.
    """
    for framework in _pending:
        if framework in sys.modules:
            _register_loaded()
            return


def _register_loaded() -> None:
    global _pending
    with _lock:
        for framework in _pending:
            if _is_loaded(framework):
                (_register_jax if framework == "jax" else _register_torch)()
                _pending = tuple(name for name in _pending if name != framework)


def _is_loaded(framework: str) -> bool:
    """False, too, while another thread (or one further up the stack) is still importing it."""
    spec = getattr(sys.modules.get(framework), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _register_jax() -> None:
    from jax import export, tree_util

    from .result import Replay
    from .support import Support

    keys = tuple(tree_util.GetAttrKey(name) for name in _NAMES)

    def flatten(support: Support) -> tuple[tuple[Any, ...], None]:
        return tuple(getattr(support, name) for name in _NAMES), None

    def flatten_with_keys(support: Support) -> tuple[tuple[tuple[Any, Any], ...], None]:
        return tuple(zip(keys, flatten(support)[0], strict=True)), None

    def unflatten(_: None, leaves: Iterable[Any]) -> Support:
        return Support._unchecked(*leaves)

    tree_util.register_pytree_with_keys(Support, flatten_with_keys, unflatten, flatten)
    export.register_pytree_node_serialization(
        Support,
        serialized_name="jax_topp.Support",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: None,
    )
    export.register_namedtuple_serialization(Replay, serialized_name="jax_topp.Replay")


def _register_torch() -> None:
    from torch.utils import _pytree

    from .support import Support

    # torch takes None for a leaf, so the names of the arrays that are there go into the context.
    def flatten(support: Support) -> tuple[list[Any], tuple[str, ...]]:
        names = tuple(name for name in _NAMES if getattr(support, name) is not None)
        return [getattr(support, name) for name in names], names

    def flatten_with_keys(support: Support) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        leaves, names = flatten(support)
        return [(_pytree.GetAttrKey(n), x) for n, x in zip(names, leaves, strict=True)], names

    def unflatten(leaves: Iterable[Any], names: tuple[str, ...]) -> Support:
        return Support._unchecked(**dict(zip(names, leaves, strict=True)))

    _pytree.register_pytree_node(
        Support,
        flatten,
        unflatten,
        serialized_type_name="jax_topp.Support",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )
