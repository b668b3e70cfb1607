"""The ids in a page table: which of them a call reads, the rows of their pages, and checks of the ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rawattn._call.layout import HostLengths
from rawattn._call.pages import PageForm


def ids_of(
    table: NDArray[Any], lengths: HostLengths, form: PageForm, sequence: int
) -> NDArray[Any]:
    """The ids of the pages that hold a sequence's keys, clamped to existing pages. table: on the host."""
    if form.has_indptr:
        first = int(lengths.start_k[sequence]) // form.page_size
        ids = table[first:]
    else:
        ids = table[sequence]
    used = -(-int(lengths.len_k[sequence]) // form.page_size)
    clipped: NDArray[Any] = np.clip(ids[:used], 0, form.num_pages - 1)
    return clipped


class VisiblePages(NamedTuple):
    """The pages of each sequence that any of its rows may see: pages [0, sinks) and [first, last), each (batch,)."""

    sinks: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def visible_pages(
    lengths: HostLengths,
    page_size: int,
    window: tuple[int | None, int | None],
    sink: int,
    top_left: bool,
) -> VisiblePages:
    """The pages that rows may see by window, sink tokens and lengths. Masks are not considered."""
    left, right = window
    offset = np.zeros_like(lengths.len_k) if top_left else lengths.len_k - lengths.len_q
    last = _pages_read(lengths, page_size)
    if right is not None:
        last = np.clip((lengths.len_q - 1 + offset + right) // page_size + 1, 0, last)
    if left is None:
        return VisiblePages(np.zeros_like(last), np.zeros_like(last), last)
    sinks = np.minimum(-(-sink // page_size), last)
    return VisiblePages(sinks, np.clip((offset - left) // page_size, sinks, last), last)


def _pages_read(lengths: HostLengths, page_size: int) -> NDArray[np.int64]:
    """The number of pages of each sequence's keys; 0 if the sequence has no query row."""
    return np.where(lengths.len_q > 0, -(-lengths.len_k // page_size), 0)


def gather(
    pages: NDArray[Any],
    table: NDArray[Any],
    lengths: HostLengths,
    form: PageForm,
    visible: VisiblePages | None = None,
    scale: Any = None,
) -> NDArray[Any]:
    """The keys, or the values, of all sequences, one sequence behind the other: (total, nheads_kv, D).

    visible: the pages that are read, None for all; keys of other pages become 0.
    scale: for pages of 8 bits, which become float32 and are multiplied by it; else None.
    """
    size, used = form.page_size, -(-lengths.len_k // form.page_size)
    sinks, first, last = visible or (0 * used, 0 * used, used)
    total = int(lengths.len_k.sum())
    dtype = pages.dtype if scale is None else np.float32
    # Pages of zeroed memory that are never touched cost nothing.
    gathered = np.zeros((total, *pages.shape[2:]), dtype)
    start = 0
    for sequence, length in enumerate(lengths.len_k.tolist()):
        ids = ids_of(table, lengths, form, sequence)
        for begin, end in ((0, sinks[sequence]), (first[sequence], last[sequence])):
            keys = slice(begin * size, min(end * size, length))
            found = pages[ids[begin:end]].reshape(-1, *pages.shape[2:])[: keys.stop - keys.start]
            if scale is not None:
                found = found.astype(np.float32) * scale
            gathered[start : start + length][keys] = found
        start += length
    return gathered


def check_ids(
    table: NDArray[Any],
    lengths: HostLengths,
    form: PageForm,
    window: tuple[int | None, int | None],
    sink: int,
    top_left: bool,
) -> None:
    """ValueError for an id that a call reads and that is out of range."""
    counts = _pages_read(lengths, form.page_size)
    # In most calls all ids are in range. Only if one is not, the code below finds out whether a row may see that page.
    # As an unsigned integer a negative id is large.
    ids = table.view(f"u{table.dtype.itemsize}")
    if form.has_indptr:
        entries = np.flatnonzero(ids >= form.num_pages)
        starts = lengths.start_k // form.page_size
        sequences = np.searchsorted(starts, entries, side="right") - 1
        entries, sequences = entries[sequences >= 0], sequences[sequences >= 0]
        numbers = entries - starts[sequences]
    else:
        most = int(counts.max(initial=0))
        entries = np.flatnonzero(ids[:, :most] >= form.num_pages)
        sequences, numbers = np.divmod(entries, max(most, 1))
    if not entries.size:
        return
    found = visible_pages(lengths, form.page_size, window, sink, top_left)
    sinks, first, last = (x[sequences] for x in found)
    read = (numbers < sinks) | ((numbers >= first) & (numbers < last))
    wrong = np.flatnonzero(read)
    if wrong.size:
        sequence, page = int(sequences[wrong[0]]), int(numbers[wrong[0]])
        got = (
            table[lengths.start_k[sequence] // form.page_size :]
            if form.has_indptr
            else table[sequence]
        )
        raise ValueError(
            f"block_table: got page id {got[page]} for page {page} of sequence {sequence}, which has "
            f"{lengths.len_k[sequence]} keys in pages of {form.page_size}; expected 0 to {form.num_pages - 1}, the pages of "
            "k_pages"
        )


def check_slots(table: NDArray[Any], lengths: HostLengths, form: PageForm) -> None:
    """ValueError for two new rows in one slot. New rows are the last keys of their sequences. The ids have been checked."""
    size = form.page_size
    first = np.maximum(lengths.len_k - lengths.len_q, 0)
    before = first // size
    counts = np.maximum(_pages_read(lengths, size) - before, 0)
    sequence = np.repeat(np.arange(counts.size), counts)
    page = before[sequence]
    if counts.max(initial=0) > 1:  # the new rows of a sequence are in several pages
        page += np.arange(sequence.size) - (np.cumsum(counts) - counts)[sequence]
    if form.has_indptr:
        ids = table[lengths.start_k[sequence] // size + page]
    else:
        ids = table[sequence, page]
    if len(set(ids.tolist())) == ids.size:  # no page twice, as in most calls
        return
    # For each page with new rows, the slots [begin, end) of these, counted over all pages of the array.
    past = (ids.astype(np.int64) - page) * size
    begin = np.maximum(first[sequence], page * size) + past
    end = np.minimum(lengths.len_k[sequence], (page + 1) * size) + past
    order = np.argsort(begin, kind="stable")
    shared = np.flatnonzero(end[order[:-1]] > begin[order[1:]])
    if shared.size:
        one, other = order[shared[0]], order[shared[0] + 1]
        raise ValueError(
            f"block_table: got page {ids[other]} for new rows of sequences {sequence[one]} and {sequence[other]}, which would "
            f"both be its row {begin[other] % size}; expected a slot of its own for each new row"
        )
