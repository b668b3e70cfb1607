"""`SeqLayout`: where a caller's sequences start and how long they are."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rawattn._call import integers
from rawattn._call.argument_kinds import all_by_name, checks_arguments
from rawattn._call.deferred_layout import Deferred
from rawattn._call.given import ARRAYS, GivenSide, common_batch, read_sides
from rawattn._call.hints import NoOthers, hides_unknown, refuse_unknown
from rawattn._call.layout import Lengths
from rawattn._call.layout_keys import LayoutKey, StartValues, batch_by_key, key_of, remember
from rawattn._interop import dynamo
from rawattn._interop.integers import as_array
from rawattn._interop.xla import is_traced

if TYPE_CHECKING:  # type checkers have their own copy: it is no dependency
    from typing_extensions import Never, Unpack


class _Shown:
    """An attribute of a layout: its integers as an array, where a CUDA tensor of torch is shown as a CuPy array."""

    def __set_name__(self, owner: type[SeqLayout], name: str) -> None:
        self._name = name

    def __get__(self, layout: SeqLayout | None, owner: type[SeqLayout]) -> Any:
        if layout is None:  # the class has none
            raise AttributeError(self._name)
        return as_array(layout._arrays.get(self._name))


@dataclass(frozen=True, eq=False, repr=False, init=False, kw_only=True)
class SeqLayout(Deferred):
    """Where the sequences of a batch start and how long they are.

    With `seqstart_q` the batch is packed (group mode): q is (total_q, nheads_q, D), k and v are
    (total_k, nheads_kv, ...). Without it the arrays have a batch axis (batch mode), and lengths given
    here make the batch a padded one. Every argument is one-dimensional, int32 or int64: a list, a NumPy
    array or an array of any framework, on the host or a GPU, in any mixture.

    Parameters
    ----------
    seqstart_q, seqstart_k : (batch + 1,), optional
        Physical offsets: sequence b has the rows ``seqstart_q[b]`` to before ``seqstart_q[b + 1]``. They
        do not decrease. The first need not be 0, nor the last the number of rows. `seqstart_k` defaults
        to `seqstart_q` if q and k have the same number of rows. Giving one array as both means the same,
        and is a little faster than two arrays.
    cu_seqlen_q, cu_seqlen_k : (batch + 1,), optional
        Cumulative logical lengths, not decreasing. Only their differences count: they do not say where
        sequences start.
    seqlen_q, seqlen_k : (batch,), optional
        Logical lengths. Rows of a sequence past its logical length are padding.
    max_seqlen_q, max_seqlen_k : int, optional
        Upper bounds of the logical lengths. They are checked for lengths on the host, and a promise for
        lengths on a GPU, where a tight bound avoids empty blocks. The default is the bound that follows
        from shapes and host integers; nothing is read back for it.
    position_q, position_k : (batch,), optional
        For sequences that are parts of longer ones: the positions of their first rows there, 0 to 2^30 (default
        0). If either is given, query i stands at ``position_q[b] + i`` and key j at ``position_k[b] + j``. The
        diagonal of `causal`, `window` and ALiBi, `sink`, and `q_idx` and `kv_idx` of a `ScoreMod` are then those
        of the longer sequence, and `align` does not count. Biases and masks are still indexed by the rows that a
        call has. `combine` merges the results of calls that have parts of the keys. Pages and dropout take no positions.

    See `from_lengths` for a packed batch of known lengths, `from_padding_mask` for a padded one.

    If one side has several logical lengths, `cu_seqlen_*` takes precedence over `seqlen_*`; without either
    the physical lengths count. Lengths that do not count are checked for shape and dtype only.

    Host integers are checked in full and copied: changing them later does not change the layout.
    Arrays on a GPU are held by reference and read by the kernels at every call, so lengths may grow
    in place. Only their shape and dtype are checked; bad values cannot make a kernel access memory outside
    of its arrays. The CPU backend and the reference copy them to the host at each call, and wait for that.
    JAX tracers are accepted by `rawattn.jax` only, with the rules of arrays on a GPU. A layout may also be
    made in a function under torch.compile; it is then checked when the compiled program runs.

    Attributes
    ----------
    The parameters, as read-only NumPy arrays, CuPy arrays, ints or None, and

    batch : int or None
        Number of sequences; None if no array is given.
    packed : bool
        Whether this is a packed batch.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was got and what is accepted. Whether the layout fits the arrays of a
        call (rows, batch) is checked at the call.

    Examples
    --------
    Three documents of 3, 5 and 2 tokens, packed in the first 10 rows of arrays of any length:

    >>> from rawattn import SeqLayout
    >>> packed = SeqLayout(seqstart_q=[0, 3, 8, 10])
    >>> packed
    SeqLayout(seqstart_q=[0, 3, 8, 10])
    >>> packed.batch, packed.packed
    (3, True)

    The same documents, each padded to 16 rows of a (3, 16, nheads, D) array:

    >>> padded = SeqLayout(seqlen_q=[3, 5, 2], seqlen_k=[3, 5, 2])
    >>> padded.batch, padded.packed
    (3, False)

    Gaps are legal: here rows 0 and 1 belong to no sequence, and 2 rows after each document are padding.

    >>> gaps = SeqLayout(seqstart_q=[2, 7, 14, 18], seqlen_q=[3, 5, 2], seqlen_k=[3, 5, 2])

    So lengths that are given as starts by mistake raise no error if they happen to increase. These
    would be two documents, of row 2 and of rows 3 to 4:

    >>> mistaken = SeqLayout(seqstart_q=[2, 3, 5])
    >>> mistaken.batch
    2
    >>> SeqLayout.from_lengths([2, 3, 5])
    SeqLayout(seqstart_q=[0, 2, 5, 10])

    Causal attention over keys 0 to 5 in two parts, of which the second begins at key 4:

    >>> import numpy as np
    >>> import rawattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), np.float32)
    >>> parts = [slice(0, 4), slice(4, 6)]
    >>> found = [
    ...     rawattn.attention(
    ...         q, k[:, part], v[:, part], causal=True, return_lse=True,
    ...         seqs=SeqLayout(position_k=[part.start]),
    ...     )
    ...     for part in parts
    ... ]
    >>> out, _ = rawattn.combine(*zip(*found))
    >>> bool(np.allclose(out, rawattn.attention(q, k, v, causal=True), atol=1e-6))
    True
    """

    seqstart_q: Any = _Shown()
    seqstart_k: Any = _Shown()
    seqlen_q: Any = _Shown()
    seqlen_k: Any = _Shown()
    cu_seqlen_q: Any = _Shown()
    cu_seqlen_k: Any = _Shown()
    position_q: Any = _Shown()
    position_k: Any = _Shown()
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch: int | None = field(init=False)
    packed: bool = field(init=False)
    # The given integers by name, in the form that calls read them (`integers.read_in_place`).
    _arrays: dict[str, Any] = field(init=False)
    # Whether one array was given as the starts of both sides, and nothing else. It is then as if those of k were left out.
    _same_starts: bool = field(init=False)
    # The layout's key and the values of its starts: see `layout_keys.key_of`.
    _key: LayoutKey | None = field(init=False)
    _start_values: StartValues | None = field(init=False)
    # `binding.bind` results by (batch, rows_q, rows_k).
    _bindings: dict[tuple[int | None, int, int], Lengths] = field(init=False)
    # Kept by `_verbs.fast_path`: the guarded calls on this layout, by the verb's name, the options and the number of arrays.
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
        position_q: Any = None,
        position_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        **unknown: Unpack[NoOthers],
    ) -> None:
        if misplaced:  # `checks_arguments` would make every layout a tenth slower
            raise all_by_name("SeqLayout", misplaced)
        if unknown:
            refuse_unknown(
                "SeqLayout", unknown, (*ARRAYS, "max_seqlen_q", "max_seqlen_k"), layout=True
            )
        if dynamo.is_compiling():
            self._defer(
                {
                    "seqstart_q": seqstart_q,
                    "seqstart_k": seqstart_k,
                    "seqlen_q": seqlen_q,
                    "seqlen_k": seqlen_k,
                    "cu_seqlen_q": cu_seqlen_q,
                    "cu_seqlen_k": cu_seqlen_k,
                    "position_q": position_q,
                    "position_k": position_k,
                    "max_seqlen_q": max_seqlen_q,
                    "max_seqlen_k": max_seqlen_k,
                }
            )
            return
        # Not a loop over the names: that takes as long as reading one array.
        arrays: dict[str, Any] = {}
        same_starts = seqstart_k is seqstart_q and seqstart_q is not None
        read = integers.read_in_place
        if seqstart_q is not None:
            arrays["seqstart_q"] = seqstart_q = read("seqstart_q", seqstart_q)
        if same_starts:
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
        if position_q is not None:
            arrays["position_q"] = read("position_q", position_q)
        if position_k is not None:
            arrays["position_k"] = read("position_k", position_k)
        if max_seqlen_q is not None:
            max_seqlen_q = integers.maximum("max_seqlen_q", max_seqlen_q)
        if max_seqlen_k is not None:
            max_seqlen_k = integers.maximum("max_seqlen_k", max_seqlen_k)
        if seqstart_k is not None and seqstart_q is None:
            raise ValueError(
                "seqstart_k: got it without seqstart_q, expected both for a packed batch (group "
                "mode); in a padded batch give lengths alone: seqlen_k or cu_seqlen_k"
            )
        # Setting attributes of a frozen class takes ten times as long as writing to its dictionary.
        fields = self.__dict__
        fields["max_seqlen_q"] = max_seqlen_q
        fields["max_seqlen_k"] = max_seqlen_k
        fields["packed"] = seqstart_q is not None
        fields["_arrays"] = arrays
        fields["_bindings"] = {}
        fields["_calls"] = {}
        fields["_same_starts"] = same_starts = (
            same_starts and len(arrays) == 2 and max_seqlen_q == max_seqlen_k
        )
        key, start_values = key_of(arrays, max_seqlen_q, max_seqlen_k, same_starts)
        fields["_key"], fields["_start_values"] = key, start_values
        # All layouts with one key have the same number of sequences and pass the same checks: neither depends on values.
        batch = None if key is None else batch_by_key.get(key)
        if batch is None:
            batch = common_batch(arrays)
            fields["_sides"] = read_sides(arrays, max_seqlen_q, max_seqlen_k)
            if key is not None:
                remember(key, batch)
        fields["batch"] = batch

    @functools.cached_property
    def _sides(self) -> tuple[GivenSide, GivenSide]:
        """Both sides, q and k. The constructor sets them, except if it knew the layout's key."""
        return read_sides(self._arrays, self.max_seqlen_q, self.max_seqlen_k)

    @property
    def _q(self) -> GivenSide:
        return self._sides[0]

    @property
    def _k(self) -> GivenSide:
        return self._sides[1]

    def _with_separate_starts(self) -> SeqLayout:
        """A copy in which the starts of k count as an array of their own, which a plan's call may replace; only on a GPU."""
        if not self._same_starts or self._start_values is not None:
            return self
        found = copy.copy(self)
        vars(found)["_same_starts"] = False
        found._refresh_key()
        return found

    def _refresh_key(self) -> None:
        """Computes the key again, after arrays or `_same_starts` have changed."""
        both = key_of(self._arrays, self.max_seqlen_q, self.max_seqlen_k, self._same_starts)
        self.__dict__["_key"], self.__dict__["_start_values"] = both

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle, without what calls have kept: the copy's arrays have other addresses."""
        arrays = self._arrays  # the first access, which completes a layout made under torch.compile
        state = {**self.__dict__, "_arrays": arrays, "_bindings": {}, "_calls": {}}
        for name in ("_sides", "_deferred_arguments"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The key is computed again, since the arrays may be on another GPU."""
        self.__dict__.update(state)
        self._refresh_key()

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
            The number of rows of each sequence, int32 or int64, of any framework or a list. `lengths_k` None
            means that k has the sequences of q.
        max_seqlen_q, max_seqlen_k : int, optional
            As in `SeqLayout`: worth giving for lengths on a GPU.

        Returns
        -------
        SeqLayout
            With `seqstart_q`, and `seqstart_k` if `lengths_k` is given, int64, (batch + 1,). If lengths are
            on a GPU, the starts are computed there at once, on the current stream of the lengths' framework;
            the host does not wait. Later changes of the lengths do not change the starts.

        Raises
        ------
        TypeError, ValueError
            For lengths that are not integers, negative lengths on the host, and batches that differ.

        Examples
        --------
        >>> from rawattn import SeqLayout
        >>> SeqLayout.from_lengths([3, 5, 2])
        SeqLayout(seqstart_q=[0, 3, 8, 10])
        >>> SeqLayout.from_lengths([1, 1], lengths_k=[7, 4])  # one new token each, after 6 and 3
        SeqLayout(seqstart_q=[0, 1, 2], seqstart_k=[0, 7, 11])
        """
        starts_q = integers.starts_from_lengths("lengths_q", lengths_q)
        starts_k = None
        if lengths_k is not None:
            starts_k = integers.starts_from_lengths("lengths_k", lengths_k)
            _check_same_batch("lengths", len(starts_k) - 1, len(starts_q) - 1)
        return cls(
            seqstart_q=starts_q,
            seqstart_k=starts_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )

    @classmethod
    @checks_arguments("SeqLayout.from_padding_mask")
    def from_padding_mask(cls, mask_q: Any, mask_k: Any = None) -> SeqLayout:
        """A padded batch (batch mode), from a mask of its real tokens.

        Parameters
        ----------
        mask_q, mask_k : (batch, seqlen_q), (batch, seqlen_k)
            bool arrays of any framework, True for a real token. Padding comes after the real tokens.
            `mask_k` None means that `mask_q` serves k too.

        Returns
        -------
        SeqLayout
            With `seqlen_q` and `seqlen_k`, int64, (batch,): the number of real tokens in each row. If a mask
            is on a GPU, they are computed there, on the current stream of the mask's framework. The mask is
            not read back, so padding must come last there, but this is not checked.

        Raises
        ------
        TypeError
            For a mask that is not bool.
        ValueError
            For a mask on the host with padding before a real token, naming the row, and for a mask that does
            not have two axes. In a function under torch.compile, padding before a real token is refused when
            the program runs its attention.

        Examples
        --------
        >>> import numpy as np
        >>> from rawattn import SeqLayout
        >>> mask = np.array([[True, True, True], [True, False, False]])
        >>> SeqLayout.from_padding_mask(mask)
        SeqLayout(seqlen_q=[3, 1], seqlen_k=[3, 1])
        """
        lengths_q = integers.lengths_from_mask("mask_q", mask_q)
        lengths_k = lengths_q
        if mask_k is not None:
            lengths_k = integers.lengths_from_mask("mask_k", mask_k)
            _check_same_batch("mask", len(lengths_k), len(lengths_q))
        return cls(seqlen_q=lengths_q, seqlen_k=lengths_k)

    def __repr__(self) -> str:
        given = []
        for name in (*ARRAYS, "max_seqlen_q", "max_seqlen_k"):
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


def _check_same_batch(name: str, got: int, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{name}_k: got {got} sequences, expected {expected}, as in {name}_q")
