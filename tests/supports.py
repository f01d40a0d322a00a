"""Random supports in every framework, with the lists that they stand for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jax_topp import Support

from frontends import needs_torch

KINDS = ["numpy", "jax", pytest.param("torch", marks=needs_torch)]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_layout = pytest.mark.parametrize("layout", ["ragged", "padded"])


def as_kind(x: Any, kind: str) -> Any:
    """A NumPy array in a framework; None stays."""
    if x is None or kind == "numpy":
        return x
    if kind == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    return torch.from_numpy(np.array(x))


def in_kind(support: Support, kind: str) -> Support:
    leaves = (support.token_ids, support.begins, support.ends, support.log_probs)
    return Support(*(as_kind(x, kind) for x in leaves))


def random_rows(rng: np.random.Generator, count: int, largest: int = 6) -> list[list[int]]:
    """Ascending ids below 50, some rows empty."""
    return [
        sorted(rng.choice(50, size=rng.integers(0, largest + 1), replace=False).tolist())
        for _ in range(count)
    ]


def log_probs_of(rows: list[list[int]]) -> list[list[float]]:
    """A value for each id that says which id it belongs to."""
    return [[-i / 64 for i in row] for row in rows]


def random_support(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    layout: str,
    kind: str = "numpy",
    log_probs: bool = True,
) -> tuple[Support, list[list[int]]]:
    """A Support with slack after and between the rows, and its rows as one list in row-major order."""
    rows = random_rows(rng, math.prod(shape))
    if layout == "padded":
        width = 8
        ids = np.full((len(rows), width), -1, np.int32)
        for n, row in enumerate(rows):
            ids[n, np.sort(rng.choice(width, size=len(row), replace=False))] = row
        ids = ids.reshape(*shape, width)
        begins = ends = None
    else:
        per_piece = shape[-1]
        pieces = math.prod(shape[:-1])
        width = 8 * per_piece + 3
        ids = np.full((pieces, width), -1, np.int32)
        begins, ends = (np.zeros((pieces, per_piece), np.int32) for _ in range(2))
        for n, row in enumerate(rows):
            piece, r = divmod(n, per_piece)
            at = 8 * r + int(rng.integers(0, 3))
            ids[piece, at : at + len(row)] = row
            begins[piece, r], ends[piece, r] = at, at + len(row)
        ids = ids.reshape(*shape[:-1], width)
        begins, ends = begins.reshape(shape), ends.reshape(shape)
    values = None
    if log_probs:
        values = np.where(ids >= 0, -ids / np.float32(64), -np.inf).astype(np.float32)
    return in_kind(Support(ids, begins, ends, values), kind), rows


def flat_lists(support: Support) -> list[list[int]]:
    """All rows in one list, whatever the batch axes."""
    lists = support.to_lists()
    for _ in support.row_shape[1:]:
        lists = [row for piece in lists for row in piece]
    return lists


def assert_log_probs_follow(support: Support) -> None:
    """Each id still has the value that `random_support` gave it."""
    host = support.numpy()
    used = host.token_ids >= 0
    expected = np.where(used, -host.token_ids / np.float32(64), -np.inf).astype(np.float32)
    np.testing.assert_array_equal(host.log_probs, expected)
