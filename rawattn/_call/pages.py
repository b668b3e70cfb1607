"""Keys in pages: the form of a page table, and the lengths of sequences whose keys are in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn._call import integers
from rawattn._call.binding import check_batch, not_packed, packed_for_batch
from rawattn._call.given import read_side
from rawattn._call.hints import layout_advice
from rawattn._call.layout import Lengths, Side, side_of
from rawattn._call.seq_layout import SeqLayout
from rawattn._interop.integers import INTEGERS

MAX_PAGE_SIZE = 1024
AXES = {
    "k_pages": "(num_pages, page_size, nheads_kv, D)",
    "v_pages": "(num_pages, page_size, nheads_kv, Dv)",
}
_TABLE = "(batch, max_pages), or a pair (indptr (batch + 1,), page_ids (total_pages,))"
_PAIR = "a tuple is (indptr, page_ids), rows are a list"
_INDPTR = "block_table's indptr"
_SHOWN = 8  # most row lengths that a message lists

Shape = Sequence[int]
# Arguments of a SeqLayout that calls on pages refuse, and those that they use.
_OF_KEYS = ("seqstart_k", "seqlen_k", "cu_seqlen_k")
_POSITIONS = ("position_q", "position_k")
_OF_Q = ("seqstart_q", "seqlen_q", "cu_seqlen_q", "max_seqlen_q", "max_seqlen_k")


class PageForm(NamedTuple):
    """The form of a call's pages and page table, without values.

    has_indptr: whether the table is a pair (indptr, page_ids). entries: ids in a row of the table, or in all of page_ids.
    """

    page_size: int
    num_pages: int
    entries: int
    has_indptr: bool
    dtype: str  # of the page ids: "int32" or "int64"


class PagedLayout:
    """The lengths of a call whose keys are in pages: those of q in `seqs`, those of the keys in `seqlen_k`.

    indptr: (batch + 1,), where each sequence begins in a table of one axis; None for a table with a row for each sequence.
    rows: the name of the array to which the lengths of q apply, "q", or "k" for the new keys of `append_kv`.
    """

    def __init__(self, seqs: Any, seqlen_k: Any, indptr: Any = None, rows: str = "q") -> None:
        if seqs is None:
            seqs = SeqLayout()
        if not isinstance(seqs, SeqLayout):
            raise TypeError(
                f"seqs: got {type(seqs).__name__}, expected a SeqLayout or None{layout_advice(seqs)}"
            )
        for name in _OF_KEYS:
            if getattr(seqs, name) is not None:
                raise ValueError(
                    f"seqs: got {name}, expected the lengths of {rows} alone, seqlen_q or seqstart_q: keys are in pages, and "
                    "their lengths are the argument seqlen_k="
                )
        for name in _POSITIONS:
            if getattr(seqs, name) is not None:
                raise NotImplementedError(
                    f"{name}: sequences whose keys are in pages begin at position 0 in this version; got positions in seqs"
                )
        self.seqs, self.rows = seqs, rows
        self.seqlen_k = integers.read("seqlen_k", seqlen_k)
        self.indptr = None if indptr is None else integers.read(_INDPTR, indptr)
        self._k = read_side("k", None, None, self.seqlen_k, seqs.max_seqlen_k)
        self._bindings: dict[Any, Lengths] = {}

    # Plans access the arrays of a layout by the names of a `SeqLayout`.
    @property
    def seqstart_q(self) -> Any:
        return self.seqs.seqstart_q

    @property
    def seqlen_q(self) -> Any:
        return self.seqs.seqlen_q

    @property
    def cu_seqlen_q(self) -> Any:
        return self.seqs.cu_seqlen_q

    @property
    def seqstart_k(self) -> Any:
        return self.indptr

    @property
    def cu_seqlen_k(self) -> None:
        return None

    @property
    def on_host(self) -> bool:
        """Whether every integer is host data."""
        indptr = self.indptr is None or isinstance(self.indptr, np.ndarray)
        return self.seqs._q.on_host and self._k.on_host and indptr

    def on_the_host(self) -> PagedLayout:
        """The same layout with its integers copied to the host, where they are checked in full."""
        if self.on_host:
            return self
        fields = {name: _host(getattr(self.seqs, name)) for name in _OF_Q}
        return PagedLayout(SeqLayout(**fields), _host(self.seqlen_k), _host(self.indptr), self.rows)

    def bind(self, q: Shape, pages: Shape, table: Shape) -> Lengths:
        """The sequences of a call on arrays of these shapes. table: the shape of the page ids. Never synchronises.

        Raises ValueError for lengths that do not fit.
        """
        key = (*q[:-2], *pages[:2], *table)
        lengths = self._bindings.get(key)
        if lengths is None:
            lengths = self._bindings[key] = self._bind(tuple(q), pages, table)
        return lengths

    def _bind(self, shape_q: Shape, pages: Shape, table: Shape) -> Lengths:
        seqs, rows_q = self.seqs, shape_q[-3]
        if len(shape_q) == 4:
            if seqs.packed:
                raise packed_for_batch(self.rows)
            count = shape_q[0]
            check_batch(seqs, count, self.rows)
        elif not seqs.packed or seqs.batch is None:
            got = "None" if seqs.batch is None else "a SeqLayout without seqstart_q"
            raise not_packed(got, self.rows)
        else:
            count = seqs.batch
        check_lengths(self, count)
        q = side_of(seqs._q, count, rows_q, self.rows)
        num_pages, page_size = pages[:2]
        # Without any page there is no room for keys.
        k = self._side(count, pages, page_size if num_pages else 0, table[-1])
        return Lengths(count, seqs.packed, q, k, self.on_host)

    def _side(self, count: int, pages: Shape, held: int, entries: int) -> Side:
        """The side of the keys. held: keys that a page holds; entries: page ids of a sequence, or of all with an indptr."""
        page_size = pages[1]
        room = entries * held
        most: Any = room
        if self.indptr is not None:
            if self.indptr.size != count + 1:
                raise ValueError(
                    f"block_table: got an indptr of {self.indptr.size} entries, expected {count + 1}, one more than "
                    f"the batch of {self.rows}; {_PAIR}"
                )
            if isinstance(self.indptr, np.ndarray):
                try:
                    used = integers.differences(_INDPTR, self.indptr)
                except ValueError as error:  # the caller may have meant a table as a tuple of rows
                    raise ValueError(f"{error}; {_PAIR}") from None
                if self.indptr[-1] > entries:
                    raise ValueError(
                        f"block_table: got an indptr that ends at {self.indptr[-1]}, expected at most {entries}, the "
                        "number of page_ids"
                    )
                most = used.astype(np.int64) * held  # in int32 the product could wrap around
        longest = room if isinstance(most, int) else int(most.max(initial=0))
        given = self._k
        if given.longest is not None:
            what = f"what its pages of {page_size} keys in block_table hold{_heads_first(pages)}"
            integers.check_at_most("seqlen_k", given.logical(), most, what)
            longest = given.longest
        elif given.max_seqlen is not None:
            longest = min(longest, given.max_seqlen)
        if longest > integers.LONGEST:
            raise ValueError(
                f"block_table: got pages of up to {longest} keys for a sequence, expected at most {integers.LONGEST}; "
                "give seqs=SeqLayout(max_seqlen_k=...) if none has as many"
            )
        promised = given.max_seqlen is not None
        return Side(self.indptr, self.seqlen_k, False, room, longest, True, page_size, promised)


def _heads_first(pages: Shape) -> str:
    """Advice for pages that have more heads than keys, as if the two axes were swapped, else ""."""
    if len(pages) != 4 or pages[2] <= pages[1]:
        return ""
    return "; of pages (num_pages, nheads_kv, page_size, D) pass x.swapaxes(1, 2)"


def caller_name(layout: Any, name: str) -> str:
    """How the caller knows the integers that a layout has by this name."""
    of_table = name == "seqstart_k" and isinstance(layout, PagedLayout)
    return _INDPTR if of_table else name


def check_lengths(layout: PagedLayout, count: int) -> None:
    """ValueError if `seqlen_k` does not have `count` lengths."""
    got = layout.seqlen_k.size
    if got != count:
        raise ValueError(
            f"seqlen_k: got {got} length{'s' * (got != 1)}, expected {count}, the batch of {layout.rows}"
        )


def form(layout: Any, rows: Shape, k_pages: Shape, v_pages: Shape, table: Any) -> PageForm:
    """The form of a call's pages. rows, k_pages, v_pages: shapes of the arrays; table: the array of page ids.

    Raises TypeError or ValueError for pages or a table that a call does not accept.
    """
    for name, shape in (("k_pages", k_pages), ("v_pages", v_pages)):
        if len(shape) != 4:
            raise ValueError(f"{name}: got shape {shape}, expected {AXES[name]}")
    for axis, name in enumerate(("num_pages", "page_size")):
        if k_pages[axis] != v_pages[axis]:
            raise ValueError(
                f"v_pages: got {name} = {v_pages[axis]} in shape {v_pages} = {AXES['v_pages']}, expected "
                f"{k_pages[axis]}, that of k_pages"
            )
    if not 1 <= k_pages[1] <= MAX_PAGE_SIZE:
        raise ValueError(
            f"k_pages: got page_size = {k_pages[1]} in shape {k_pages} = {AXES['k_pages']}, expected 1 to "
            f"{MAX_PAGE_SIZE}; a pool that is (num_pages, nheads_kv, page_size, D) is passed as a view with these two "
            "axes swapped"
        )
    if table.dtype not in INTEGERS:
        raise TypeError(f"block_table: got dtype {table.dtype}, expected int32 or int64")
    has_indptr = layout.indptr is not None
    if len(table.shape) != (1 if has_indptr else 2):
        got = (
            f"page_ids of shape {tuple(table.shape)}"
            if has_indptr
            else f"shape {tuple(table.shape)}"
        )
        raise ValueError(f"block_table: got {got}, expected {_TABLE}")
    if not has_indptr and table.shape[0] != layout.seqlen_k.size:
        batch = rows[0] if len(rows) == 4 else layout.seqs.batch
        if batch is not None:
            check_lengths(layout, batch)
        raise ValueError(
            f"block_table: got shape {tuple(table.shape)} = (batch, max_pages), expected a row for each of the "
            f"{layout.seqlen_k.size} sequences of seqlen_k"
        )
    return PageForm(k_pages[1], k_pages[0], table.shape[-1], has_indptr, table.dtype.name)


def split(block_table: Any) -> tuple[Any, Any]:
    """A block table as (indptr, page_ids). indptr is None for a table of two axes."""
    if isinstance(block_table, list):
        if not block_table:
            return None, np.empty((0, 0), np.int64)
        _check_rows(block_table)
    if not isinstance(block_table, tuple):
        return None, block_table
    if len(block_table) != 2:
        raise ValueError(
            f"block_table: got a tuple of {len(block_table)}, expected {_TABLE}; {_PAIR}"
        )
    indptr, ids = block_table
    if indptr is None:
        raise TypeError(f"block_table: got None for its indptr, expected {_TABLE}")
    return indptr, ids


def _check_rows(table: list[Any]) -> None:
    """TypeError for a list of rows of different lengths, such as a pair in a list instead of a tuple."""
    counts = [_count(row) for row in table]
    if None in counts or len(set(counts)) == 1:
        return
    shown = [str(count) for count in counts[:_SHOWN]]
    if len(counts) > _SHOWN:
        found = ", ".join(shown) + ", ..."
    else:
        found = f"{', '.join(shown[:-1])} and {shown[-1]}"
    raise TypeError(
        f"block_table: got a list of rows of {found} page ids, expected rows of one length; fill short rows with -1, or "
        "pass a tuple (indptr, page_ids)"
    )


def _count(row: Any) -> int | None:
    """The number of entries of a list or of an array of one axis; None for anything else."""
    if isinstance(row, (list, tuple, range)):
        return len(row)
    shape: Shape = getattr(row, "shape", ())
    return int(shape[0]) if len(shape) == 1 else None


def _host(value: Any) -> Any:
    return value.get() if hasattr(value, "get") else value
