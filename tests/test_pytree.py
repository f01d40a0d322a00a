"""Support as a pytree of JAX and torch, whichever was loaded first, and across jax.export."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from jax_topp import Replay, Support

from frontends import needs_torch
from supports import each_layout, flat_lists, random_support


@each_layout
@pytest.mark.parametrize("log_probs", [True, False])
def test_jax_leaves_paths_and_back(layout, log_probs, rng):
    import jax

    support, _ = random_support(rng, (3, 4), layout, "jax", log_probs)
    names = ["token_ids"] + ["begins", "ends"] * (layout == "ragged") + ["log_probs"] * log_probs
    paths, tree = jax.tree_util.tree_flatten_with_path(support)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [f".{name}" for name in names]
    again = jax.tree.unflatten(tree, [leaf for _, leaf in paths])
    assert again.to_lists() == support.to_lists()
    # what transforms put into a tree: axes, shardings, None, object()
    assert jax.tree.map(lambda _: 0, support).token_ids == 0
    assert "token_ids=int" in repr(jax.tree.map(lambda _: 0, support))


@each_layout
def test_scan_vmap_and_donation(layout, rng):
    import jax

    support, rows = random_support(rng, (3, 4), layout, "jax")
    sizes = np.reshape([len(row) for row in rows], (3, 4))
    _, scanned = jax.lax.scan(lambda carry, s: (carry, s.sizes()), 0, support)
    np.testing.assert_array_equal(scanned, sizes)
    np.testing.assert_array_equal(jax.vmap(lambda s: s.sizes())(support), sizes)
    in_axes = Support._unchecked(*(None if x is None else 0 for x in support._leaves()))
    np.testing.assert_array_equal(jax.vmap(lambda s: s.sizes(), in_axes=(in_axes,))(support), sizes)
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x, s))(support)
    assert flat_lists(doubled) == rows


def test_the_layout_is_part_of_the_tree():
    """A step traced for one layout must not run on the other."""
    import jax

    ragged = Support.from_lists([[1], [2]])
    padded = Support.from_padded([[1], [2]])
    assert jax.tree.structure(ragged) != jax.tree.structure(padded)


@each_layout
def test_export_with_support_and_results_in_the_signature(layout, rng):
    import jax
    from jax import export

    import jax_topp
    from jax_topp._ffi import TARGETS

    support, _ = random_support(rng, (4,), layout, "jax", log_probs=False)
    logits = rng.normal(size=(4, 50)).astype(np.float32)
    targets = np.zeros(4, np.int32)

    def score(logits, targets, support, temperature):
        return jax_topp.replay(logits, targets, support, temperature=temperature, missing="include")

    arguments = (logits, targets, support, np.float32(0.7))
    exported = export.export(
        jax.jit(score),
        disabled_checks=[export.DisabledSafetyCheck.custom_call(t) for t in TARGETS],
    )(*arguments)
    loaded = export.deserialize(exported.serialize())
    got, wanted = loaded.call(*arguments), score(*arguments)
    assert isinstance(got, Replay)
    for g, w in zip(got[:5], wanted[:5], strict=True):
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


@needs_torch
@each_layout
def test_torch_leaves_and_back(layout, rng):
    from torch.utils import _pytree

    support, rows = random_support(rng, (3, 4), layout, "torch")
    leaves, spec = _pytree.tree_flatten(support)
    assert len(leaves) == (2 if layout == "padded" else 4)
    assert flat_lists(_pytree.tree_unflatten(leaves, spec)) == rows
    text = _pytree.treespec_dumps(spec)
    assert flat_lists(_pytree.tree_unflatten(leaves, _pytree.treespec_loads(text))) == rows


ORDERS = {
    "support, then jax": """
        from jax_topp import Support
        import sys
        support = Support.from_lists([[1, 2], [3]])
        assert "jax" not in sys.modules
        import jax, jax_topp
        jax_topp.replay
        assert len(jax.tree.leaves(support)) == 3
    """,
    "jax, then support": """
        import jax
        from jax_topp import Support
        assert len(jax.tree.leaves(Support.from_lists([[1, 2], [3]]))) == 3
    """,
    "a new support after jax": """
        from jax_topp import Support
        support = Support.from_lists([[1, 2], [3]])
        import jax
        Support.from_lists([[4]])
        assert len(jax.tree.leaves(support)) == 3
    """,
    "support, then torch": """
        from jax_topp import Support
        import sys
        support = Support.from_lists([[1, 2], [3]])
        assert "torch" not in sys.modules
        import jax_topp.torch
        assert "jax" not in sys.modules
        from torch.utils import _pytree
        assert len(_pytree.tree_leaves(support)) == 3
    """,
    "jax alone does not load torch": """
        import sys, jax_topp, numpy as np
        s = jax_topp.Support.from_lists([[1, 2]])
        jax_topp.log_prob(np.zeros((1, 4), np.float32), [1], s, temperature=1.0)
        assert "torch" not in sys.modules
    """,
    "an unpickled support": """
        import pickle, numpy as np
        from jax_topp import Support
        data = pickle.dumps(Support.from_lists([[1, 2], [3]]))
        import jax
        assert len(jax.tree.leaves(pickle.loads(data))) == 3
    """,
}


@pytest.mark.parametrize("order", ORDERS)
def test_registers_in_any_order_of_imports(order):
    """A framework that does not know Support would take it for one leaf, silently."""
    if "torch" in order:
        pytest.importorskip("torch")
    code = "\n".join(line.strip() for line in ORDERS[order].splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_many_threads_register_at_once():
    code = """
import threading
from jax_topp import Support
import jax
from jax_topp.support import Support as S
errors = []
def make():
    try:
        assert len(jax.tree.leaves(S.from_lists([[1, 2], [3]]))) == 3
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=make) for _ in range(16)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
