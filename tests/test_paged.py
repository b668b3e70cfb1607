"""`paged_attention` on the CPU and in the reference: pages of any size and order, and entries that are never read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, paged_attention, reference
from tests.paged import BFLOAT16, OPTIONS, Paged, normal, paged, two_sequences, verify

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def verify_both(call: Paged, **options: Any) -> None:
    """Checks the CPU backend within tolerance, and that `reference.paged_attention` equals `reference.attention` exactly."""
    out, lse = paged_attention(
        *call.inputs, **call.lengths, **options, return_lse=True, backend="cpu"
    )
    assert out.dtype == call.q.dtype
    verify(call, out, lse, **options)
    exact, exact_lse = reference.paged_attention(
        *call.inputs, **call.lengths, **options, return_lse=True
    )
    inputs, layout = call.without_pages()
    wanted, wanted_lse = reference.attention(*inputs, **layout, **options, return_lse=True)
    np.testing.assert_array_equal(exact.reshape(wanted.shape), wanted)
    rows = call.rows.reshape(-1)
    np.testing.assert_array_equal(by_row(exact_lse)[rows], wanted_lse.T[rows])


def by_row(lse: np.ndarray) -> np.ndarray:
    return lse.swapaxes(-1, -2).reshape(-1, lse.shape[-2])


LENS = (70, 3, 0, 129)


@pytest.mark.parametrize("page_size", [1, 3, 16, 128, 1000])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_pages(page_size: int, pair: bool, heads_first: bool) -> None:
    integers = np.int64 if pair == heads_first else np.int32
    call = paged(LENS, page_size, pair=pair, heads_first=heads_first, integers=integers, rows=3)
    verify_both(call, causal=True)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("heads", [(5, 1), (12, 2), (7, 1), (3, 3)])
def test_rows_and_groups_of_heads(rows: int, heads: tuple[int, int]) -> None:
    verify_both(paged(LENS, 16, rows=rows, heads=heads, dtype=F16), causal=True)


@pytest.mark.parametrize("dtype", [F16, BFLOAT16, F32])
@pytest.mark.parametrize("dims", [(64, 64), (7, 33)])
def test_dtypes_and_head_dims(dtype: Any, dims: tuple[int, int]) -> None:
    verify_both(paged(LENS, 16, rows=2, dtype=dtype, dims=dims), window=(30, 4), sink=5)


@pytest.mark.parametrize("pair", [False, True])
def test_group_mode(pair: bool) -> None:
    """Chunks of prompts, with gaps between them."""
    call = paged((70, 9, 0, 129), 16, rows=(20, 9, 4, 1), packed=True, pair=pair)
    verify_both(call, causal=True)
    verify_both(call, causal=True, window=(17, 0), sink=2)


def test_padded_batch() -> None:
    call = paged((70, 9, 5, 129), 16, rows=(5, 0, 2, 1), room_q=6)
    verify_both(call, causal=True)
    own = np.full((4, 6, 4, 16), 7, BFLOAT16)
    assert paged_attention(*call.inputs, **call.lengths, out=own, backend="cpu") is own
    assert np.all(own[~call.rows] == 7)
    exact = reference.paged_attention(*call.inputs, **call.lengths)
    np.testing.assert_allclose(own[call.rows].astype(F32), exact[call.rows], atol=0.02)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"window": (12, 0)}, {"window": (40, 3), "sink": 8}, {"window": (0, 0), "sink": 128}],
    ids=str,
)  # fmt: skip
def test_masks(align: str, mask: dict[str, Any]) -> None:
    verify_both(paged((150, 33, 5), 16, rows=9), align=align, **mask)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_scores(name: str) -> None:
    verify_both(paged((150, 33, 0), 16, rows=9), **OPTIONS[name])


def test_sequences_share_pages() -> None:
    call = paged((70, 90, 49), 16, shared=3, rows=2)
    table = call.block_table
    assert np.array_equal(table[0, :3], table[1, :3])
    assert np.array_equal(table[0, :3], table[2, :3])
    verify_both(call, causal=True)


@pytest.mark.parametrize("junk", [-1, 10**9, -(2**31)])
def test_entries_past_the_last_page_hold_anything(junk: int) -> None:
    verify_both(paged(LENS, 16, junk=junk), causal=True)
    verify_both(paged(LENS, 16, junk=junk, pair=True))


def test_pages_behind_the_window_are_the_sequences_no_more() -> None:
    """Pages behind the window may be freed: their entries may be junk, also under `validate`. Entries of sinks and of the
    window may not."""
    call = paged((150, 75), 16, rows=2)
    table = call.block_table.copy()
    freed = table[0, 1:7].copy(), table[1, 1:2].copy()
    table[0, 1:7] = -1  # the window of the first row begins at key 148 - 30
    table[1, 1:2] = 1 << 30
    k_pages, v_pages = call.k_pages.copy(), call.v_pages.copy()
    for ids in freed:
        k_pages[ids], v_pages[ids] = np.nan, np.nan
    options: dict[str, Any] = {"window": (30, 0), "sink": 3}
    out, lse = paged_attention(
        call.q, k_pages, v_pages, table, **call.lengths, **options, return_lse=True, validate=True, backend="cpu"
    )  # fmt: skip
    verify(call, out, lse, **options)
    exact = reference.paged_attention(call.q, k_pages, v_pages, table, **call.lengths, **options)
    assert np.isfinite(exact).all()
    table[0, 7] = -1
    with pytest.raises(ValueError, match=r"^block_table: got page id -1 for page 7 of sequence 0"):
        paged_attention(call.q, k_pages, v_pages, table, **call.lengths, **options, backend="cpu")


def test_one_list_of_everything() -> None:
    """All integers may be lists, with a pool of pages of one token."""
    pool = normal(9, 1, 1, 8)
    q = normal(2, 1, 3, 8)
    table = [[4, 2, 8], [1, 0, 0]]
    out = paged_attention(q, pool, pool, table, seqlen_k=[3, 1], backend="cpu")
    keys = pool[:, 0][np.array(table)]
    exact = reference.attention(q, keys, keys, seqs=SeqLayout(seqlen_k=[3, 1]))
    np.testing.assert_allclose(out, exact, atol=1e-6)


@pytest.mark.parametrize("name", ["empty-batch", "no-rows", "no-keys", "no-pages"])
def test_axes_of_length_0(name: str) -> None:
    q, pool = normal(2, 3, 2, 8), normal(4, 16, 1, 8)
    table = np.full((2, 2), -1)
    if name == "empty-batch":
        q, table = q[:0], table[:0]
    elif name == "no-rows":
        q = q[:, :0]
    elif name == "no-pages":
        pool = pool[:0]
    for tables in (table, table[:, :0]):
        lengths = [0] * len(q)
        given = (q, pool, pool, tables)
        out, lse = paged_attention(*given, seqlen_k=lengths, return_lse=True, backend="cpu")
        assert out.shape == q.shape
        assert not out.any()
        assert np.all(lse == -np.inf)
        assert reference.paged_attention(*given, seqlen_k=lengths).shape == q.shape


def test_results_go_where_the_caller_wants_them() -> None:
    call = paged(LENS, 16, rows=3)
    whole = np.full((4, 4, 3, 16), 7, BFLOAT16)
    own = whole.swapaxes(1, 2)
    assert paged_attention(*call.inputs, **call.lengths, out=own, backend="cpu") is own
    wanted = paged_attention(*call.inputs, **call.lengths, backend="cpu")
    np.testing.assert_array_equal(own, wanted)
    square = paged(LENS, 16, rows=3, dims=(16, 16))
    taken = square.k_pages.reshape(-1)[: 4 * 3 * 4 * 16].reshape(4, 3, 4, 16)
    with pytest.raises(ValueError, match=r"^out: shares memory with k_pages"):
        paged_attention(*square.inputs, **square.lengths, out=taken, backend="cpu")


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    call = paged(LENS, 16, rows=2, dtype=F32)
    inputs = [torch.from_numpy(x) for x in call.inputs]
    out, lse = paged_attention(
        *inputs, seqlen_k=torch.from_numpy(call.seqlen_k), causal=True, return_lse=True
    )
    assert isinstance(out, torch.Tensor)
    verify(call, out.numpy(), lse.numpy(), causal=True)
    out = paged_attention(*inputs[:3], call.block_table, seqlen_k=call.seqlen_k, causal=True)
    assert isinstance(out, torch.Tensor)
    inputs[0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"^q: got a tensor that requires a gradient"):
        paged_attention(*inputs, seqlen_k=call.seqlen_k)


@pytest.mark.parametrize("pair", [False, True])
def test_plan(pair: bool) -> None:
    """A planned call may have other pools and other page ids. Lengths on the host stay as they were when planning."""
    call = paged(LENS, 16, rows=2, pair=pair, dtype=F32)
    made = rawattn.plan(
        paged_attention, *call.inputs, **call.lengths, causal=True, return_lse=True, backend="cpu"
    )
    verify(call, *made(), causal=True)
    other = paged(LENS, 16, rows=2, pair=pair, dtype=F32, seed=1)
    other = replace(other, q=-call.q)
    ids = other.block_table[1] if pair else other.block_table
    verify(other, *made(-call.q, other.k_pages, other.v_pages, ids), causal=True)
    verify(other, *made(*other.inputs[:3], block_table=ids), causal=True)
    with pytest.raises(ValueError, match=r"^block_table: got page id 99"):
        made(*call.inputs[:3], np.full_like(ids, 99))
    own = np.full_like(call.q[..., :16], 7)
    assert made(out=own)[0] is own
    with pytest.raises(ValueError, match=r"^block_table: got page id"):
        rawattn.plan(paged_attention, *call.inputs[:3], np.full((4, 9), 99), **call.lengths)


def test_a_maximum_of_keys_is_none_of_query_rows() -> None:
    """max_seqlen_k does not bound the rows of q here. It would if the starts of q were those of k too."""
    call = paged((4,), 4, packed=True, rows=(17,), dtype=F32)
    starts = call.seqs.seqstart_q
    seqs = rawattn.SeqLayout(seqstart_q=starts, seqlen_q=call.seqs.seqlen_q, max_seqlen_k=4)
    out, lse = paged_attention(*call.inputs, seqlen_k=[4], seqs=seqs, return_lse=True)
    verify(call, out, lse)
    rows = np.zeros((starts[-1], 2, 8), F32)
    with pytest.raises(ValueError, match=r"^max_seqlen_k: got 4, expected at least .*by default"):
        rawattn.attention(rows, rows, rows, seqs=seqs)


def test_rows_of_a_table_in_a_list() -> None:
    """A block table may be a list of rows, each an array or a list, also a list without rows."""
    call = two_sequences()
    expected = paged_attention(**call, backend="cpu")
    for rows in ([*call["block_table"]], call["block_table"].tolist()):
        out = paged_attention(**{**call, "block_table": rows}, backend="cpu")
        np.testing.assert_array_equal(out, expected)
    call |= {"q": call["q"][:0], "block_table": [], "seqlen_k": []}
    assert paged_attention(**call, backend="cpu").shape == (0, 3, 4, 8)
    assert reference.paged_attention(**call).shape == (0, 3, 4, 8)
    made = rawattn.plan(paged_attention, **call, backend="cpu")
    assert made(block_table=[]).shape == (0, 3, 4, 8)


def test_a_bias_longer_than_the_longest_sequence() -> None:
    call = two_sequences()
    bias = normal(3, 77)
    bias[:, 40:] = np.nan
    out = paged_attention(**call, bias=bias, backend="cpu")
    np.testing.assert_allclose(out, reference.paged_attention(**call, bias=bias), atol=1e-5)


def test_a_call_like_an_earlier_one_has_lengths_and_pages_of_its_own() -> None:
    first, second = paged((40, 20), 16, seed=1), paged((33, 31), 16, seed=2, spare=5)
    second = replace(second, block_table=second.block_table[:, : first.block_table.shape[1]])
    for call in (first, second, first):
        out, lse = paged_attention(*call.inputs, **call.lengths, return_lse=True, backend="cpu")
        verify(call, out, lse)


def test_a_mask_of_kept_keys() -> None:
    """A mask of kept keys works on pages, where keys are not gathered: its indices are positions among all keys."""
    call = paged((150, 160), 16, rows=9)
    mask = rawattn.topk_mask(normal(2, 1, 1, 160), 32)
    out, lse = paged_attention(
        *call.inputs, **call.lengths, mask=mask, return_lse=True, backend="cpu"
    )
    verify(call, out, lse, mask=mask)
