"""The CPU gathers the pages that some row sees through the window and the sinks, and no others. Slots of new rows."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import numpy as np
import pytest

from rawattn._call import page_ids, pages
from rawattn._call.layout import HostLengths

SIZE = 4
LENS_Q = np.array([0, 1, 3, 2, 1, 9])
LENS_K = np.array([9, 17, 6, 0, 1, 5])
WINDOWS = [*itertools.product((None, 0, 3, 9), (None, 0, 5))]


def _lengths(len_q: np.ndarray, len_k: np.ndarray) -> HostLengths:
    zeros = len_q * 0
    return HostLengths(zeros, len_q, zeros, len_k, zeros, zeros)


def seen(n: int, window: tuple[int | None, int | None], sink: int, top_left: bool) -> set[int]:
    """The pages of sequence n that some row sees, by the rule of visible keys."""
    rows, keys = (np.arange(x[n]) for x in (LENS_Q, LENS_K))
    diagonal = rows[:, None] + (0 if top_left else LENS_K[n] - LENS_Q[n])
    left, right = (10**6 if x is None else x for x in window)
    visible = (keys <= diagonal + right) & ((keys >= diagonal - left) | (keys < sink))
    return {int(key) // SIZE for _, key in np.argwhere(visible)}


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pages_that_are_gathered(window: tuple[int | None, int | None], top_left: bool) -> None:
    table = np.arange(30).reshape(6, 5)
    pool = np.arange(1, 121, dtype=np.float32).reshape(30, SIZE, 1, 1)
    lengths = _lengths(LENS_Q, LENS_K)
    form = pages.PageForm(SIZE, 30, 5, False, "int64")
    ends = np.cumsum(LENS_K)
    for sink in (0, 1, 6):
        found = page_ids.visible_pages(lengths, SIZE, window, sink, top_left)
        for scale in (None, np.float32(2)):
            gathered = page_ids.gather(pool, table, lengths, form, found, scale)[:, 0, 0]
            for n, keys in enumerate(np.split(gathered, ends[:-1])):
                here = np.isin(np.arange(len(keys)) // SIZE, [*seen(n, window, sink, top_left)])
                whole = (scale or 1) * pool[table[n]].reshape(-1)[: len(keys)]
                np.testing.assert_array_equal(keys[here], whole[here])
                assert not keys[~here].any()


def test_slots_of_new_rows() -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        len_k = rng.integers(0, 10, 3)
        len_q = np.minimum(rng.integers(0, 6, 3), len_k)
        table = rng.integers(0, 12, (3, 3))
        lengths = _lengths(len_q, len_k)
        slots = [
            (table[n, position // SIZE], position % SIZE)
            for n in range(3)
            for position in range(len_k[n] - len_q[n], len_k[n])
        ]
        shared = len(set(slots)) < len(slots)
        refused += shared
        with pytest.raises(ValueError, match=r"^block_table") if shared else nullcontext():
            page_ids.check_slots(table, lengths, pages.PageForm(SIZE, 12, 3, False, "int64"))
    assert refused > 30
