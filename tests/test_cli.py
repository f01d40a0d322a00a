"""The command, on the bundled recording and on files that it must refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from jax_topp import _core, cli

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2_vllm_small.npz"


def test_the_example_is_replayed(capsys):
    """Issue's promise: at most 1e-6 nat where the whole vocabulary is off by up to 0.48."""
    assert cli.main(["replay", str(EXAMPLE), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["status"] == {"scored": 45}
    assert facts["replayed_difference"]["max"] <= 1e-6
    assert 0.47 < facts["whole_vocabulary_difference"]["max"] < 0.49
    assert facts["jax_equals_torch"] is (None if find_spec("torch") is None else True)
    assert facts["support_sizes"]["max"] == 6687


def test_the_table(capsys):
    assert cli.main(["replay", str(EXAMPLE)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["rows", "45,", "vocabulary", "49152"]
    assert any(line.startswith("replayed - engine") for line in table)


def test_info(capsys):
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert int(facts["arithmetic_hash"], 16) == _core.ARITHMETIC_HASH
    assert facts["cuda_built"] or "JAX_TOPP_CUDA=ON" in facts["cuda"]
    assert cli.main(["info"]) == 0
    assert facts["arithmetic_hash"] in capsys.readouterr().out


def arrays() -> dict[str, np.ndarray]:
    return dict(np.load(EXAMPLE))


def without(name: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in arrays().items() if k != name}


BAD = {
    "no such array": (without("target"), "no array target"),
    "a wrong dtype": (arrays() | {"target": np.zeros(45)}, "target is float64"),
    "a wrong length": (arrays() | {"temperature": np.ones(3, np.float32)}, "temperature has 3"),
    "offsets that fall": (
        arrays() | {"support_offsets": arrays()["support_offsets"][::-1]},
        "support_offsets must rise",
    ),
    "pickled objects": (arrays() | {"target": np.array([{}] * 45)}, "target"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays(tmp_path, capsys, name):
    content, complaint = BAD[name]
    path = tmp_path / "bad.npz"
    np.savez(path, **content)
    assert_refused(path, complaint, capsys)


@pytest.mark.parametrize("content", [b"", b"not a zip", EXAMPLE.read_bytes()[:100_000]])
def test_bad_files(tmp_path, capsys, content):
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    assert_refused(path, "not an .npz file", capsys)


def test_missing_file(tmp_path, capsys):
    assert_refused(tmp_path / "none.npz", "cannot read it", capsys)
    assert_refused(tmp_path, "cannot read it", capsys)


def assert_refused(path, complaint, capsys):
    assert cli.main(["replay", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1 and err.startswith(f"jax-topp: {path}") and complaint in err


def imported(code: str) -> set[str]:
    code += "; import sys; print(*[m for m in ('jax', 'torch') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_neither_front_end_loads_the_other():
    assert imported("import jax_topp; jax_topp.Support") == set()
    assert imported("import jax_topp; jax_topp.replay") == {"jax"}
    if find_spec("torch") is not None:
        assert imported("import jax_topp.torch") == {"torch"}
