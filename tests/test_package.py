"""The package: its version, its names, what it does where something is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import jax_topp


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_names():
    assert {"replay", "log_prob", "member_log_probs", "Support", "Replay", "Status"} <= set(
        dir(jax_topp)
    )
    for name in jax_topp.__all__:
        assert getattr(jax_topp, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'logprob'"):
        jax_topp.logprob  # noqa: B018


def test_the_version_is_the_distributions():
    if not any(d.metadata["Name"] in ("jax_topp", "jax-topp") for d in metadata.distributions()):
        with pytest.raises(metadata.PackageNotFoundError):
            jax_topp.__version__  # noqa: B018
    else:
        assert jax_topp.__version__ == metadata.version("jax_topp")


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "{name}":
            raise ModuleNotFoundError("No module named '{name}'", name="{name}")
sys.meta_path.insert(0, Hide())
"""


def test_without_torch_the_torch_front_end_says_what_to_install():
    done = run(HIDE.format(name="torch") + "import jax_topp.torch")
    assert done.returncode and "pip install 'jax_topp[torch]'" in done.stderr, done.stderr
    done = run(HIDE.format(name="torch") + "import jax_topp; jax_topp.replay")
    assert done.returncode == 0, done.stderr


def test_without_jax_supports_and_torch_still_work():
    pytest.importorskip("torch")
    done = run(
        HIDE.format(name="jax")
        + "import torch, jax_topp.torch as t\n"
        + "s = t.Support.from_lists([[1, 2]])\n"
        + "print(t.log_prob(torch.zeros(1, 4), torch.tensor([1]), s, temperature=1.0))"
    )
    assert done.returncode == 0, done.stderr
    assert "-0.6931" in done.stdout


def test_without_the_extension_it_says_how_to_build():
    done = run(
        "import sys; sys.modules['jax_topp._core'] = None\n"
        "import jax_topp, numpy as np\n"
        "jax_topp.log_prob(np.zeros((1, 4), np.float32), [1], jax_topp.Support.from_lists([[1]]), temperature=1.0)"
    )
    assert done.returncode and "jax_topp._core" in done.stderr


def test_an_old_jax_is_refused_by_name():
    done = run(
        "import jax; jax.__version_info__ = (0, 9, 2); jax.__version__ = '0.9.2'\n"
        "import jax_topp, numpy as np\n"
        "jax_topp.log_prob(np.zeros((1, 4), np.float32), [1], jax_topp.Support.from_lists([[1]]), temperature=1.0)"
    )
    assert done.returncode and "needs jax 0.10 or newer, found 0.9.2" in done.stderr, done.stderr


def test_an_old_torch_is_refused_by_name():
    pytest.importorskip("torch")
    done = run("import torch; torch.__version__ = '2.10.1+cpu'; import jax_topp.torch")
    assert done.returncode and "needs torch 2.11 or newer, found 2.10.1" in done.stderr, done.stderr
