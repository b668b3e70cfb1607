"""Mistakes in calls of `paged_attention` on the CPU, and page ids that are refused where a row reads their page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout, paged_attention
from tests.paged import normal, two_sequences

TOO_LONG = "seqlen_k: got length 40 for sequence 0, expected at most 32,"
PAIR = (np.array([0, 3, 5]), np.array([0, 1, 2, 3, 4]))
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"block_table": np.array([[0, 1, 8], [3, 4, -1]])}, ValueError, "block_table: got page id 8 for page 2 of sequence 0"),
    ({"block_table": np.array([[0, 1, 2], [3, -1, -1]])}, ValueError, "block_table: got page id -1 for page 1 of sequence 1"),
    ({"block_table": (PAIR[0], PAIR[1] - 1)}, ValueError, "block_table: got page id -1 for page 0 of sequence 0"),
    ({"block_table": np.array([[0, 1], [3, 4]])}, ValueError, TOO_LONG),
    ({"block_table": (np.array([0, 2, 5]), PAIR[1])}, ValueError, TOO_LONG),
    ({"block_table": (np.array([0, 3, 6]), PAIR[1])}, ValueError, "block_table: got an indptr that ends at 6"),
    ({"block_table": (np.array([0, 3, 2]), PAIR[1])}, ValueError, "block_table's indptr: got 2 after 3"),
    ({"block_table": (np.array([0, 5]), PAIR[1])}, ValueError, "block_table: got an indptr of 2 entries, expected 3"),
    ({"block_table": (*PAIR, 3)}, ValueError, "block_table: got a tuple of 3"),
    ({"block_table": (None, PAIR[1])}, TypeError, "block_table: got None for its indptr"),
    ({"block_table": (PAIR[0], PAIR[1][None])}, ValueError, "block_table: got page_ids of shape (1, 5)"),
    ({"block_table": np.array([0, 1])}, ValueError, "block_table: got shape (2,), expected (batch, max_pages)"),
    ({"block_table": np.zeros((3, 3), int)}, ValueError, "block_table: got shape (3, 3) = (batch, max_pages)"),
    ({"block_table": np.zeros((2, 3))}, TypeError, "block_table: got float64"),
    ({"block_table": (PAIR[0] / 1, PAIR[1])}, TypeError, "lists of int; convert it, as by indptr.astype(np.int32)"),
    ({"block_table": None}, TypeError, "block_table: got NoneType"),
    ({"block_table": ((0, 1, 2), (3, 4, -1), (5, 6, 7))}, ValueError, "block_table: got a tuple of 3, expected"),
    ({"block_table": ((0, 1, 2), (3, 4, -1), (5, 6, 7))}, ValueError, "a tuple is (indptr, page_ids), rows are a list"),
    ({"block_table": ((2, 1, 0), (3, 4, -1))}, ValueError, "a tuple is (indptr, page_ids), rows are a list"),
    ({"block_table": ((0, 1, 2, 5), (3, 4, -1, 5))}, ValueError, "a tuple is (indptr, page_ids), rows are a list"),
    ({"block_table": [[0, 1, 2], [3], [4]]}, TypeError, "block_table: got a list of rows of 3, 1 and 1 page ids"),
    ({"block_table": [[0, 1, 2], [3]]}, TypeError, "block_table: got a list of rows of 3 and 1 page ids"),
    ({"block_table": [np.array([0, 3, 5]), np.arange(5)]}, TypeError, "block_table: got a list of rows of 3 and 5 page ids"),
    ({"block_table": [[0, 1, 2], [3]]}, TypeError, "fill short rows with -1, or pass a tuple (indptr, page_ids)"),
    ({"seqlen_k": [40, -1]}, ValueError, "seqlen_k: got -1 (index 1)"),
    ({"seqlen_k": [40]}, ValueError, "seqlen_k: got 1 length, expected 2, the batch of q"),
    ({"seqlen_k": 40}, TypeError, "seqlen_k: got the int 40"),
    ({"seqlen_k": 40}, TypeError, "a bound on the lengths is seqs=SeqLayout(max_seqlen_k=40)"),
    ({"seqlen_k": None}, TypeError, "seqlen_k: got NoneType"),
    ({"seqs": SeqLayout(seqlen_k=[40, 20])}, ValueError, "seqs: got seqlen_k, expected the lengths of q alone"),
    ({"seqs": SeqLayout(cu_seqlen_k=[0, 40, 60])}, ValueError, "seqs: got cu_seqlen_k"),
    ({"seqs": SeqLayout(seqstart_q=[0, 3, 6], seqstart_k=[0, 3, 6])}, ValueError, "seqs: got seqstart_k"),
    ({"seqs": SeqLayout(seqstart_q=[0, 3, 6])}, ValueError, "seqs: got seqstart_q, which is for a packed q"),
    ({"seqs": SeqLayout(seqlen_q=[1, 4])}, ValueError, "seqlen_q: got length 4 for sequence 1"),
    ({"seqs": SeqLayout(seqlen_q=[1, 1, 1])}, ValueError, "seqs: got lengths of 3 sequences, expected 2"),
    ({"seqs": [1, 2]}, TypeError, "seqs: got list, expected a SeqLayout"),
    ({"seqs": SeqLayout(max_seqlen_k=39)}, ValueError, "max_seqlen_k: got 39, expected at least 40"),
    ({"q": normal(6, 4, 8)}, ValueError, "seqs: got None, but q of three axes"),
    ({"q": normal(2, 8)}, ValueError, "q: got shape (2, 8)"),
    ({"q": normal(2, 3, 3, 8)}, ValueError, "q: got nheads_q = 3"),
    ({"q": normal(3, 3, 4, 8)}, ValueError, "seqlen_k: got 2 lengths, expected 3, the batch of q"),
    ({x: normal(8, 2, 16, 8) for x in ("k_pages", "v_pages")}, ValueError, "nheads_kv, page_size, D) pass x.swapaxes(1, 2)"),
    ({"k_pages": normal(8, 2, 8)}, ValueError, "k_pages: got shape (8, 2, 8), expected (num_pages, page_size, nheads_kv, D)"),
    ({"k_pages": normal(8, 16, 2, 9)}, ValueError, "k_pages: got D = 9"),
    ({"k_pages": normal(8, 16, 2, 8, dtype=np.float16)}, TypeError, "k_pages: got dtype float16, expected float32, that of q"),
    ({"k_pages": normal(7, 16, 2, 8)}, ValueError, "v_pages: got num_pages = 8"),
    ({"v_pages": normal(8, 15, 2, 8)}, ValueError, "v_pages: got page_size = 15"),
    ({"v_pages": normal(8, 16, 1, 8)}, ValueError, "v_pages: got nheads_kv = 1"),
    ({"v_pages": normal(8, 16, 2, 300)}, ValueError, "v_pages: got Dv = 300"),
    ({"k_pages": normal(2, 1025, 2, 8), "v_pages": normal(2, 1025, 2, 8)}, ValueError, "k_pages: got page_size = 1025"),
    ({"bias": normal(3, 39)}, ValueError, "bias: got shape (3, 39)"),
    ({"num_splits": 257}, ValueError, "num_splits: got 257"),
    ({"validate": 1}, TypeError, "validate: got 1 (int)"),
    ({"return_lse": None}, TypeError, "return_lse: got None"),
    ({"kv_lens": [1]}, TypeError, "rawattn.paged_attention"),
    ({"k_descale": 1.0}, TypeError, "k_descale: rawattn.paged_attention has no such argument; write k_scale="),
    ({"v_descale": 1.0}, TypeError, "v_descale: rawattn.paged_attention has no such argument; write v_scale="),
    ({"cu_seqlens_q": [0]}, TypeError, "write seqs=SeqLayout(seqstart_q=...), the lengths of q alone"),
    ({"max_seqlen_k": 9}, TypeError, "write seqs=SeqLayout(max_seqlen_k=...)"),
    ({"k_pages": np.zeros((8, 16, 2, 8), np.uint8)}, TypeError, "k_pages: got dtype uint8, expected float8_e4m3fn, or"),
    ({"v_pages": np.zeros((8, 16, 2, 8), np.int8)}, TypeError, "v_pages.view(ml_dtypes.float8_e4m3fn)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), BAD, ids=[says[:40] for *_, says in BAD])
def test_mistakes_are_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    paged_attention(**two_sequences(), backend="cpu")
    with pytest.raises(error) as caught:
        paged_attention(**{**two_sequences(), **change}, backend="cpu")
    assert says in str(caught.value)
    if ": " in says and "." not in says:
        assert str(caught.value).startswith(says.partition(":")[0])


@pytest.mark.parametrize("pair", [False, True])
def test_ids_are_refused_where_a_row_reads_their_page(pair: bool) -> None:
    """A page id is refused exactly where a row reads its page, as a loop over the keys finds."""
    rng = np.random.default_rng(pair)
    refused = 0
    for _ in range(300):
        rows, keys, size = rng.integers(0, 4), rng.integers(0, 13, 3), int(rng.integers(1, 5))
        left, sink = int(rng.integers(0, 6)), int(rng.integers(0, 4))
        used = -(-keys // size)
        ids = rng.integers(0, 8 + (rng.random() < 0.2), (3, 13))
        ids[rng.random(ids.shape) < 0.2] = -1
        table: Any = ids
        if pair:
            packed = [each[:n] for each, n in zip(ids, used, strict=True)]
            table = (np.append(0, used.cumsum()), np.concatenate(packed))
        pool = np.zeros((8, size, 1, 1), np.float32)
        expected = False
        for b, n in enumerate(keys):
            page = np.arange(n) // size
            # Pages are read whole, from the first key that the first row sees.
            last = np.minimum((page + 1) * size, n) - 1
            read = (last >= n - rows - left) | (page * size < sink)
            expected |= bool(rows and ((ids[b][page] < 0) | (ids[b][page] > 7))[read].any())
        given = {"seqlen_k": keys, "causal": True, "window": (left, 0), "sink": sink}
        q = np.zeros((3, rows, 1, 1), np.float32)
        if expected:
            refused += 1
            with pytest.raises(ValueError, match=r"^block_table: got page id"):
                paged_attention(q, pool, pool, table, **given, backend="cpu")
        else:
            paged_attention(q, pool, pool, table, **given, backend="cpu")
    assert 50 < refused < 250
