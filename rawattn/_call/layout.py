"""Where the sequences of a batch lie in memory, and how much of each is real.

Physical starts address memory; logical lengths say how many of a sequence's rows count. Integers on
the host are checked in full, integers on a GPU are never read back to be checked.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rawattn._interop.arrays import import_integers

Int64s = NDArray[np.int64]

_INT32_MAX = 2**31 - 1
_MAX_BINDINGS = 16
_ARRAYS = ("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "cu_seqlen_q", "cu_seqlen_k")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The sequences of one side of a call, queries or keys. Integer arrays are C-contiguous."""

    start: Any  # (batch + 1,) physical starts, NumPy or CuPy, int32 or int64; None in batch mode
    length: Any  # logical lengths: (batch + 1,) if cumulative, else (batch,); None = physical
    cumulative: bool
    rows: int  # physical rows: seqlen in batch mode, total in group mode
    max_seqlen: int  # no logical length is above this
    padded: bool  # rows outside every logical sequence exist, or cannot be ruled out


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The sequences of a call."""

    batch: int
    group: bool
    q: Side
    k: Side
    on_host: bool  # every integer array is host data
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # what others find out about it


@dataclass(frozen=True, slots=True, eq=False)
class HostLengths:
    """First physical row and logical length of every sequence, (batch,) int64 on the host.

    In batch mode a start counts from the sequence's own batch entry: it is 0.
    """

    start_q: Int64s
    len_q: Int64s
    start_k: Int64s
    len_k: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """One side of a layout before it is bound to arrays."""

    side: Literal["q", "k"]
    start: Any
    start_name: str
    length: Any
    length_name: str
    cumulative: bool
    max_seqlen: int | None
    on_host: bool
    # What the host integers tell: the logical lengths, and the longest physical sequence.
    logical: Int64s | None
    longest_slot: int | None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SeqLayout:
    """Where the sequences of a batch start and how long they are.

    With `seqstart_q` the batch is packed (group mode): q is (total_q, nheads_q, D), k and v are
    (total_k, nheads_kv, ...). Without it the batch keeps its axis (batch mode), and lengths given
    here make it a padded one. Every array is one-dimensional, int32 or int64: a list, a NumPy array
    or an array of any framework, on the host or a GPU, mixed as convenient.

    Parameters
    ----------
    seqstart_q, seqstart_k : (batch + 1,), optional
        Physical offsets of each sequence's rows, not decreasing. The first need not be 0 nor the
        last the number of rows. `seqstart_k` defaults to `seqstart_q`.
    cu_seqlen_q, cu_seqlen_k : (batch + 1,), optional
        Cumulative logical lengths, not decreasing. Only differences count; they address nothing.
    seqlen_q, seqlen_k : (batch,), optional
        Logical lengths. Rows of a sequence past its logical length are padding.
    max_seqlen_q, max_seqlen_k : int, optional
        No logical length is above this: checked for lengths on the host, a promise for lengths on a
        GPU, where a good bound saves empty work. Without it the bound is what shapes and host
        integers allow; nothing is read back for it.

    Of several logical lengths for one side, `cu_seqlen_*` counts before `seqlen_*`, and without
    either the physical length does. One that does not count is checked for shape and dtype only.

    Host integers are checked in full and copied: changing them later does not change the layout.
    Arrays on a GPU are held by reference and read by the kernels at every call, so lengths may grow
    in place; only their shape and dtype are checked, and bad values cannot make a kernel leave its
    arrays. The CPU backend and the reference copy them to the host at each call and wait for it.

    Attributes
    ----------
    The parameters, as read-only NumPy arrays, CuPy arrays, ints or None, and

    batch : int or None
        Number of sequences; None when no array is given.
    group : bool
        Whether this is a packed batch.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted. What depends on the arrays of a call
        (rows, batch) is checked at the call.

    Examples
    --------
    Three documents of 3, 5 and 2 tokens, packed in the first 10 rows of arrays of any length:

    >>> packed = SeqLayout(seqstart_q=[0, 3, 8, 10])
    >>> packed
    SeqLayout(seqstart_q=[0, 3, 8, 10])
    >>> packed.batch, packed.group
    (3, True)

    The same documents, each padded to 16 rows of a (3, 16, nheads, D) array:

    >>> padded = SeqLayout(seqlen_q=[3, 5, 2], seqlen_k=[3, 5, 2])
    >>> padded.batch, padded.group
    (3, False)
    """

    seqstart_q: Any = None
    seqstart_k: Any = None
    seqlen_q: Any = None
    seqlen_k: Any = None
    cu_seqlen_q: Any = None
    cu_seqlen_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    batch: int | None = field(init=False)
    group: bool = field(init=False)
    _q: _Given = field(init=False)
    _k: _Given = field(init=False)
    _bindings: dict[tuple[int | None, int, int], Lengths] = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in _ARRAYS:
            put(name, _integers(name, getattr(self, name)))
        for name in ("max_seqlen_q", "max_seqlen_k"):
            put(name, _maximum(name, getattr(self, name)))
        if self.seqstart_k is not None and self.seqstart_q is None:
            raise ValueError(
                "seqstart_k: got it without seqstart_q, expected both for a packed batch (group "
                "mode); in a padded batch give lengths alone: seqlen_k or cu_seqlen_k"
            )
        put("batch", _common_batch({name: getattr(self, name) for name in _ARRAYS}))
        put("group", self.seqstart_q is not None)
        put("_q", self._given("q"))
        put("_k", self._given("k"))
        put("_bindings", {})

    def __repr__(self) -> str:
        given = []
        for name in (*_ARRAYS, "max_seqlen_q", "max_seqlen_k"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                few = value.size <= 8
                value = value.tolist() if few else f"<{value.size} {value.dtype} on the host>"
            elif value is not None and not isinstance(value, int):
                value = f"<{value.size} {value.dtype} on a GPU>"
            if value is not None:
                given.append(f"{name}={value}")
        return f"SeqLayout({', '.join(given)})"

    def _given(self, side: Literal["q", "k"]) -> _Given:
        start_name = f"seqstart_{side}"
        start = getattr(self, start_name)
        if start is None and self.group:
            start, start_name = self.seqstart_q, "seqstart_k (by default seqstart_q)"
        cumulative = getattr(self, f"cu_seqlen_{side}") is not None
        length_name = f"cu_seqlen_{side}" if cumulative else f"seqlen_{side}"
        length = getattr(self, length_name)
        max_seqlen = getattr(self, f"max_seqlen_{side}")

        slots = _differences(start_name, start) if isinstance(start, np.ndarray) else None
        logical = slots
        if length is not None:
            logical = None
            if isinstance(length, np.ndarray):
                read = _differences if cumulative else _counts
                logical = read(length_name, length)
        else:
            length_name = start_name

        if length is not None and logical is not None and slots is not None:
            _check_at_most(
                length_name, logical, slots, f"the physical length that {start_name} gives it"
            )
        if max_seqlen is not None and logical is not None and logical.size:
            _check_maximum(side, max_seqlen, int(logical.max()), length_name)
        return _Given(
            side=side,
            start=start,
            start_name=start_name,
            length=length,
            length_name=length_name,
            cumulative=cumulative,
            max_seqlen=max_seqlen,
            on_host=all(x is None or isinstance(x, np.ndarray) for x in (start, length)),
            logical=logical,
            longest_slot=None if slots is None else int(slots.max(initial=0)),
        )


def bind(seqs: SeqLayout | None, *, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    """The sequences of a call on arrays of these rows; `batch` is None in group mode.

    Never synchronises. The result is remembered: the same layout and shapes give the same object.

    Raises TypeError for something that is not a SeqLayout, ValueError for one that does not fit.
    """
    if seqs is None:
        if batch is None:
            raise _not_packed("None")
        return _dense(batch, rows_q, rows_k)
    if not isinstance(seqs, SeqLayout):
        raise TypeError(f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None")
    if batch is None and not seqs.group:
        raise _not_packed("a SeqLayout without seqstart_q")
    lengths = seqs._bindings.get((batch, rows_q, rows_k))
    if lengths is None:
        lengths = _bind(seqs, batch, rows_q, rows_k)
        if len(seqs._bindings) >= _MAX_BINDINGS:
            seqs._bindings.clear()
        seqs._bindings[batch, rows_q, rows_k] = lengths
    return lengths


def host_lengths(lengths: Lengths) -> HostLengths:
    """Starts and lengths as host integers.

    Arrays on a GPU are copied back, which synchronises with CuPy's current stream. Their values are
    clamped as the kernels clamp them: whatever they hold, a sequence lies inside its array.
    """
    return HostLengths(*_spans(lengths.q, lengths.batch), *_spans(lengths.k, lengths.batch))


def _bind(seqs: SeqLayout, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    if batch is not None and seqs.group:
        raise ValueError(
            "seqs: got seqstart_q, which is for a packed q (total_q, nheads_q, D), but q has four "
            "axes (batch, seqlen_q, nheads_q, D); expected lengths alone: seqlen_* or cu_seqlen_*"
        )
    if batch is not None and seqs.batch is not None and batch != seqs.batch:
        raise ValueError(
            f"seqs: got lengths of {seqs.batch} sequences, expected {batch}, the batch of q"
        )
    count = seqs.batch if batch is None else batch
    assert count is not None
    return Lengths(
        batch=count,
        group=seqs.group,
        q=_side(seqs._q, count, rows_q),
        k=_side(seqs._k, count, rows_k),
        on_host=seqs._q.on_host and seqs._k.on_host,
    )


@functools.lru_cache(maxsize=256)
def _dense(batch: int, rows_q: int, rows_k: int) -> Lengths:
    return _bind(SeqLayout(), batch, rows_q, rows_k)


def _side(given: _Given, batch: int, rows: int) -> Side:
    side, start, logical = given.side, given.start, given.logical
    room = f"the rows of {side}"
    if isinstance(start, np.ndarray) and start[-1] > rows:
        raise ValueError(
            f"{given.start_name}: got an end of {start[-1]}, expected at most {rows}, {room}"
        )
    capacity = rows if start is not None else batch * rows
    total = None  # logical rows, where known
    if start is None and given.length is None:
        if batch and given.max_seqlen is not None:
            _check_maximum(side, given.max_seqlen, rows, f"the shape of {side}")
        longest, total = rows, capacity
    elif logical is not None:
        _check_at_most(given.length_name, logical, rows, room)
        longest, total = int(logical.max(initial=0)), int(logical.sum())
        if total > capacity:
            raise ValueError(
                f"{given.length_name}: got {total} rows in all, expected at most {capacity}, {room}"
            )
    else:
        bounds = (given.max_seqlen, given.longest_slot, rows)
        longest = min(bound for bound in bounds if bound is not None)
    if longest > _INT32_MAX:
        advice = f"; give SeqLayout(max_seqlen_{side}=...) if it has fewer" if total is None else ""
        raise ValueError(
            f"{side}: got a sequence of up to {longest} rows, expected at most {_INT32_MAX}{advice}"
        )
    return Side(
        start=start,
        length=given.length,
        cumulative=given.cumulative,
        rows=rows,
        max_seqlen=longest,
        # Sequences never overlap: they cover the rows when their lengths add up to them.
        padded=capacity > 0 and not (given.on_host and total == capacity),
    )


def _spans(side: Side, batch: int) -> tuple[Int64s, Int64s]:
    start = np.zeros(batch, np.int64)
    room = np.full(batch, side.rows, np.int64)
    if side.start is not None:
        bounds = np.clip(_to_host(side.start), 0, side.rows)
        start = bounds[:-1]
        room = np.maximum(bounds[1:] - start, 0)
    if side.length is None:
        return start, room
    length = _to_host(side.length)
    return start, np.clip(np.diff(length) if side.cumulative else length, 0, room)


def _to_host(integers: Any) -> Int64s:
    host = integers if isinstance(integers, np.ndarray) else integers.get()
    return host.astype(np.int64)


def _integers(name: str, value: Any) -> Any:
    """A one-dimensional array as the layout keeps it: host data copied, a GPU array as it is."""
    if value is None:
        return None
    array = import_integers(name, value)
    cumulative = not name.startswith("seqlen")
    shape = "(batch + 1,)" if cumulative else "(batch,)"
    if array.ndim != 1 or (cumulative and not array.size):
        raise ValueError(f"{name}: got shape {array.shape}, expected {shape}")
    if not isinstance(array, np.ndarray):
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name}: got a GPU array of stride {array.strides[0]} bytes, expected a "
                "contiguous one, since it is read in place at every call; pass a contiguous copy"
            )
        return array
    array = np.array(array, dtype=np.int32 if array.dtype.itemsize == 4 else np.int64)
    array.flags.writeable = False
    return array


def _not_packed(got: str) -> ValueError:
    return ValueError(
        f"seqs: got {got}, but q of three axes (total_q, nheads_q, D) is a packed batch; expected "
        "SeqLayout(seqstart_q=...), where cumulative lengths serve if there are no gaps; or give q "
        "four axes (batch, seqlen_q, nheads_q, D)"
    )


def _maximum(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int >= 0 or None")
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected an int >= 0 or None")
    return int(value)


def _common_batch(arrays: dict[str, Any]) -> int | None:
    first, batch = "", None
    for name, array in arrays.items():
        if array is None:
            continue
        count = array.size - (not name.startswith("seqlen"))
        if batch is None:
            first, batch = name, count
        elif count != batch:
            raise ValueError(
                f"{name}: got {array.size} entries, expected {array.size - count + batch}: {first} "
                f"is that of {batch} sequences (seqlen_* is (batch,), others are (batch + 1,))"
            )
    return batch


def _differences(name: str, array: NDArray[Any]) -> Int64s:
    if array[0] < 0:
        raise ValueError(f"{name}: got {array[0]} first, expected offsets >= 0")
    falls = np.flatnonzero(array[1:] < array[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"{name}: got {array[i + 1]} after {array[i]} (index {i + 1}), expected offsets that "
            "do not decrease"
        )
    return np.diff(array).astype(np.int64)


def _counts(name: str, array: NDArray[Any]) -> Int64s:
    negative = np.flatnonzero(array < 0)
    if negative.size:
        i = int(negative[0])
        raise ValueError(f"{name}: got {array[i]} (index {i}), expected lengths >= 0")
    return array.astype(np.int64)


def _check_at_most(name: str, lengths: Int64s, most: Int64s | int, what: str) -> None:
    longer = np.flatnonzero(lengths > most)
    if longer.size:
        i = int(longer[0])
        limit = most if isinstance(most, int) else most[i]
        raise ValueError(
            f"{name}: got length {lengths[i]} for sequence {i}, expected at most {limit}, {what}"
        )


def _check_maximum(side: str, max_seqlen: int, longest: int, source: str) -> None:
    if max_seqlen < longest:
        raise ValueError(
            f"max_seqlen_{side}: got {max_seqlen}, expected at least {longest}, the longest "
            f"sequence by {source}"
        )
