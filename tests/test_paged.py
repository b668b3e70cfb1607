"""`paged_attention` on the CPU and the reference: pages of any size and order, what no page may say, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, paged_attention, reference
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem
from rawattn._kernels import registry
from rawattn._kernels.operands import Operands
from rawattn._kernels.target import Target
from tests.paged import BFLOAT16, Paged, paged, verify

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def verify_both(call: Paged, **options: Any) -> None:
    """The CPU backend within tolerance, and `reference.paged_attention` to the last bits of `reference.attention`."""
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
    call = paged((70, 9, 0, 129), 16, rows=(20, 9, 4, 1), group=True, pair=pair)
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


OPTIONS = {
    "bias": {"bias": normal(3, 4, 9, 160, dtype=BFLOAT16)},
    "bias-of-keys": {"bias": normal(1, 160)},
    "mask": {"mask": normal(3, 1, 9, 150) > -0.5},
    "alibi": {"alibi_slopes": np.abs(normal(3, 4)), "causal": True},
    "softcap": {"softcap": 1.5, "scale": 1.0},
    "sinks": {"sink_logits": normal(4)},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "score_mod": {"score_mod": rawattn.ScoreMod("where(kv_idx % 3 == 1, -inf, score - batch)")},
}


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
    """Their entries are junk, also under `validate`; those of sink tokens and of the window are not."""
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
    """Integers as lists, of a pool whose pages are tokens."""
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
    """Calls take other pools and other page ids; lengths of the host are those of planning time."""
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
    """Though it would be, where the starts of q are those of k too."""
    call = paged((4,), 4, group=True, rows=(17,), dtype=F32)
    starts = call.seqs.seqstart_q
    seqs = rawattn.SeqLayout(seqstart_q=starts, seqlen_q=call.seqs.seqlen_q, max_seqlen_k=4)
    out, lse = paged_attention(*call.inputs, seqlen_k=[4], seqs=seqs, return_lse=True)
    verify(call, out, lse)
    rows = np.zeros((starts[-1], 2, 8), F32)
    with pytest.raises(ValueError, match=r"^max_seqlen_k: got 4, expected at least .*by default"):
        rawattn.attention(rows, rows, rows, seqs=seqs)


def good() -> dict[str, Any]:
    """Two sequences of 40 and 20 keys in pages of 16, by name."""
    pool = normal(8, 16, 2, 8)
    return {
        "q": normal(2, 3, 4, 8),
        "k_pages": pool,
        "v_pages": pool.copy(),
        "block_table": np.array([[0, 1, 2, -1], [3, 4, -1, -1]]),
        "seqlen_k": np.array([40, 20]),
    }


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
    paged_attention(**good(), backend="cpu")
    with pytest.raises(error) as caught:
        paged_attention(**{**good(), **change}, backend="cpu")
    assert says in str(caught.value)
    if ": " in says and "." not in says:
        assert str(caught.value).startswith(says.partition(":")[0])


@pytest.mark.parametrize("pair", [False, True])
def test_ids_are_refused_where_a_row_reads_their_page(pair: bool) -> None:
    """Key by key."""
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
        pool = np.zeros((8, size, 1, 1), F32)
        expected = False
        for b, n in enumerate(keys):
            page = np.arange(n) // size
            # Pages are read whole, from the first row's first key on.
            last = np.minimum((page + 1) * size, n) - 1
            read = (last >= n - rows - left) | (page * size < sink)
            expected |= bool(rows and ((ids[b][page] < 0) | (ids[b][page] > 7))[read].any())
        given = {"seqlen_k": keys, "causal": True, "window": (left, 0), "sink": sink}
        q = np.zeros((3, rows, 1, 1), F32)
        if expected:
            refused += 1
            with pytest.raises(ValueError, match=r"^block_table: got page id"):
                paged_attention(q, pool, pool, table, **given, backend="cpu")
        else:
            paged_attention(q, pool, pool, table, **given, backend="cpu")
    assert 50 < refused < 250


def test_rows_of_a_table_in_a_list() -> None:
    """Arrays among them; and no row at all."""
    call = good()
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
    call = good()
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
    """Elsewhere such keys are gathered, by their indices in an array of all keys."""
    call = paged((150, 160), 16, rows=9)
    mask = rawattn.topk_mask(normal(2, 1, 1, 160), 32)
    out, lse = paged_attention(
        *call.inputs, **call.lengths, mask=mask, return_lse=True, backend="cpu"
    )
    verify(call, out, lse, mask=mask)


def family_of(
    batch: int, rows: int, keys: int, page_size: int, num_pages: int = 4096, **changed: Any
) -> str:
    """Of a call on an H200."""
    pages = PageForm(page_size, num_pages, -(-keys // page_size), False, "int32")
    fields: dict[str, Any] = {
        **{"dtype": "bfloat16", "batch": batch, "nheads_q": 32, "nheads_kv": 8, "headdim": 128},
        **{"headdim_v": 128, "group": False, "rows_q": rows, "rows_k": keys, "max_seqlen_q": rows},
        **{"max_seqlen_k": keys, "ragged": True, "window_left": None, "window_right": 0, "sink": 0},
        **{"top_left": False, "scale": 1.0, "pages": pages, **changed},
    }
    problem = Problem(**fields)
    row = 32 * 128 * 2
    strides = {"q": (rows * row, row, 256, 2), "k_pages": (page_size * row // 4, row // 4, 256, 2)}
    operands = Operands({**strides, "v_pages": strides["k_pages"], "out": strides["q"]})
    target = Target("sm_90a", 232448, multiprocessors=132)
    return registry.choose("paged_attention", problem, target, operands).name


def test_which_kernels_read_pages() -> None:
    assert family_of(64, 1, 8192, 16) == "decode"
    assert family_of(8, 512, 8192, 16) == "sm90"
    assert family_of(8, 512, 8192, 1000) == "sm90"
    assert family_of(8, 512, 8192, 16, dtype="float32") == "portable"
    # A box would end within a page: rows are copied.
    assert family_of(8, 512, 8192, 12) == "sm90"
    assert family_of(8, 512, 8192, 1) == "sm90"
    # They begin at numbers of 32 bits, of 16 bytes.
    assert family_of(8, 512, 8192, 1, num_pages=2**25) == "sm90"
    assert family_of(8, 512, 8192, 1, num_pages=2**26) == "portable"
    assert family_of(8, 512, 8192, 16, num_pages=2**26) == "sm90"
    # Tiles that leave most of the GPU idle: of many keys they are shared out.
    assert family_of(1, 256, 32768, 16) == "sm90"
    assert family_of(1, 64, 32768, 16) == "sm90"
    assert family_of(1, 64, 1000, 16) == "sm90"
    assert family_of(8, 512, 8192, 16, num_splits=2) == "portable"
