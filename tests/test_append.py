"""`append_kv` on the CPU: against the reference, calls that it refuses, and `paged_attention` on what it wrote."""

from __future__ import annotations

import doctest
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import rawattn
from rawattn._call import pages
from rawattn._verbs import append, paged
from tests.append import Appended, appended
from tests.paged import BFLOAT16

F32 = np.dtype(np.float32)
LENS = (9, 1, 24, 3)
ROTARY = {
    "none": {},
    "halves": {"rotary_dim": 24},
    "interleaved": {"rotary_dim": 24, "interleaved": True},
    "part": {"rotary_dim": 6},
    "part-interleaved": {"rotary_dim": 10, "interleaved": True},
}
BATCHES: dict[str, dict[str, Any]] = {
    "one row": {},
    "padded": {"rows": (3, 0, 5, 1), "room_q": 6},
    "packed": {"rows": (3, 1, 5, 0), "packed": True},
    "packed pair": {"rows": (3, 1, 5, 0), "packed": True, "pair": True, "integers": np.int64},
}


def run(call: Appended, **more: Any) -> tuple[Any, Any, Any]:
    k_pages, v_pages = call.pools()
    given = {"seqlen_k": call.pages.seqlen_k, "q": call.q, **call.options, **more}
    out = rawattn.append_kv(call.k, call.v, k_pages, v_pages, call.pages.block_table, **given)
    return k_pages, v_pages, out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ROTARY)
def test_against_the_reference(name: str, batch: str) -> None:
    for dtype, heads_first in ((F32, False), (BFLOAT16, True)):
        angles = dtype if heads_first else F32
        knobs = {**BATCHES[batch], "dtype": dtype, "heads_first": heads_first, "angles": angles}
        call = appended(LENS, 4, **ROTARY[name], **knobs)
        call.verify(*run(call))


def test_attention_reads_what_was_written() -> None:
    """Appending the whole prompt at once and token by token gives the same cache."""
    call = appended(LENS, 4, rows=LENS, room_q=24, rotary_dim=8, dtype=F32, packed=False)
    k_pages, v_pages, out = run(call)
    stepwise = call.pools()
    table = call.pages.block_table
    for n in range(max(LENS)):
        live = [b for b, length in enumerate(LENS) if n < length]
        q, k, v = (x[live, n : n + 1] for x in (call.q, call.k, call.v))
        lengths = np.full(len(live), n + 1)
        turned = rawattn.append_kv(
            k, v, *stepwise, table[live], seqlen_k=lengths, q=q, rotary=call.rotary
        )
        np.testing.assert_array_equal(turned[:, 0], out[live, n])
    for whole, steps in zip((k_pages, v_pages), stepwise, strict=True):
        np.testing.assert_array_equal(whole, steps)
    attended = rawattn.paged_attention(
        out,
        k_pages,
        v_pages,
        table,
        seqlen_k=call.pages.seqlen_k,
        seqs=call.pages.seqs,
        causal=True,
    )
    assert np.isfinite(attended).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_with_any_strides(interleaved: bool) -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32, interleaved=interleaved)
    for spread in (
        np.repeat(call.rotary, 2, -1)[..., ::2],
        np.array(call.rotary)[..., ::-1].copy()[..., ::-1],
    ):
        call.verify(*run(call, rotary=tuple(spread)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("float8", ["", "numbers"])
def test_numbers_out_of_range_raise_nothing(dtype: Any, float8: str) -> None:
    """Rotation that overflows, infinity, NaN and tiny numbers raise no floating-point error."""
    call = appended(LENS, 4, rotary_dim=8, dtype=np.dtype(dtype), float8=float8)
    numbers = np.array([np.finfo(dtype).max, np.inf, np.nan, np.finfo(dtype).tiny], dtype)
    k, v, q = (np.resize(numbers, x.shape) for x in (call.k, call.v, call.q))
    with np.errstate(all="raise"):
        _, v_pages, out = run(replace(call, k=k, v=v, pages=replace(call.pages, q=q)))
    assert np.isinf(out).any() and np.isnan(out).any()
    if not float8:
        assert np.isinf(v_pages).any()


def test_memory_of_the_caller() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    out = np.empty_like(call.q)
    k_pages, v_pages, got = run(call, out=out)
    assert got is out
    call.verify(k_pages, v_pages, out)
    padded = appended(LENS, 4, rotary_dim=8, dtype=F32, rows=(1, 0, 2, 0), room_q=3)
    out = np.full_like(padded.q, 7)
    run(padded, out=out)
    assert (out[~padded.pages.rows] == 7).all()


def test_pools_that_interleave() -> None:
    """Keys and values may lie side by side in one array."""
    call = appended(LENS, 4, dtype=F32, dims=(16, 16))
    both = np.stack(call.pools(), axis=1)
    rawattn.append_kv(
        call.k, call.v, both[:, 0], both[:, 1], call.pages.block_table, seqlen_k=call.pages.seqlen_k
    )
    call.verify(both[:, 0], both[:, 1], None)


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("name", ["one pool", "a shared page", "k", "v", "q", "out"])
def test_what_is_written_and_shares_memory_is_refused(name: str, backend: Any) -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=F32, heads=(2, 2), dims=(24, 24))
    size, n = len(call.pages.k_pages), len(LENS)
    both = np.zeros((2 * size, *call.pages.k_pages.shape[1:]), F32)
    given = {"k": call.k, "v": call.v, "q": call.q, "k_pages": both[:size], "v_pages": both[size:]}
    rawattn.append_kv(
        **given,
        block_table=call.pages.block_table,
        seqlen_k=call.pages.seqlen_k,
        rotary=call.rotary,
        backend=backend,
    )
    before = both.copy()
    changes = {
        "one pool": {"v_pages": both[:size]},
        "a shared page": {"v_pages": both[size - 1 : -1]},
    }
    given |= changes.get(name, {name: both[-n:, :1]})
    for _ in range(2):  # a first call and a repeated one take different paths
        with pytest.raises(ValueError, match="shares memory with"):
            rawattn.append_kv(
                **given,
                block_table=call.pages.block_table,
                seqlen_k=call.pages.seqlen_k,
                rotary=call.rotary,
                backend=backend,
            )
    np.testing.assert_array_equal(both, before)


def test_empty() -> None:
    call = appended((4, 4), 4, rows=0, dtype=F32)
    call.verify(*run(call))
    pages = call.pages
    pages = replace(
        pages, q=pages.q[:0], block_table=pages.block_table[:0], seqlen_k=pages.seqlen_k[:0]
    )
    nobody = replace(call, k=call.k[:0], v=call.v[:0], pages=pages)
    run(nobody)
    nothing = (
        np.zeros((0, *pages.k_pages.shape[1:]), F32),
        np.zeros((0, *pages.v_pages.shape[1:]), F32),
    )
    rawattn.append_kv(call.k, call.v, *nothing, np.zeros((2, 0), int), seqlen_k=[0, 0])


def test_angles_of_two_dtypes_are_refused() -> None:
    call = appended(LENS, 4, rotary_dim=8, dtype=np.dtype(np.float16))
    cos, sin = (x.astype(np.float32) for x in call.rotary)
    for pair in ((cos, sin.astype(np.float16)), (cos.astype(np.float16), sin)):
        with pytest.raises(
            ValueError, match=r"^rotary: got sin float\d+ of shape .*, expected float"
        ):
            run(call, rotary=pair)


CALL = appended(LENS, 4, rotary_dim=8, dtype=F32)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "more new rows than keys": ({"seqlen_k": [9, 0, 24, 3]}, ValueError, "seqlen_k: got 0 keys for sequence 1"),
    "more keys than pages hold": ({"seqlen_k": [9, 1, 99, 3]}, ValueError, "seqlen_k: got length 99"),
    "no page": ({"block_table": CALL.pages.block_table * 0 - 1}, ValueError, "block_table: got page id -1"),
    "positions": ({"rotary": [x[:20] for x in CALL.rotary]}, ValueError, "rotary: got angles of 20 positions"),
    "each plane twice": ({"rotary": [np.tile(x, 6) for x in CALL.rotary]}, ValueError, "of each plane once"),
    "angles of two forms": ({"rotary": (CALL.rotary[0], CALL.rotary[1][1:])}, ValueError, "rotary: got sin"),
    "angles of float16": ({"rotary": [x.astype(np.float16) for x in CALL.rotary]}, TypeError, "cos of dtype float16"),
    "a number of angles": ({"rotary": [np.array(1.0, F32)] * 2}, ValueError, "rotary: got cos of shape (), expected"),
    "each twice, interleaved": (
        {"rotary": [np.repeat(x, 6, -1) for x in CALL.rotary], "interleaved": True}, ValueError, "once: cos[:, ::2]"
    ),
    "interleaved, of a batch": (
        {"rotary": [x[None] for x in CALL.rotary], "interleaved": True}, ValueError, "pass cos[0, :, ::2] of"
    ),
    "angles with a mask": ({"rotary": [np.ma.array(x) for x in CALL.rotary]}, TypeError, "rotary[0]: got a masked array"),
    "angles of a batch": ({"rotary": [x[None] for x in CALL.rotary]}, ValueError, "pass cos[0, :, : D // 2] of"),
    "style alone": ({"q": None, "rotary": None, "interleaved": True}, TypeError, "interleaved: got True without rotary"),
    "positions of tokens": ({"position_ids": 3}, TypeError, "rawattn.append_kv(..., seqlen_k=..., rotary=(cos, sin))"),
    "pages of bytes": ({"k_pages": CALL.pages.k_pages.view(np.uint8)}, TypeError, "k_pages.view(ml_dtypes.float8_e4m3fn)"),
    "one array of angles": ({"rotary": CALL.rotary[0]}, TypeError, "expected a pair of arrays"),
    "q alone": ({"rotary": None}, TypeError, "q: got queries without rotary"),
    "out alone": ({"q": None, "out": CALL.q}, TypeError, "out: got an array without q"),
    "style": ({"interleaved": 1}, TypeError, "interleaved: got 1 (int)"),
    "rows of q": ({"q": np.zeros((4, 2, 4, 24), F32)}, ValueError, "q: got shape"),
    "heads of q": ({"q": np.zeros((4, 1, 3, 24), F32)}, ValueError, "q: got nheads_q = 3"),
    "v": ({"v": CALL.v[:, :, :1]}, ValueError, "v: got shape"),
    "dtype": ({"k_pages": CALL.pages.k_pages.astype(np.float16)}, TypeError, "k_pages: got dtype float16, expected float32"),
    "heads of pages": ({"k_pages": CALL.pages.k_pages[:, :, :1]}, ValueError, "k_pages: got shape"),
    "pages with gaps": ({"k_pages": np.repeat(CALL.pages.k_pages, 2, -1)[..., ::2]}, ValueError, "last-axis stride of 8"),
    "broadcast pages": ({"k_pages": np.broadcast_to(CALL.pages.k_pages[:1], (14, 4, 2, 24))}, ValueError, "k_pages: got"),
    "overlapping pages": ({"k_pages": as_strided(CALL.pages.k_pages, strides=(192, 48, 24, 4))}, ValueError, "may share"),
    "starts": ({"seqs": rawattn.SeqLayout(seqstart_q=[0, 1, 2, 3, 4])}, ValueError, "a packed k (total_q, nheads_kv, D)"),
    "batch": ({"seqs": rawattn.SeqLayout(seqlen_q=[1, 1])}, ValueError, "of 2 sequences, expected 4, the batch of k"),
    "too long": ({"seqs": rawattn.SeqLayout(seqlen_q=[2, 1, 1, 1])}, ValueError, "expected at most 1, the rows of k"),
    "lengths": ({"seqlen_k": [9, 1, 24]}, ValueError, "seqlen_k: got 3 lengths, expected 4, the batch of k"),
    "lengths of keys": ({"seqs": rawattn.SeqLayout(seqlen_k=[9, 1])}, ValueError, "the argument seqlen_k="),
    "unknown": ({"cache_seqlens": 3}, TypeError, "cache_seqlens: rawattn.append_kv has"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    """A mistake is refused also after a valid call of the same form."""
    changed, kind, message = WRONG[name]
    k_pages, v_pages = CALL.pools()
    given: dict[str, Any] = {"k": CALL.k, "v": CALL.v, "k_pages": k_pages, "v_pages": v_pages}
    given |= {"block_table": CALL.pages.block_table, "seqlen_k": CALL.pages.seqlen_k, "q": CALL.q}
    rawattn.append_kv(**given, rotary=CALL.rotary)
    with pytest.raises(kind) as caught:
        rawattn.append_kv(**{**given, "rotary": CALL.rotary, **changed})
    assert message in str(caught.value)


SHARED: dict[str, tuple[int, Any, list[int], str]] = {
    "steps": (1, [[0], [0]], [1, 1], "page 0 for new rows of sequences 0 and 1, which would both be its row 0"),
    "chunks": (2, [[2, 1], [3, 1]], [5, 4], "page 1 for .* 0 and 1, which would both be its row 0"),
    "one sequence": (4, [[1, 1], [0, 2]], [6, 4], "page 1 for .* 0 and 0, which would both be its row 2"),
    "pairs": (1, ([0, 1, 2], [0, 0]), [2, 2], "page 0 for .* 0 and 1, which would both be its row 1"),
    "steps apart": (1, [[0], [0]], [1, 2], ""),
    "chunks apart": (2, [[2, 1], [3, 1]], [4, 6], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_two_new_rows_in_one_slot(name: str) -> None:
    count, table, lengths, says = SHARED[name]
    k, pools = np.ones((2, count, 1, 8), F32), np.zeros((2, 4, 3, 1, 8), F32)
    how = pytest.raises(ValueError, match=f"^block_table: got {says}") if says else nullcontext()
    with how:
        rawattn.append_kv(k, k, *pools, table, seqlen_k=lengths)
    assert np.count_nonzero(pools[..., 0, 0]) == (0 if says else 4 * count)


def test_a_row_without_a_slot_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new row without a slot is dropped where nobody checked the integers, as in a plan whose lengths change on a GPU."""
    monkeypatch.setattr(paged, "check_pages", lambda *args: None)
    monkeypatch.setattr(append, "check_lengths", lambda *args: None)
    k, v = (np.ones((3, 2, 1, 4), F32) for _ in range(2))
    rotary = np.ones((2, 2), F32), np.zeros((2, 2), F32)
    for table in ([[5, -1], [6, 0], [99, 2]], ([0, 2, 4, 6], [5, -1, 6, 0, 99, 2])):
        k_pages, v_pages = (np.zeros((6, 2, 1, 4), F32) for _ in range(2))
        q = rawattn.append_kv(
            *(k, v, k_pages, v_pages, table), seqlen_k=[3, 1, 4], q=k, rotary=rotary
        )
        np.testing.assert_array_equal(q, k)
        written = np.zeros((6, 2), bool)
        written[5, 1] = written[2] = True  # the first new row of sequence 0 and both of sequence 2
        for pool in (k_pages, v_pages):
            np.testing.assert_array_equal(pool[..., 0, 0] == 1, written)


@pytest.mark.parametrize(
    "how",
    [{}, {"backend": "cpu"}, {"backend": "cpu", "validate": np.False_}, {"validate": np.False_}],
)
def test_on_the_cpu_all_integers_are_checked(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU backend checks integers that lie on a GPU too, whatever `validate` says."""
    monkeypatch.setattr(pages.PagedLayout, "on_host", False)  # as if the lengths were on a GPU
    k_pages, v_pages = CALL.pools()
    given = (CALL.k, CALL.v, k_pages, v_pages)
    with pytest.raises(ValueError, match="seqlen_k: got 0 keys for sequence 1"):
        rawattn.append_kv(*given, CALL.pages.block_table, seqlen_k=[9, 0, 24, 3], **how)
    table = np.where(CALL.pages.block_table >= 0, 99, -1)
    with pytest.raises(ValueError, match="block_table: got page id 99"):
        rawattn.append_kv(*given, table, seqlen_k=LENS, **how)


def test_readonly_pages_are_refused() -> None:
    call = appended(LENS, 4, dtype=F32)
    k_pages, v_pages = call.pools()
    v_pages.flags.writeable = False
    with pytest.raises(ValueError, match="v_pages: got a read-only array"):
        rawattn.append_kv(
            call.k, call.v, k_pages, v_pages, call.pages.block_table, seqlen_k=call.pages.seqlen_k
        )


def test_of_other_frameworks() -> None:
    torch = pytest.importorskip("torch")
    call = appended(LENS, 4, rotary_dim=8, dtype=F32)
    k, v, q, cos, sin, table = map(
        torch.from_numpy, (call.k, call.v, call.q, *call.rotary, call.pages.block_table)
    )
    k_pages, v_pages = map(torch.from_numpy, call.pools())
    lengths = torch.from_numpy(call.pages.seqlen_k)
    out = rawattn.append_kv(k, v, k_pages, v_pages, table, seqlen_k=lengths, q=q, rotary=(cos, sin))
    assert isinstance(out, torch.Tensor)
    call.verify(k_pages.numpy(), v_pages.numpy(), out.numpy())


def test_jax_arrays_do_not_change() -> None:
    jax = pytest.importorskip("jax")
    call = appended(LENS, 4, dtype=F32)
    k_pages, v_pages = map(jax.numpy.asarray, call.pools())
    says = "^k_pages: got an array of jax, which never changes; pass one of NumPy, CuPy or torch"
    with pytest.raises(ValueError, match=says):
        rawattn.append_kv(
            call.k, call.v, k_pages, v_pages, call.pages.block_table, seqlen_k=call.pages.seqlen_k
        )


def test_examples() -> None:
    results = doctest.testmod(append)
    assert results.attempted > 0
    assert results.failed == 0


def test_packed_rows_are_as_padded_ones() -> None:
    """Rows of a packed batch give the same result as the same rows in a padded batch."""
    padded = appended(LENS, 4, rotary_dim=8, dtype=F32, rows=(3, 1, 5, 2), room_q=5)
    k_pages, v_pages, out = run(padded)
    rows = padded.pages.rows
    layout = rawattn.SeqLayout.from_lengths([3, 1, 5, 2])
    again = padded.pools()
    table = padded.pages.block_table
    packed = rawattn.append_kv(
        padded.k[rows], padded.v[rows], *again, table, seqlen_k=padded.pages.seqlen_k,
        q=padded.q[rows], rotary=padded.rotary, seqs=layout,
    )  # fmt: skip
    np.testing.assert_array_equal(packed, out[rows])
    np.testing.assert_array_equal(again[0], k_pages)
    np.testing.assert_array_equal(again[1], v_pages)
