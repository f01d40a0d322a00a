"""Support: the recorded ids of every row, a small pytree of NumPy, JAX or torch arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays, _checks, _pytree, contract
from ._nested import nested_lists

_NAMES = ("token_ids", "begins", "ends", "log_probs")


@dataclass(frozen=True, eq=False, repr=False, slots=True, weakref_slot=True)
class Support:
    """The recorded ids of every row, ragged or padded; all arrays are NumPy, all JAX, or all torch.

    Ragged: row r has the ids ``token_ids[..., begins[r]:ends[r]]`` of its own batch entry; C may exceed what is used.
    Padded (``begins`` and ``ends`` are None): row r has ``token_ids[..., r, :]``. In both, -1 is an unused slot.
    The batch axes may be absent: [C] and [R], or [R, K], is one flat piece.

    Attributes:
      token_ids: int32 [*batch, C], or [*batch, R, K] when padded.
      begins: int32 [*batch, R], or None.
      ends: int32 [*batch, R], or None.
      log_probs: float32 with the shape of ``token_ids``: the engine's own value for each member, in nat; or None.

    Raises:
      TypeError: no arrays, arrays of several frameworks, or dtypes other than these. NumPy integers of any width are
        converted (ValueError outside int32), and NumPy floats.
      ValueError: shapes that do not fit each other.
    """

    token_ids: Any
    begins: Any = None
    ends: Any = None
    log_probs: Any = None

    def __post_init__(self) -> None:
        for name, x in zip(_NAMES, _checks.checked_leaves(*self._leaves()), strict=True):
            object.__setattr__(self, name, x)
        _pytree.ensure_registered()

    @staticmethod
    def _unchecked(
        token_ids: Any, begins: Any = None, ends: Any = None, log_probs: Any = None
    ) -> Support:
        """A Support of anything at all: pytrees hold tracers, axes, shardings and placeholders."""
        support = object.__new__(Support)
        object.__setattr__(support, "token_ids", token_ids)
        object.__setattr__(support, "begins", begins)
        object.__setattr__(support, "ends", ends)
        object.__setattr__(support, "log_probs", log_probs)
        _pytree.ensure_registered()
        return support

    def __reduce__(self) -> Any:
        return Support._unchecked, self._leaves()

    def _leaves(self) -> tuple[Any, ...]:
        return self.token_ids, self.begins, self.ends, self.log_probs

    def _map(self, f: Any) -> Support:
        return Support._unchecked(*(None if x is None else f(x) for x in self._leaves()))

    @property
    def is_padded(self) -> bool:
        """Whether the layout is [*batch, R, K]."""
        return self.begins is None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """[*batch, R]."""
        return tuple(self.token_ids.shape[:-1] if self.is_padded else self.begins.shape)

    @property
    def capacity(self) -> int:
        """C, the slots of a batch entry; K, the slots of a row, when padded."""
        return int(self.token_ids.shape[-1])

    def __len__(self) -> int:
        return self.row_shape[0]

    def __repr__(self) -> str:
        def describe(x: Any) -> str:
            shape = getattr(x, "shape", None)
            return type(x).__name__ if shape is None else str(list(shape))

        layout = "padded" if self.is_padded else "ragged"
        arrays = ", ".join(
            f"{name}={describe(x)}"
            for name, x in zip(_NAMES, self._leaves(), strict=True)
            if x is not None
        )
        kind = _arrays.kind_of(self.token_ids)
        return f"Support({layout}, {arrays}{f', {kind}' if kind else ''})"

    def __getitem__(self, index: Any) -> Support:
        """Slices the leading axis of every array: the batch, or the rows of a flat piece (which keeps its ids).

        An integer drops a leading batch axis; a flat piece has none (TypeError).
        """
        flat = len(self.row_shape) < 2
        if not isinstance(index, slice):
            if isinstance(index, bool) or not hasattr(index, "__index__"):
                raise TypeError(
                    f"a Support is indexed by an int or a slice, got {type(index).__name__}; "
                    f"take(rows) gathers rows"
                )
            index = operator.index(index)
            if flat:
                raise TypeError(
                    f"a flat Support has no batch axis to drop: write support[{index}:{index + 1}] for the row"
                )
            # JAX would clamp, and iteration would never end.
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} is past the leading axis of {self.row_shape}")
        if flat and not self.is_padded:
            return Support._unchecked(
                self.token_ids, self.begins[index], self.ends[index], self.log_probs
            )
        return self._map(lambda x: x[index])

    def take(self, rows: Any) -> Support:
        """Gathers rows; static shapes, so it works under jit.

        Args:
          rows: integers [*batch, R'], row numbers within their own batch entry: NumPy, or of this Support's framework.
            A negative number, or one past the last row, gives an empty row.

        Returns:
          A Support of R' rows. A ragged one shares ``token_ids`` with this one.
        """
        rows, inside = _checks.gatherable_rows(self, rows)

        def pick(x: Any, index: Any, mask: Any, axis: int, empty: float) -> Any:
            if self.row_shape[-1] == 0:  # nothing to gather from
                shape = (*rows.shape, x.shape[-1]) if self.is_padded else rows.shape
                return _arrays.full(x, tuple(shape), empty)
            return _arrays.where(mask, _arrays.gather(x, index, axis), empty)

        if not self.is_padded:
            begins = pick(self.begins, rows, inside, -1, 0)
            ends = pick(self.ends, rows, inside, -1, 0)
            return Support._unchecked(self.token_ids, begins, ends, self.log_probs)
        rows_of_slots, inside = rows[..., None], inside[..., None]
        token_ids = pick(self.token_ids, rows_of_slots, inside, -2, -1)
        log_probs = self.log_probs
        if log_probs is not None:
            log_probs = pick(log_probs, rows_of_slots, inside, -2, -np.inf)
        return Support._unchecked(token_ids, None, None, log_probs)

    def with_capacity(self, n: int) -> Support:
        """Changes C (or K) to n: fills up with -1 (``log_probs`` with -inf), or cuts off unused slots.

        Raises:
          ValueError: a used slot would be lost, or slots would be cut under a trace, where that cannot be seen.
        """
        n = operator.index(n)
        if not 0 <= n <= _arrays.INT32.max:
            raise ValueError(f"capacity must lie between 0 and {_arrays.INT32.max}, got {n}")
        if n == self.capacity:
            return self
        if n < self.capacity:
            used = self._used_capacity(n)
            if n < used:
                raise ValueError(
                    f"cannot cut the capacity from {self.capacity} to {n}: {used} slots are used"
                )
        begins, ends = self.begins, self.ends
        if begins is not None:
            inside = _checks.good_extents(begins, ends, self.capacity)
            begins, ends = _shift_extents(begins, ends, inside, 0)
            if n < self.capacity:  # empty rows may have stood anywhere
                begins, ends = (_arrays.where(x <= n, x, n) for x in (begins, ends))
        log_probs = self.log_probs
        if log_probs is not None:
            log_probs = _arrays.resize_last(log_probs, n, -np.inf)
        return Support._unchecked(
            _arrays.resize_last(self.token_ids, n, -1), begins, ends, log_probs
        )

    def _used_capacity(self, wanted: int) -> int:
        leaves = (self.token_ids,) if self.is_padded else (self.begins, self.ends)
        if any(_arrays.is_traced(x) for x in leaves):
            raise ValueError(
                f"cannot cut the capacity from {self.capacity} to {wanted} under a trace: the values "
                f"that would be lost cannot be seen there"
            )
        host = [_arrays.to_host("support", x) for x in leaves]
        if self.is_padded:
            slots = np.flatnonzero((host[0] != -1).reshape(-1, self.capacity).any(0))
            return int(slots[-1]) + 1 if slots.size else 0
        begins, ends = host
        used = ends[_checks.good_extents(begins, ends, self.capacity) & (ends > begins)]
        return int(used.max(initial=0))

    def sizes(self) -> Any:
        """int32 [*batch, R], the number of slots of each row that are not -1 (0 for a bad extent). Works under jit."""
        counts = _arrays.cumulative_count(self.token_ids != -1)
        if self.is_padded:
            return counts[..., -1]
        good = _checks.good_extents(self.begins, self.ends, self.capacity)
        begins, ends = (_arrays.where(good, x, 0) for x in (self.begins, self.ends))
        return _arrays.gather(counts, ends, -1) - _arrays.gather(counts, begins, -1)

    def to_lists(self) -> list[Any]:
        """The ids of every row as Python lists, nested by the batch axes; -1 is skipped. Copies from a device.

        Raises:
          TypeError: under a trace.
          ValueError: an extent that does not lie within the slots.
        """
        host = self.numpy()
        _checks.check_extents(host, np.ones(host.row_shape, bool))
        return nested_lists(host)

    def numpy(self) -> Support:
        """The same Support of NumPy arrays; TypeError under a trace."""
        return Support._unchecked(
            *(
                None if x is None else _arrays.to_host(f"support.{name}", x)
                for name, x in zip(_NAMES, self._leaves(), strict=True)
            )
        )

    def to(self, device: Any) -> Support:
        """The same Support on a device: a torch device or its name ("cuda:0") for torch, or a JAX device or Sharding.

        NumPy arrays become arrays of the framework that the device belongs to; those of a framework stay in it.
        """
        return self._map(lambda x: _arrays.to_device(x, device))

    def validate(
        self,
        vocab_size: int,
        targets: Any = None,
        loss_mask: Any = None,
        *,
        missing: str = "neg_inf",
        empty: str = "neg_inf",
    ) -> Support:
        """Checks on the host what the kernels would only report as a row's status.

        Args:
          vocab_size: ids lie below it.
          targets: integers [*batch, R]; a negative one marks an ignored row. None: only the ids are checked.
          loss_mask: [*batch, R] bool, or numbers with 0 as False; a False row is ignored, whatever it holds.
          missing: "include" allows targets outside their support, as in :func:`jax_topp.replay`.
          empty: "full_vocab" allows empty rows, likewise.

        Returns:
          This Support.

        Raises:
          ValueError: naming the row, the position within it and the id: an extent outside the slots, an id outside
            the vocabulary, a target outside the vocabulary or its support, an empty row with a target.
          TypeError: under a trace, or for wrong dtypes.
        """
        options = contract.option_bits(missing, empty)
        _checks.validate(
            self.numpy(), _checks.check_vocab_size(vocab_size), targets, loss_mask, options
        )
        return self

    @staticmethod
    def concatenate(supports: Sequence[Support]) -> Support:
        """Joins flat pieces along their rows. Ragged and padded ones together give a ragged one.

        Raises:
          TypeError: pieces of different frameworks. ValueError: none, batched ones, or ``log_probs`` in some only.
        """
        pieces = _flat_pieces("concatenate", supports)
        if len(pieces) == 1:
            return pieces[0]
        if pieces[0].is_padded:
            capacity = max(piece.capacity for piece in pieces)
            return _join([piece.with_capacity(capacity) for piece in pieces], _arrays.concatenate)
        total = sum(piece.capacity for piece in pieces)
        if total > _arrays.INT32.max:
            raise ValueError(f"the pieces have {total} slots together, more than int32 can number")
        shifted, offset = [], 0
        for piece in pieces:
            inside = _checks.good_extents(piece.begins, piece.ends, piece.capacity)
            extents = _shift_extents(piece.begins, piece.ends, inside, offset)
            shifted.append(Support._unchecked(piece.token_ids, *extents, piece.log_probs))
            offset += piece.capacity
        return _join(shifted, _arrays.concatenate)

    @staticmethod
    def stack(supports: Sequence[Support]) -> Support:
        """Lays flat pieces of equal R side by side on a new leading batch axis, filling up C (or K) with -1.

        Raises:
          TypeError, ValueError: as :meth:`concatenate`; ValueError also for unequal R.
        """
        pieces = _flat_pieces("stack", supports)
        counts = [len(piece) for piece in pieces]
        if len(set(counts)) > 1:
            raise ValueError(f"stack needs pieces of equally many rows, got {counts}")
        capacity = max(piece.capacity for piece in pieces)
        return _join([piece.with_capacity(capacity) for piece in pieces], _arrays.stack)

    @staticmethod
    def from_lists(rows: Any, *, none: str = "error", log_probs: Any = None) -> Support:
        """See :func:`jax_topp.readers.from_lists`."""
        from . import readers

        return readers.from_lists(rows, none=none, log_probs=log_probs)

    @staticmethod
    def from_sampling_mask(rows: Any, *, none: str = "error", log_probs: Any = None) -> Support:
        """The same as :meth:`from_lists`, by the engines' name for it."""
        return Support.from_lists(rows, none=none, log_probs=log_probs)

    @staticmethod
    def from_csr(token_ids: Any, offsets: Any, *, log_probs: Any = None) -> Support:
        """See :func:`jax_topp.readers.from_csr`."""
        from . import readers

        return readers.from_csr(token_ids, offsets, log_probs=log_probs)

    @staticmethod
    def from_padded(token_ids: Any, counts: Any = None, *, log_probs: Any = None) -> Support:
        """See :func:`jax_topp.readers.from_padded`."""
        from . import readers

        return readers.from_padded(token_ids, counts, log_probs=log_probs)

    @staticmethod
    def from_bitmask(bits: Any, vocab_size: int) -> Support:
        """See :func:`jax_topp.readers.from_bitmask`."""
        from . import readers

        return readers.from_bitmask(bits, vocab_size)

    @staticmethod
    def from_top_log_probs(ids: Any, log_probs: Any) -> Support:
        """See :func:`jax_topp.readers.from_top_log_probs`."""
        from . import readers

        return readers.from_top_log_probs(ids, log_probs)


def _shift_extents(begins: Any, ends: Any, good: Any, offset: int) -> tuple[Any, Any]:
    """Moves the good extents. A bad one becomes -1, so that it stays bad wherever its slots go."""
    return _arrays.where(good, begins + offset, -1), _arrays.where(good, ends + offset, -1)


def _flat_pieces(what: str, supports: Sequence[Support]) -> list[Support]:
    """The pieces of a join: flat, of one framework, all with or all without log_probs, of one layout."""
    pieces = list(supports)
    if not pieces:
        raise ValueError(f"{what} needs at least one Support")
    for i, piece in enumerate(pieces):
        if not isinstance(piece, Support):
            raise TypeError(f"{what} joins Supports, but item {i} is a {type(piece).__name__}")
        if len(piece.row_shape) != 1:
            raise ValueError(f"{what} joins flat pieces, but item {i} has rows {piece.row_shape}")
    kinds = [_arrays.kind_of(piece.token_ids) for piece in pieces]
    if len(set(kinds)) > 1:
        raise TypeError(f"{what} needs pieces of one framework, got {kinds}")
    bare = [i for i, piece in enumerate(pieces) if piece.log_probs is None]
    if bare and len(bare) < len(pieces):
        raise ValueError(
            f"{what} needs log_probs in all pieces or in none: item {bare[0]} has none"
        )
    if len({piece.is_padded for piece in pieces}) > 1:
        pieces = [_as_ragged(piece) for piece in pieces]
    return pieces


def _as_ragged(piece: Support) -> Support:
    if not piece.is_padded:
        return piece
    rows, slots = piece.token_ids.shape
    begins = _arrays.arange(piece.token_ids, rows) * slots
    log_probs = None if piece.log_probs is None else piece.log_probs.reshape(-1)
    return Support._unchecked(piece.token_ids.reshape(-1), begins, begins + slots, log_probs)


def _join(pieces: list[Support], join: Any) -> Support:
    leaves = zip(*(piece._leaves() for piece in pieces), strict=True)
    return Support._unchecked(*(None if xs[0] is None else join(list(xs)) for xs in leaves))
