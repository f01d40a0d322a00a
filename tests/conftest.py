"""Set up before any test: virtual CPU devices for JAX, and a fresh generator for each test."""

from __future__ import annotations

import os

import numpy as np
import pytest

_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name: fixed, and not the same inputs in every test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
