"""`SeqLayout`, by which a caller says where sequences start and how long they are, and its meeting with a call's arrays."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rawattn._call import integers
from rawattn._call.argument_kinds import all_by_name, checks_arguments
from rawattn._call.given import Given, common_batch, read_side
from rawattn._call.hints import NoOthers, hides_unknown, layout_advice, refuse_unknown
from rawattn._call.layout import Lengths, bound_of, side_of
from rawattn._forgetting import make_room
from rawattn._interop.integers import as_array
from rawattn._interop.xla import is_traced

if TYPE_CHECKING:  # type checkers bring it: nothing is installed for it
    from typing_extensions import Never, Unpack

_MAX_BINDINGS = 16
# Batches of layouts on GPUs, by what tells those.
_batches: dict[tuple[Any, ...], int | None] = {}
_MAX_TOLD = 4096
_ARRAYS = ("seqstart_q", "seqstart_k", "seqlen_q", "seqlen_k", "cu_seqlen_q", "cu_seqlen_k")


# What starts on the host come to: the longest way from one to the next, the first and the last.
Starts = tuple[int, int, int]


class _Shown:
    """An attribute of a layout: integers as arrays, of which those in tensors of torch's are CuPy's."""

    def __set_name__(self, owner: type[SeqLayout], name: str) -> None:
        self._name = name

    def __get__(self, layout: SeqLayout | None, owner: type[SeqLayout]) -> Any:
        if layout is None:  # the class has none
            raise AttributeError(self._name)
        return as_array(layout._arrays.get(self._name))


@dataclass(frozen=True, eq=False, repr=False, init=False, kw_only=True)
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
        last the number of rows. `seqstart_k` defaults to `seqstart_q`, where q and k have the same
        number of rows. One array given as both is the same as that, and a little quicker than two.
    cu_seqlen_q, cu_seqlen_k : (batch + 1,), optional
        Cumulative logical lengths, not decreasing. Only differences count; they address nothing.
    seqlen_q, seqlen_k : (batch,), optional
        Logical lengths. Rows of a sequence past its logical length are padding.
    max_seqlen_q, max_seqlen_k : int, optional
        No logical length is above this: checked for lengths on the host, a promise for lengths on a
        GPU, where a good bound saves empty work. Without it the bound is what shapes and host
        integers allow; nothing is read back for it.

    See `from_lengths` for a packed batch of known lengths, `from_padding_mask` for a padded one.

    Of several logical lengths for one side, `cu_seqlen_*` counts before `seqlen_*`, and without
    either the physical length does. One that does not count is checked for shape and dtype only.

    Host integers are checked in full and copied: changing them later does not change the layout.
    Arrays on a GPU are held by reference and read by the kernels at every call, so lengths may grow
    in place; only their shape and dtype are checked, and bad values cannot make a kernel leave its
    arrays. The CPU backend and the reference copy them to the host at each call and wait for it.
    Arrays that JAX traces are for `rawattn.jax` alone, with the rules of those on a GPU.

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

    Gaps are legal: here rows 0 and 1 belong to nobody, and 2 rows after each document are padding.

    >>> gaps = SeqLayout(seqstart_q=[2, 7, 14, 18], seqlen_q=[3, 5, 2], seqlen_k=[3, 5, 2])

    So lengths given as starts are no error where they happen to rise, but two documents, of rows
    2 and of rows 3 to 4:

    >>> mistaken = SeqLayout(seqstart_q=[2, 3, 5])
    >>> mistaken.batch
    2
    >>> SeqLayout.from_lengths([2, 3, 5])
    SeqLayout(seqstart_q=[0, 2, 5, 10])
    """

    seqstart_q: Any = _Shown()
    seqstart_k: Any = _Shown()
    seqlen_q: Any = _Shown()
    seqlen_k: Any = _Shown()
    cu_seqlen_q: Any = _Shown()
    cu_seqlen_k: Any = _Shown()
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch: int | None = field(init=False)
    group: bool = field(init=False)
    # By name, those that were given: as their addresses are read at a call.
    _arrays: dict[str, Any] = field(init=False)
    # Whether one array was given as the starts of both sides, and nothing else: as if those of k had been left out.
    _joined: bool = field(init=False)
    # Of starts alone, all on the host, what their values come to; else None.
    _values: tuple[Starts, Starts] | None = field(init=False)
    # What tells layouts apart but for addresses and `_values`, where all integers are on GPUs or those are there; else None.
    _told: tuple[Any, ...] | None = field(init=False)
    _bindings: dict[tuple[int | None, int, int], Lengths] = field(init=False)
    # The last call of each verb, by its name: the form of its arrays, these lengths for it or where they are, and what makes it
    # again. By what makes calls again, what that is given instead of starts on the host.
    _calls: dict[Any, Any] = field(init=False)

    @hides_unknown
    def __init__(
        self,
        *misplaced: Never,
        seqstart_q: Any = None,
        seqstart_k: Any = None,
        seqlen_q: Any = None,
        seqlen_k: Any = None,
        cu_seqlen_q: Any = None,
        cu_seqlen_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **unknown: Unpack[NoOthers],
    ) -> None:
        if misplaced:  # a decorator that looks for them costs every layout a tenth
            raise all_by_name("SeqLayout", misplaced)
        if unknown:
            refuse_unknown(
                "SeqLayout", unknown, (*_ARRAYS, "max_seqlen_q", "max_seqlen_k"), layout=True
            )
        # Written out: a loop over all six takes as long as to read one of them.
        arrays: dict[str, Any] = {}
        joined = seqstart_k is seqstart_q and seqstart_q is not None
        read = integers.read_in_place
        if seqstart_q is not None:
            arrays["seqstart_q"] = seqstart_q = read("seqstart_q", seqstart_q)
        if joined:
            arrays["seqstart_k"] = seqstart_k = seqstart_q
        elif seqstart_k is not None:
            arrays["seqstart_k"] = seqstart_k = read("seqstart_k", seqstart_k)
        if seqlen_q is not None:
            arrays["seqlen_q"] = seqlen_q = read("seqlen_q", seqlen_q)
        if seqlen_k is not None:
            arrays["seqlen_k"] = seqlen_k = read("seqlen_k", seqlen_k)
        if cu_seqlen_q is not None:
            arrays["cu_seqlen_q"] = cu_seqlen_q = read("cu_seqlen_q", cu_seqlen_q)
        if cu_seqlen_k is not None:
            arrays["cu_seqlen_k"] = cu_seqlen_k = read("cu_seqlen_k", cu_seqlen_k)
        if max_seqlen_q is not None:
            max_seqlen_q = integers.maximum("max_seqlen_q", max_seqlen_q)
        if max_seqlen_k is not None:
            max_seqlen_k = integers.maximum("max_seqlen_k", max_seqlen_k)
        if seqstart_k is not None and seqstart_q is None:
            raise ValueError(
                "seqstart_k: got it without seqstart_q, expected both for a packed batch (group "
                "mode); in a padded batch give lengths alone: seqlen_k or cu_seqlen_k"
            )
        # As attributes, a frozen class takes them ten times as slowly.
        fields = self.__dict__
        fields["max_seqlen_q"] = max_seqlen_q
        fields["max_seqlen_k"] = max_seqlen_k
        fields["group"] = seqstart_q is not None
        fields["_arrays"] = arrays
        fields["_bindings"] = {}
        fields["_calls"] = {}
        fields["_joined"] = joined and len(arrays) == 2 and max_seqlen_q == max_seqlen_k
        fields["_values"] = None
        fields["_told"] = told = self._find_told()
        # What one was found to be, all that are told the same are: nothing of it depends on values.
        batch = None if told is None else _batches.get(told)
        if batch is None:
            batch = common_batch(arrays)
            fields["_sides"] = _read_sides(arrays, max_seqlen_q, max_seqlen_k)
            if told is not None:
                make_room(_batches, _MAX_TOLD)
                _batches[told] = batch
        fields["batch"] = batch

    @functools.cached_property
    def _sides(self) -> tuple[Given, Given]:
        """What is said of q and of k: found by the constructor, but for layouts that it knew without."""
        return _read_sides(self._arrays, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def _q(self) -> Given:
        return self._sides[0]

    @property
    def _k(self) -> Given:
        return self._sides[1]

    def _addresses(self) -> list[int]:
        """Of integers that are all on GPUs: starts and lengths of queries, then of keys, 0 for those that are not given."""
        get = self._arrays.get
        start_q, start_k = get("seqstart_q"), get("seqstart_k")
        if start_k is None:
            start_k = start_q
        length_q, length_k = get("cu_seqlen_q"), get("cu_seqlen_k")
        if length_q is None:
            length_q = get("seqlen_q")
        if length_k is None:
            length_k = get("seqlen_k")
        return [
            0 if start_q is None else start_q.data.ptr,
            0 if length_q is None else length_q.data.ptr,
            0 if start_k is None else start_k.data.ptr,
            0 if length_k is None else length_k.data.ptr,
        ]

    def _find_told(self) -> tuple[Any, ...] | None:
        arrays = self._arrays
        told: tuple[Any, ...] = self.max_seqlen_q, self.max_seqlen_k, self._joined
        start = arrays.get("seqstart_q")
        if type(start) is np.ndarray:
            start_k = arrays.get("seqstart_k", start)
            if len(arrays) > 1 + ("seqstart_k" in arrays) or type(start_k) is not np.ndarray:
                return None
            q = k = integers.most_between("seqstart_q", start)
            if start_k is not start:
                k = integers.most_between("seqstart_k", start_k)
            most_q, most_k = self.max_seqlen_q, self.max_seqlen_k
            if (most_q is not None and most_q < q[0]) or (most_k is not None and most_k < k[0]):
                return None
            self.__dict__["_values"] = q, k
            return *told, start.size, start_k.size, len(arrays)
        for name, x in arrays.items():
            if type(x) is np.ndarray:
                return None
            device = getattr(getattr(x, "data", None), "device_id", None)
            if device is None:  # of a function of JAX under transformation
                return None
            told += name, x.size, x.dtype, device
        return told if arrays else None

    def _bounds(self, rows_q: int, rows_k: int) -> tuple[int, bool, int, bool] | None:
        """What a call on arrays of these rows looks at of `_values`: a bound of each side's lengths, and whether it has
        padding. None where they do not fit.
        """
        assert self._values is not None
        q, k = self._values
        longest, first, last = q
        if last > rows_q:
            return None
        most, padded = bound_of(longest, rows_q), last - first != rows_q
        if rows_k == rows_q and k is q:
            return most, padded, most, padded
        longest, first, last = k
        if last > rows_k or len(self._arrays) == 1:
            return None
        return most, padded, bound_of(longest, rows_k), last - first != rows_k

    def _apart(self) -> SeqLayout:
        """The same, whose starts of k may become others than those of q, if they are on a GPU."""
        if not self._joined or self._values is not None:
            return self
        found = copy.copy(self)
        vars(found)["_joined"] = False
        vars(found)["_told"] = found._find_told()
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, whose arrays lie elsewhere: without what calls have found."""
        state = {**self.__dict__, "_bindings": {}, "_calls": {}}
        state.pop("_sides", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Its arrays may be on another GPU."""
        self.__dict__.update(state)
        self.__dict__["_told"] = self._find_told()

    @classmethod
    @checks_arguments("SeqLayout.from_lengths")
    def from_lengths(
        cls,
        lengths_q: Any,
        lengths_k: Any = None,
        *,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> SeqLayout:
        """A packed batch of sequences that follow each other without a gap, from their lengths.

        Parameters
        ----------
        lengths_q, lengths_k : (batch,)
            Rows of each sequence, int32 or int64, of any framework or a list. `lengths_k` None: k
            has the sequences of q.
        max_seqlen_q, max_seqlen_k : int, optional
            As of `SeqLayout`: worth giving for lengths on a GPU.

        Returns
        -------
        SeqLayout
            With `seqstart_q`, and `seqstart_k` if `lengths_k` is given, int64, (batch + 1,). Those of
            lengths on a GPU are computed there, now, on the stream that the lengths belong on, and
            the host does not wait: later changes of the lengths do not reach them.

        Raises
        ------
        TypeError, ValueError
            For lengths that are no integers, negative ones on the host, batches that differ.

        Examples
        --------
        >>> SeqLayout.from_lengths([3, 5, 2])
        SeqLayout(seqstart_q=[0, 3, 8, 10])
        >>> SeqLayout.from_lengths([1, 1], lengths_k=[7, 4])  # one new token each, after 6 and 3
        SeqLayout(seqstart_q=[0, 1, 2], seqstart_k=[0, 7, 11])
        """
        starts_q = integers.starts_from_lengths("lengths_q", lengths_q)
        starts_k = None
        if lengths_k is not None:
            starts_k = integers.starts_from_lengths("lengths_k", lengths_k)
            _check_same_batch("lengths", starts_k.size - 1, starts_q.size - 1)
        return cls(
            seqstart_q=starts_q,
            seqstart_k=starts_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    @classmethod
    @checks_arguments("SeqLayout.from_padding_mask")
    def from_padding_mask(cls, mask_q: Any, mask_k: Any = None) -> SeqLayout:
        """A padded batch (batch mode) from the mask that tells its tokens from its padding.

        Parameters
        ----------
        mask_q, mask_k : (batch, seqlen_q), (batch, seqlen_k)
            bool arrays of any framework, True for a real token. Padding comes after the real tokens.
            `mask_k` None: that of q serves k too.

        Returns
        -------
        SeqLayout
            With `seqlen_q` and `seqlen_k`, int64, (batch,): how many tokens of each row are real. Those
            of a mask on a GPU are computed there, on the stream that the mask belongs on. It is not
            read back, so there padding must come last without being checked.

        Raises
        ------
        TypeError
            For a mask that is not bool.
        ValueError
            For a mask on the host with padding before a real token, naming the row, and for masks
            of another number of axes.

        Examples
        --------
        >>> import numpy as np
        >>> mask = np.array([[True, True, True], [True, False, False]])
        >>> SeqLayout.from_padding_mask(mask)
        SeqLayout(seqlen_q=[3, 1], seqlen_k=[3, 1])
        """
        lengths_q = integers.lengths_from_mask("mask_q", mask_q)
        lengths_k = lengths_q
        if mask_k is not None:
            lengths_k = integers.lengths_from_mask("mask_k", mask_k)
            _check_same_batch("mask", lengths_k.size, lengths_q.size)
        return cls(seqlen_q=lengths_q, seqlen_k=lengths_k)

    def __repr__(self) -> str:
        given = []
        for name in (*_ARRAYS, "max_seqlen_q", "max_seqlen_k"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                few = value.size <= 8
                value = value.tolist() if few else f"<{value.size} {value.dtype} on the host>"
            elif value is not None and not isinstance(value, int):
                where = "traced" if is_traced(value) else "on a GPU"
                value = f"<{value.size} {value.dtype} {where}>"
            if value is not None:
                given.append(f"{name}={value}")
        return f"SeqLayout({', '.join(given)})"


def _read_sides(
    arrays: dict[str, Any], max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[Given, Given]:
    """Of q and of k; one object, where nothing is said of k alone."""
    get = arrays.get
    start = get("seqstart_q")
    of_q = of_k = read_side("q", start, get("cu_seqlen_q"), get("seqlen_q"), max_seqlen_q)
    if start is None or len(arrays) > 1 or max_seqlen_k != max_seqlen_q:
        lengths = get("cu_seqlen_k"), get("seqlen_k")
        of_k = read_side("k", get("seqstart_k"), *lengths, max_seqlen_k, of_q)
    return of_q, of_k


def _check_same_batch(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{name}_k: got {got} sequences, expected {expected}, as in {name}_q")


def bind(seqs: SeqLayout | None, *, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    """The sequences of a call on arrays of these rows; `batch` is None in group mode.

    Never synchronises. The result is remembered: the same layout and shapes give the same object.

    Raises TypeError for something that is not a SeqLayout, ValueError for one that does not fit.
    """
    if seqs is None:
        if batch is None:
            raise not_packed("None")
        return _dense(batch, rows_q, rows_k)
    if not isinstance(seqs, SeqLayout):
        raise TypeError(
            f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None{layout_advice(seqs)}"
        )
    bindings, key = seqs._bindings, (batch, rows_q, rows_k)
    lengths = bindings.get(key)
    if lengths is None:
        lengths = _bind(seqs, batch, rows_q, rows_k)
        if bindings:
            make_room(bindings, _MAX_BINDINGS)
        bindings[key] = lengths
    return lengths


def _bind(seqs: SeqLayout, batch: int | None, rows_q: int, rows_k: int) -> Lengths:
    count = batch
    if batch is None:
        if not seqs.group:
            raise not_packed("a SeqLayout without seqstart_q")
        count = seqs.batch
    elif seqs.group:
        raise packed_for_batch()
    else:
        check_batch(seqs, batch)
    assert count is not None
    of_q, of_k = seqs._sides
    q = side_of(of_q, count, rows_q)
    if rows_q != rows_k and (of_k.inherited or (of_k is of_q and seqs.group)):
        raise ValueError(
            f"seqstart_k: got None, by default seqstart_q, but q has {rows_q} rows and k has {rows_k}; "
            "pass seqstart_k, where the sequences of k start"
        )
    same = of_k is of_q or (seqs._joined and rows_q == rows_k)
    k = q if same else side_of(of_k, count, rows_k)
    return Lengths(count, seqs.group, q, k, of_q.on_host and of_k.on_host)


@functools.lru_cache(maxsize=256)
def _dense(batch: int, rows_q: int, rows_k: int) -> Lengths:
    return _bind(SeqLayout(), batch, rows_q, rows_k)


def refuse_traced(seqs: Any) -> None:
    """TypeError for integers of a JAX function under transformation, in a layout of a call that has to be launched now.

    seqs: a layout, also one of pages; anything else passes.
    """
    for name in _ARRAYS:
        if is_traced(getattr(seqs, name, None)):
            raise TypeError(
                f"{name}: got a JAX tracer, which holds no values; accepted are arrays and lists of int: traced lengths are "
                "for rawattn.jax.attention, inside jit, grad, vmap and scan"
            )


def check_batch(seqs: SeqLayout, batch: int) -> None:
    """ValueError for lengths of another number of sequences than q has."""
    if seqs.batch is not None and batch != seqs.batch:
        raise ValueError(
            f"seqs: got lengths of {seqs.batch} sequences, expected {batch}, the batch of q"
        )


def packed_for_batch() -> ValueError:
    """Of starts where q has a batch axis."""
    return ValueError(
        "seqs: got seqstart_q, which is for a packed q (total_q, nheads_q, D), but q has four "
        "axes (batch, seqlen_q, nheads_q, D); expected lengths alone: seqlen_* or cu_seqlen_*"
    )


def not_packed(got: str) -> ValueError:
    """Of a packed q without starts."""
    return ValueError(
        f"seqs: got {got}, but q of three axes (total_q, nheads_q, D) is a packed batch; expected "
        "SeqLayout(seqstart_q=...), where cumulative lengths serve if there are no gaps; or give q "
        "four axes (batch, seqlen_q, nheads_q, D)"
    )
