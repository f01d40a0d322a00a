"""Reads a recorded rollout (.npz): an engine's logits, its supports and the log-probs it reported."""

from __future__ import annotations

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .contract import MAX_VOCAB_SIZE


class RecordingError(ValueError):
    """The file is no recording that can be replayed; the message is one line that says why."""


@dataclass(frozen=True)
class Recording:
    """N rows of one rollout.

    Attributes:
      logits: bfloat16 [N, V], before the temperature.
      target: int32 [N], the sampled token.
      temperature: float32 [N].
      support_ids: int32 [M], the ids of all rows, one row after another.
      support_offsets: int64 [N + 1]; row i has ``support_ids[support_offsets[i]:support_offsets[i + 1]]``.
      log_prob: float32 [N], what the engine reported for the target.
    """

    logits: np.ndarray
    target: np.ndarray
    temperature: np.ndarray
    support_ids: np.ndarray
    support_offsets: np.ndarray
    log_prob: np.ndarray

    @property
    def rows(self) -> int:
        """N."""
        return int(self.logits.shape[0])

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.logits.shape[1])

    @property
    def support_sizes(self) -> np.ndarray:
        """int64 [N], the number of ids a row."""
        return np.diff(self.support_offsets)

    def support_of(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids and the offsets (from 0) of rows begin to end."""
        offsets = self.support_offsets[begin : end + 1]
        return self.support_ids[offsets[0] : offsets[-1]], offsets - offsets[0]


# The arrays of a file: dtype and number of dimensions. Others may stand beside them.
_ARRAYS: dict[str, tuple[type[np.generic], int]] = {
    "logits_bf16": (np.uint16, 2),  # bfloat16 bits, since .npy has no name for the type
    "target": (np.int32, 1),
    "temperature": (np.float32, 1),
    "support_ids": (np.int32, 1),
    "support_offsets": (np.int64, 1),
    "logprob": (np.float32, 1),
}

# What numpy raises for a file that is cut short, altered, or claims more than memory holds.
_BROKEN = (OSError, EOFError, ValueError, KeyError, MemoryError, OverflowError, SyntaxError)
_BROKEN_ZIP = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Reads and checks the file; nothing in it is unpickled.

    Ids, targets and temperatures are not judged here: replaying gives every row a status.

    Raises:
      RecordingError: the file is missing, damaged or no .npz, or an array is absent or has a wrong dtype or shape.
    """
    path = Path(path)
    arrays = _read(path)
    for name, (dtype, rank) in _ARRAYS.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != rank:
            raise RecordingError(
                f"{path}: {name} is {array.dtype} {list(array.shape)}; "
                f"it must be {np.dtype(dtype)} with {rank} dimension{'s' if rank > 1 else ''}"
            )
    rows, vocab_size = arrays["logits_bf16"].shape
    if rows == 0 or not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise RecordingError(
            f"{path}: logits_bf16 is [{rows}, {vocab_size}]; "
            f"it must have at least one row and 1 to {MAX_VOCAB_SIZE} columns"
        )
    for name, length in (
        ("target", rows),
        ("temperature", rows),
        ("logprob", rows),
        ("support_offsets", rows + 1),
    ):
        if arrays[name].shape != (length,):
            raise RecordingError(
                f"{path}: {name} has {arrays[name].shape[0]} entries; "
                f"logits_bf16 [{rows}, {vocab_size}] needs {length}"
            )
    offsets, ids = arrays["support_offsets"], arrays["support_ids"]
    if offsets[0] != 0 or offsets[-1] != ids.size or (offsets[1:] < offsets[:-1]).any():
        raise RecordingError(
            f"{path}: support_offsets must rise from 0 to {ids.size}, the length of support_ids"
        )
    return Recording(
        logits=arrays["logits_bf16"].view(ml_dtypes.bfloat16),
        target=arrays["target"],
        temperature=arrays["temperature"],
        support_ids=ids,
        support_offsets=offsets,
        log_prob=arrays["logprob"],
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            return _read_arrays(path, file)
    except RecordingError:
        raise
    except OSError as error:
        raise RecordingError(f"{path}: cannot read it: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        raise RecordingError(f"{path}: not an .npz file, or cut short") from error


def _read_arrays(path: Path, file: Any) -> dict[str, np.ndarray]:
    # zipfile first: numpy would take a file that is not a zip archive for a pickle and advise to load it as one.
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
    missing = [name for name in _ARRAYS if f"{name}.npy" not in names]
    if missing:
        raise RecordingError(f"{path}: has no array {' or '.join(missing)}")
    file.seek(0)
    arrays = {}
    with np.load(file, allow_pickle=False) as npz:
        for name in _ARRAYS:
            try:
                arrays[name] = np.ascontiguousarray(npz[name])
            except (*_BROKEN, *_BROKEN_ZIP) as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                raise RecordingError(f"{path}: cannot read the array {name}: {reason}") from error
    return arrays
