"""The command `jax-topp`: replay a recorded rollout, or say what this installation can do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from .contract import Status
from .recording import Recording, RecordingError, load_recording

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 256  # rows scored at a time: 256 * 262,144 bfloat16 logits are 128 MiB
_PROGRESS_ROWS = 2_000


def main(argv: list[str] | None = None) -> int:
    """Runs the command; 0, or 2 for a file or an argument that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="jax-topp",
        description="Scores tokens under the truncated distribution they were drawn from.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay = commands.add_parser("replay", help="replay a recorded rollout (.npz)")
    replay.add_argument("file", metavar="FILE.npz")
    replay.add_argument("--no-progress", action="store_true", help="no progress on stderr")
    replay.set_defaults(run=_replay)
    info = commands.add_parser("info", help="versions, targets, CUDA, the arithmetic's hash")
    info.set_defaults(run=_info)
    for command in (replay, info):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except RecordingError as error:
        print(f"jax-topp: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def _replay(arguments: argparse.Namespace) -> None:
    recording = load_recording(arguments.file)
    large = recording.rows > _PROGRESS_ROWS and sys.stderr.isatty()
    facts = replay_facts(recording, show_progress=large and not arguments.no_progress)
    print(json.dumps(facts, allow_nan=False) if arguments.json else _replay_table(facts))


def replay_facts(recording: Recording, *, show_progress: bool = False) -> dict[str, Any]:
    """What `jax-topp replay` prints. Differences are |ours - the engine's| in nat, over the scored rows."""
    status, replayed, whole = [], [], []
    same_bits: bool | None = None if find_spec("torch") is None else True
    for begin, end in _chunks(recording.rows, show_progress):
        ours = _score_jax(recording, begin, end)
        status.append(ours[-1])
        replayed.append(np.abs(ours[0].astype(np.float64) - recording.log_prob[begin:end]))
        vocabulary = _score_jax(recording, begin, end, whole=True)[0]
        whole.append(np.abs(vocabulary.astype(np.float64) - recording.log_prob[begin:end]))
        if same_bits:
            theirs = _score_torch(recording, begin, end)
            same_bits = all(a.tobytes() == b.tobytes() for a, b in zip(ours, theirs, strict=True))
    codes = np.concatenate(status)
    scored = codes == Status.SCORED
    sizes = recording.support_sizes
    return {
        "rows": recording.rows,
        "vocab_size": recording.vocab_size,
        "support_sizes": {
            "mean": float(sizes.mean()),
            "median": float(np.median(sizes)),
            "p99": float(np.percentile(sizes, 99)),
            "max": int(sizes.max()),
        },
        "status": {s.name.lower(): int((codes == s).sum()) for s in Status if (codes == s).any()},
        "whole_vocabulary_difference": _summary(np.concatenate(whole)[scored]),
        "replayed_difference": _summary(np.concatenate(replayed)[scored]),
        "jax_equals_torch": same_bits,
    }


def _chunks(rows: int, show_progress: bool) -> Iterator[tuple[int, int]]:
    for begin in range(0, rows, CHUNK):
        end = min(begin + CHUNK, rows)
        yield begin, end
        if show_progress:
            filled = 30 * end // rows
            tail = "\n" if end == rows else ""
            print(
                f"\r[{'#' * filled}{'.' * (30 - filled)}] {end}/{rows} rows",
                end=tail,
                file=sys.stderr,
                flush=True,
            )


def _score_jax(
    recording: Recording, begin: int, end: int, *, whole: bool = False
) -> tuple[np.ndarray, ...]:
    """log_prob, logsumexp, support_entropy, target_logit, status; over the whole vocabulary if asked."""
    from . import Support, replay

    ids, offsets = recording.support_of(begin, end)
    extents = (np.zeros_like(offsets[:-1]),) * 2 if whole else (offsets[:-1], offsets[1:])
    r = replay(
        recording.logits[begin:end],
        recording.target[begin:end],
        Support(ids, *extents),
        temperature=recording.temperature[begin:end],
        empty="full_vocab" if whole else "neg_inf",
    )
    return tuple(np.asarray(x) for x in r[:5])


def _score_torch(recording: Recording, begin: int, end: int) -> tuple[np.ndarray, ...]:
    import torch

    from . import torch as topp

    ids, offsets = recording.support_of(begin, end)
    bits = recording.logits[begin:end].view(np.int16).copy()
    r = topp.replay(
        torch.from_numpy(bits).view(torch.bfloat16),
        torch.from_numpy(recording.target[begin:end].copy()),
        topp.Support(ids.copy(), offsets[:-1], offsets[1:]),
        temperature=torch.from_numpy(recording.temperature[begin:end].copy()),
    )
    return tuple(x.numpy() for x in r[:5])


def _summary(differences: np.ndarray) -> dict[str, float] | None:
    """None where there is nothing finite to compare."""
    finite = differences[np.isfinite(differences)]
    return {"max": float(finite.max()), "mean": float(finite.mean())} if finite.size else None


def _replay_table(facts: dict[str, Any]) -> str:
    sizes = facts["support_sizes"]

    def difference(d: dict[str, float] | None) -> str:
        return (
            "nothing to compare"
            if d is None
            else f"largest {d['max']:.3g}, mean {d['mean']:.3g} nat"
        )

    same = {None: "torch is not installed", True: "the same bits", False: "DIFFERENT BITS"}
    lines = [
        ("rows", f"{facts['rows']}, vocabulary {facts['vocab_size']}"),
        (
            "support sizes",
            f"mean {sizes['mean']:.1f}, median {sizes['median']:g}, p99 {sizes['p99']:.0f}, max {sizes['max']}",
        ),
        ("status", ", ".join(f"{name} {count}" for name, count in facts["status"].items())),
        ("whole vocabulary - engine", difference(facts["whole_vocabulary_difference"])),
        ("replayed - engine", difference(facts["replayed_difference"])),
        ("JAX and torch", same[facts["jax_equals_torch"]]),
    ]
    return "\n".join(f"{name:<27}{text}" for name, text in lines)


def _info(arguments: argparse.Namespace) -> None:
    facts = info_facts()
    if arguments.json:
        print(json.dumps(facts, allow_nan=False))
    else:
        print("\n".join(f"{name:<20}{_text(value)}" for name, value in facts.items()))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "not set" if value is None else str(value)


def info_facts() -> dict[str, Any]:
    """Versions, the CPU build in use, CUDA, the custom calls, the environment's switches."""
    from . import _core

    build = _core.build_info()
    return {
        "jax_topp": _version("jax_topp"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "jax", "jaxlib", "torch")},
        "cpu_kernels": build["cpu_variant"],
        "threads": _core.num_threads(),
        "cuda_built": build["cuda"],
        "cuda": build["cuda_reason"] or "available",
        "targets": {name: sorted(places) for name, places in _core.ffi_targets().items()},
        "arithmetic_hash": f"{_core.arithmetic_hash():016x}",
        "JAX_TOPP_CPU": os.environ.get("JAX_TOPP_CPU"),
        "JAX_TOPP_NUM_THREADS": os.environ.get("JAX_TOPP_NUM_THREADS"),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
