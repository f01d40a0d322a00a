"""The kernels' threads: the interpreter runs on meanwhile, callers may be many, and a fork finds a working pool."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jax_topp import _core

from cases import random_case
from compare import assert_bits_equal
from frontends import each_frontend
from kernels import Call

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def test_the_interpreter_runs_on_while_a_kernel_runs(rng):
    """Another Python thread makes progress inside one call: it would make none if the GIL were held.

    No thread is made to give the GIL up here, so the other one runs only where the kernel lets go of it.
    """
    case = random_case(rng, rows=(400,), vocab_size=20_000, max_members=20_000, ignored=0)
    call = Call(case)
    problem = call.problem()
    results = [np.zeros(case.rows, x.dtype) for x in call.forward()]
    addresses = [x.ctypes.data for x in results]
    ticks, stop, seen = 0, threading.Event(), []

    def count():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)  # lets go of the GIL

    thread = threading.Thread(target=count, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread.start()
    try:
        for _ in range(20):
            before = ticks
            _core.forward(problem, addresses)
            seen.append(ticks - before)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert max(seen) > 0


@each_frontend
def test_many_callers_at_once(frontend, rng):
    cases = [random_case(rng, rows=(40,), vocab_size=500, dtype="bfloat16") for _ in range(6)]
    expected = [frontend.replay(case) for case in cases]
    got: list = [None] * len(cases)

    def run(n: int) -> None:
        for _ in range(5):
            got[n] = frontend.replay(cases[n])

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(got, expected, strict=True):
        for x, y in zip(a[:5], b[:5], strict=True):
            assert_bits_equal(x, y)


FORK = """
import os, sys
sys.path.insert(0, "tests")
import numpy as np
from cases import random_case
from kernels import Call
from jax_topp import _core
_core.set_num_threads(4)
case = random_case(np.random.default_rng(0), rows=(300,), vocab_size=2000)
before = Call(case).forward()
child = os.fork()
if child == 0:
    after = Call(case).forward()
    same = all(a.tobytes() == b.tobytes() for a, b in zip(before, after))
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@needs_fork
def test_a_forked_child_has_threads_of_its_own():
    """Data loaders fork; a pool whose threads stayed in the parent would hang."""
    done = subprocess.run(
        [sys.executable, "-c", FORK], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["1", "3"])
def test_the_environment_sets_the_number(text):
    code = "from jax_topp import _core; print(_core.num_threads())"
    environment = {**os.environ, "JAX_TOPP_NUM_THREADS": text}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == text


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_the_environment_says_nonsense(text):
    """All cores, as if it were not set: an import must not fail for it."""
    code = "from jax_topp import _core; print(_core.num_threads())"
    environment = {**os.environ, "JAX_TOPP_NUM_THREADS": text}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == len(os.sched_getaffinity(0))
