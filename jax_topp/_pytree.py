"""Makes Support a pytree of whichever frameworks are loaded, now or later, and loads none itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES = ("token_ids", "begins", "ends", "log_probs")
_lock = threading.RLock()
_pending = {"jax", "torch"}
_settled = False  # every framework is registered, or will be when it is imported


def ensure_registered() -> None:
    """Registers Support (and the result types, for jax.export) with JAX and torch if they are loaded.

    A framework imported later registers at the end of its import: a Support that it does not know would silently
    be a leaf. Cheap to call again.
    """
    global _settled
    if _settled:
        return
    with _lock:
        settled = True
        for framework in tuple(_pending):
            loaded = sys.modules.get(framework)
            if loaded is None:
                _watch_imports()
            elif getattr(loaded.__spec__, "_initializing", False):
                settled = False  # half imported: the next Support looks again
            else:
                _register(framework)
        _settled = settled


def _register(framework: str) -> None:
    with _lock:
        if framework in _pending:
            (_register_jax if framework == "jax" else _register_torch)()
            _pending.discard(framework)
        if not _pending and _watcher in sys.meta_path:
            sys.meta_path.remove(_watcher)


def _register_jax() -> None:
    import jax
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

    jax.tree_util.register_pytree_with_keys(Support, flatten_with_keys, unflatten, flatten)
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


class _Watcher:
    """A finder that finds nothing itself: it has the import of a pending framework end with its registration."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _pending:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                _register_after(name, spec.loader)
                return spec
        return None


def _register_after(framework: str, loader: Any) -> None:
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        _register(framework)

    loader.exec_module = execute_and_register


_watcher: Any = _Watcher()


def _watch_imports() -> None:
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
