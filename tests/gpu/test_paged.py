"""`paged_attention` on the GPU: every kind of integers and pages, frameworks, checks that wait, graphs whose lengths grow."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout, paged_attention
from rawattn._kernels.selection import only
from tests.paged import BFLOAT16, FLOAT8, Paged, paged, verify
from tests.random_pages import random_pages
from tests.tiles import sharing

cupy = pytest.importorskip("cupy")

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (700, 3, 0, 1290)
_FIRST, _COUNT = map(int, os.environ.get("RAWATTN_FUZZ", "0:160").split(":"))
SHAPES: list[dict[str, Any]] = [
    {"page_size": 1, "rows": 1},
    {"page_size": 16, "rows": 1, "heads": (12, 2), "dims": (128, 128)},
    {"page_size": 24, "rows": 5, "heads": (7, 1), "dtype": F16, "heads_first": True},
    {"page_size": 128, "rows": 16, "dtype": F32, "dims": (64, 64), "pair": True},
    {"page_size": 1000, "rows": 3, "dims": (40, 72), "integers": np.int64},
    {"page_size": 16, "rows": (200, 3, 9, 129), "group": True, "pair": True, "dims": (256, 256)},
    {"page_size": 64, "rows": (200, 0, 9, 129), "room_q": 210, "dims": (7, 7)},
]
MASKS: list[dict[str, Any]] = [{"causal": True}, {"window": (100, 0), "sink": 4}]


def on_gpu(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(on_gpu, x))
    if x.dtype == FLOAT8:
        return on_gpu(x.view(np.uint8)).view(FLOAT8)
    order = sorted(range(x.ndim), key=lambda n: -x.strides[n])  # of the axes in memory: kept
    return cupy.asarray(x.transpose(order)).transpose(np.argsort(order))


def lengths_of(call: Paged, *, on_device: bool) -> dict[str, Any]:
    if not on_device:
        return call.lengths
    seqs = call.seqs
    if seqs is not None:
        given = {name: getattr(seqs, name) for name in ("seqstart_q", "seqlen_q")}
        seqs = SeqLayout(**{n: cupy.asarray(x) for n, x in given.items() if x is not None})
    return {"seqlen_k": cupy.asarray(call.seqlen_k), "seqs": seqs}


def check_pages(call: Paged, family: str | None = None, **options: Any) -> None:
    """A call against the reference, with integers on the GPU and on the host."""
    inputs = [on_gpu(x) for x in call.inputs]
    for device, table in ((True, inputs[3]), (False, call.block_table)):
        lengths = lengths_of(call, on_device=device)
        scales = call.scales
        if device and isinstance(call.k_scale, np.ndarray):
            scales = {name: cupy.asarray(x) for name, x in scales.items()}
        with only(family) if family else nullcontext():
            out, lse = paged_attention(
                *inputs[:3], table, **lengths, **scales, **options, return_lse=True
            )
        assert isinstance(out, cupy.ndarray)
        verify(call, out.get(), lse.get(), **options)


@pytest.mark.parametrize("num_splits", [None, 1, 6])
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages(shape: dict[str, Any], options: dict[str, Any], num_splits: int | None) -> None:
    check_pages(paged(LENS, **shape), num_splits=num_splits, **options)


# Chunks that fill a GPU, in pages that divide a tile, that a tile divides, and neither.
CHUNKS: list[dict[str, Any]] = [
    {"page_size": 16, "dims": (128, 128), "heads": (32, 8)},
    {"page_size": 8, "dims": (64, 64), "heads": (24, 24), "pair": True, "dtype": F16},
    {"page_size": 24, "dims": (96, 96), "heads": (24, 4), "integers": np.int64},
    {"page_size": 128, "dims": (192, 128), "heads": (24, 3), "heads_first": True},
    {"page_size": 1000, "dims": (256, 256), "heads": (32, 1), "shared": 1},
    {"page_size": 64, "dims": (40, 72), "heads": (30, 5)},
]
LIMITS: list[dict[str, Any]] = [
    {"causal": True},
    {},
    {"window": (100, 0), "sink": 4},
    {"window": (300, 20), "align": "top-left"},
]


@pytest.mark.parametrize("options", LIMITS, ids=str)
@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_chunks(shape: dict[str, Any], options: dict[str, Any]) -> None:
    """By Hopper's kernel where there is one, and by the portable one."""
    rows = (300, 3, 130, 1290)
    packed = paged((1700, 3, 130, 1290), **shape, rows=rows, group=True)
    check_pages(packed, num_splits=1, **options)
    check_pages(packed, "portable", num_splits=1, **options)
    padded = paged((700, 0, 1290), **shape, rows=(300, 0, 130), room_q=310)
    check_pages(padded, num_splits=1, **options)


@pytest.mark.parametrize("options", LIMITS[:3], ids=str)
def test_tiles_shared_out_by_keys(options: dict[str, Any]) -> None:
    rows = (300, 3, 130, 200)
    shape: dict[str, Any] = {"dims": (128, 128), "heads": (32, 8)}
    packed = paged((1700, 3, 130, 900), 16, **shape, rows=rows, group=True)
    alone = paged((1500,), 24, **shape, rows=400, dtype=F16)
    with sharing():
        for call in (packed, alone):
            check_pages(call, "sm90", **options)


@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)], ids=str)
def test_few_rows_of_several_heads(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """What calls choose by themselves: speculative steps and short chunks, of few sequences and of many."""
    for lens, rows, heads in (
        ((4100, 1025, 33, 3000), (20, 7, 33, 40), (32, 8)),
        ((5000,), 33, (16, 2)),
        (tuple(range(200, 520, 5)), 12, (8, 2)),
    ):
        packed = type(rows) is tuple
        call = paged(lens, 16, rows=rows, heads=heads, dims=dims, group=packed)
        check_pages(call, **options)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0), "sink": 3}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_more_heads_than_a_tile_has_rows(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """The last tile of the heads that share keys has fewer."""
    lens = (700, 33, 0, 1290)
    for heads, rows in (((71, 1), 1), ((71, 1), 2), ((74, 2), 1), ((20, 1), 3), ((128, 1), 1)):
        check_pages(paged(lens, 16, rows=rows, heads=heads, dims=dims), **options)
    check_pages(paged((500, 400), 7, rows=1, heads=(71, 1), dims=dims, pair=True), **options)


@pytest.mark.parametrize("group", [False, True])
def test_most_sequences_without_queries(group: bool) -> None:
    """A batch that is padded with sequences has fewer units than blocks."""
    for lens, rows in (((1000, *(700,) * 63), (1, *(0,) * 63)), ((90,) * 200, (*(0,) * 199, 1))):
        room = None if group else 1
        call = paged(lens, 16, rows=rows, room_q=room, group=group, heads=(32, 8), dims=(128, 128))
        for _ in range(2):
            check_pages(call, causal=True)


@pytest.mark.parametrize("lens", [(90,) * 40, (5000,), (300, 20)], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "gap"), [((8, 8), 256, 4), ((24, 1), 96, 1), ((8, 2), 128, 1)]
)
def test_queries_anywhere(
    lens: tuple[int, ...], heads: tuple[int, int], dim: int, gap: int
) -> None:
    """Keys lie as the copy engine needs them, queries do not."""
    call = paged(lens, 16, rows=1, heads=heads, dims=(dim, dim))
    wide = np.zeros((*call.q.shape[:-1], dim + gap), call.q.dtype)
    wide[..., :dim] = call.q
    inputs = [on_gpu(x) for x in (call.q, *call.inputs[1:])]
    inputs[0] = on_gpu(wide)[..., :dim]
    out, lse = paged_attention(*inputs, seqlen_k=call.seqlen_k, return_lse=True)
    verify(call, out.get(), lse.get())


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 128)], ids=str)
def test_heads_that_become_rows(dims: tuple[int, int], options: dict[str, Any]) -> None:
    """Of so many sequences Hopper's forward takes them (rawattn/_kernels/sm90/folded.py)."""
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(0, 300, 140))
    for heads in ((71, 1), (200, 1), (74, 2)):
        check_pages(paged(lens, 16, rows=1, heads=heads, dims=dims), **options)
    first = paged(lens, 24, rows=1, heads=(40, 1), dims=dims, heads_first=True, pair=True)
    check_pages(first, **options)


@pytest.mark.parametrize("heads", [(8, 1), (4, 2), (40, 1)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_bunches_of_parts(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    """So many blocks share a query tile that they join what they leave in two steps."""
    for lens in ((40000,), (300, 25000, 0, 700)):
        check_pages(paged(lens, 16, rows=1, heads=heads, dims=dims), causal=True)
    check_pages(paged((20000,), 24, rows=1, heads=heads, dims=dims), "decode", num_splits=100)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256)], ids=str)
def test_many_short_sequences(dims: tuple[int, int]) -> None:
    """Several blocks of a multiprocessor have some of them each."""
    lens = tuple(int(n) for n in np.random.default_rng(0).integers(0, 200, 70))
    for options in ({}, {"softcap": 5.0}, {"window": (60, 0)}):
        check_pages(paged(lens, 16, rows=1, heads=(8, 8), dims=dims), causal=True, **options)


@pytest.mark.parametrize(
    ("page_size", "dims", "keys"),
    [(16, (64, 64), 800), (16, (64, 64), 801), (64, (128, 128), 801), (32, (192, 192), 803)],
    ids=str,
)
def test_options_of_scores(page_size: int, dims: tuple[int, int], keys: int) -> None:
    """Rows of a bias that begin at multiples of 16 bytes, and those that begin anywhere."""
    rng = np.random.default_rng(0)
    call = paged((700, 130), page_size, rows=20, dims=dims)
    options: dict[str, Any] = {
        "bias": rng.standard_normal((2, 4, 20, keys)).astype(BFLOAT16),
        "mask": rng.random((2, 1, 20, 700)) < 0.8,
        "alibi_slopes": rng.random(4).astype(F32),
        "sink_logits": rng.standard_normal(4).astype(F32),
        "softcap": 5.0,
        "dropout_p": 0.2,
        "seed": 3,
        "window": (300, 2),
        "sink": 2,
    }
    arrays = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    inputs = [on_gpu(x) for x in call.inputs]
    for splits in (None, 1):  # by the kernel for few rows, and by Hopper's
        with only("sm90") if splits else nullcontext():
            out, lse = paged_attention(
                *inputs,
                **lengths_of(call, on_device=True),
                **arrays,
                num_splits=splits,
                return_lse=True,
            )
        verify(call, out.get(), lse.get(), **options)


def test_numpy_and_torch() -> None:
    call = paged(LENS, 16, rows=2, dtype=F16)
    out, lse = paged_attention(*call.inputs, **call.lengths, return_lse=True)
    assert isinstance(out, np.ndarray)
    verify(call, out, lse)
    torch = pytest.importorskip("torch")
    q, k_pages, v_pages, table = (torch.from_numpy(x).cuda() for x in call.inputs)
    seqlen_k = torch.from_numpy(call.seqlen_k).cuda()
    for ids in (table, call.block_table):
        out, lse = paged_attention(q, k_pages, v_pages, ids, seqlen_k=seqlen_k, return_lse=True)
        assert isinstance(out, torch.Tensor)
        verify(call, out.cpu().numpy(), lse.cpu().numpy())


@pytest.mark.parametrize("framework", ["cupy", "torch"])
@pytest.mark.parametrize("pair", [False, True])
def test_repeated_steps(pair: bool, framework: str) -> None:
    """Found by the form of their arrays: pages, lengths, results, streams and captures are their own."""
    put: Any = on_gpu
    if framework == "torch":
        torch = pytest.importorskip("torch")

        def put(x: Any) -> Any:
            return tuple(map(put, x)) if isinstance(x, tuple) else torch.from_numpy(x).cuda()

    out = None
    for seed in range(5):
        call = paged(LENS, 16, rows=2, dtype=F16, pair=pair, seed=seed)
        given = [put(x) for x in (*call.inputs, call.seqlen_k)]
        out, lse = paged_attention(
            *given[:4],
            seqlen_k=given[4],
            causal=True,
            return_lse=True,
            out=out if seed > 3 else None,
        )
        assert type(out) is type(given[0])
        verify(
            call,
            *(np.asarray(x.get() if framework == "cupy" else x.cpu()) for x in (out, lse)),
            causal=True,
        )
    if framework == "torch":
        return
    lengths = given[4]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        results = paged_attention(*given[:4], seqlen_k=lengths, causal=True, return_lse=True)
        graph = stream.end_capture()
        for part in (0.0, 0.3, 1.0):
            now = (call.seqlen_k * part).astype(np.int32)
            lengths.set(now.astype(lengths.dtype))
            graph.launch(stream)
            stream.synchronize()
            wanted = paged_attention(
                *call.inputs, seqlen_k=now, causal=True, return_lse=True, backend="cpu"
            )
            for got, expected in zip(results, wanted, strict=True):
                np.testing.assert_allclose(got.get().astype(F32), expected.astype(F32), atol=2e-3)


def test_validate_reads_what_is_on_the_device() -> None:
    """Without it nothing leaves the arrays, and the context stays usable."""
    call = paged((70, 30), 16, rows=1, dtype=F32)
    inputs = [on_gpu(x) for x in call.inputs]
    good, bad = inputs[3], inputs[3].copy()
    bad[1, 1] = len(call.k_pages)
    lengths = cupy.asarray(call.seqlen_k)
    paged_attention(*inputs, seqlen_k=lengths, validate=True)
    with pytest.raises(ValueError, match=r"^block_table: got page id \d+ for page 1 of sequence 1"):
        paged_attention(*inputs[:3], bad, seqlen_k=lengths, validate=True)
    too_long = lengths + 16 * good.shape[1]
    with pytest.raises(ValueError, match=r"^seqlen_k: got length"):
        paged_attention(*inputs, seqlen_k=too_long, validate=True)
    bad[:] = cupy.asarray([[-1, 1 << 30], [-(2**31), 2**31 - 1]]).repeat(good.shape[1], 1)[
        :, : good.shape[1]
    ]
    paged_attention(*inputs[:3], bad, seqlen_k=too_long)
    cupy.cuda.get_current_stream().synchronize()
    out, lse = paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
    verify(call, out.get(), lse.get())


def test_nothing_waits() -> None:
    """A capture refuses whatever would."""
    call = paged(LENS, 16, rows=1)
    inputs, lengths = [on_gpu(x) for x in call.inputs], cupy.asarray(call.seqlen_k)
    paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out, lse = paged_attention(*inputs, seqlen_k=lengths, return_lse=True)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    verify(call, out.get(), lse.get())


@pytest.mark.parametrize("pair", [False, True])
def test_a_captured_plan_of_growing_lengths(pair: bool) -> None:
    call = paged((250, 100), 16, rows=1, pair=pair, dtype=F16)
    inputs = [on_gpu(x) for x in call.inputs]
    lengths = cupy.zeros(2, np.int32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        made = rawattn.plan(paged_attention, *inputs, seqlen_k=lengths, return_lse=True)
        out, lse = made()
        stream.begin_capture()
        made()
        graph = stream.end_capture()
        for part in (0.0, 0.3, 1.0):
            now = (call.seqlen_k * part).astype(np.int32)
            lengths.set(now)
            graph.launch(stream)
            stream.synchronize()
            wanted = paged_attention(*call.inputs, seqlen_k=now, return_lse=True, backend="cpu")
            np.testing.assert_allclose(out.get().astype(F32), wanted[0].astype(F32), atol=2e-3)
            np.testing.assert_allclose(lse.get(), wanted[1], atol=1e-3)
        other = lengths.copy()
        other[1] = 0
        ids = inputs[3][1] if pair else inputs[3]
        changed = made(*inputs[:3], ids, seqlen_k=other)
        stream.synchronize()
        assert not changed[0].get()[1].any()


FLOAT8_SHAPES: list[dict[str, Any]] = [
    *SHAPES,
    {"page_size": 16, "rows": 1, "heads": (8, 2), "dims": (256, 128), "dtype": F16},
    {"page_size": 8, "rows": 6, "heads": (12, 2), "dims": (128, 128)},
    {"page_size": 32, "rows": 9, "heads": (4, 1), "dims": (64, 96)},
    {"page_size": 16, "rows": 2, "heads": (4, 1), "dims": (192, 192)},
]


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize(
    ("shape", "float8"),
    list(zip(FLOAT8_SHAPES, itertools.cycle(("plain", "numbers", "arrays")), strict=False)),
    ids=str,
)
def test_pages_of_8_bits(shape: dict[str, Any], float8: str, options: dict[str, Any]) -> None:
    for num_splits in (None, 6):
        check_pages(paged(LENS, **shape, float8=float8), num_splits=num_splits, **options)


@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_chunks_on_pages_of_8_bits(shape: dict[str, Any]) -> None:
    rows = (300, 3, 130, 1290)
    call = paged((1700, 3, 130, 1290), **shape, rows=rows, group=True, float8="arrays")
    for options in LIMITS[::3]:
        check_pages(call, "portable", num_splits=1, **options)


def test_all_numbers_of_8_bits() -> None:
    """Of one key the output is its value: each of them, and NaN."""
    every = np.arange(256, dtype=np.uint8).view(FLOAT8)
    call = paged((1,), 8, heads=(1, 1), dims=(256, 256), dtype=F32, spare=0, float8="plain")
    pools = {name: np.zeros((1, 8, 1, 256), FLOAT8) for name in ("k_pages", "v_pages")}
    pools["v_pages"][:] = every
    for dtype in (F16, BFLOAT16, F32):
        given = replace(call, q=call.q.astype(dtype), **pools)
        inputs = [on_gpu(x) for x in given.inputs]
        for family in ("decode", "portable"):
            with only(family):
                out = paged_attention(*inputs, seqlen_k=[1])
            np.testing.assert_array_equal(out.get().reshape(-1).astype(F32), every.astype(F32))


@pytest.mark.parametrize("power", [40, -40])
def test_queries_beyond_float16_on_pages_of_8_bits(power: int) -> None:
    shape: dict[str, Any] = {"rows": 3, "heads": (8, 2), "dims": (128, 128), "float8": "arrays"}
    call = paged(LENS, 16, **shape)
    sized = replace(call, q=(call.q.astype(F32) * 2.0**power).astype(BFLOAT16))
    for family in ("decode", "portable"):
        check_pages(sized, family, scale=2.0**-power / 11)


def test_scales_that_change_in_a_captured_graph() -> None:
    call = paged((250, 100), 16, rows=1, heads=(8, 2), float8="arrays")
    inputs, lengths = [on_gpu(x) for x in call.inputs], cupy.asarray(call.seqlen_k)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        scales = {name: cupy.ones(2, np.float32) for name in ("k_scale", "v_scale")}
        made = rawattn.plan(paged_attention, *inputs, seqlen_k=lengths, **scales, return_lse=True)
        out, lse = made()
        stream.begin_capture()
        made()
        graph = stream.end_capture()
        for name, array in scales.items():
            array.set(call.scales[name])
        graph.launch(stream)
        stream.synchronize()
        verify(call, out.get(), lse.get())


def test_numpy_and_torch_of_8_bits() -> None:
    call = paged(LENS, 16, rows=2, dtype=F16, float8="arrays")
    out, lse = paged_attention(*call.inputs, **call.lengths, **call.scales, return_lse=True)
    assert isinstance(out, np.ndarray)
    verify(call, out, lse)
    torch = pytest.importorskip("torch")
    q, table, seqlen_k, *scales = (
        torch.from_numpy(x).cuda()
        for x in (call.q, call.block_table, call.seqlen_k, call.k_scale, call.v_scale)
    )
    pools = [
        torch.from_numpy(x.view(np.uint8)).cuda().view(torch.float8_e4m3fn)
        for x in (call.k_pages, call.v_pages)
    ]
    given = dict(zip(("k_scale", "v_scale"), scales, strict=True))
    for factors in (given, call.scales):
        out, lse = paged_attention(q, *pools, table, seqlen_k=seqlen_k, **factors, return_lse=True)
        assert isinstance(out, torch.Tensor)
        verify(call, out.cpu().numpy(), lse.cpu().numpy())
    with pytest.raises(TypeError, match=r"^k_pages: got dtype torch\.float8_e5m2"):
        paged_attention(q, pools[0].view(torch.float8_e5m2), pools[1], table, seqlen_k=seqlen_k)


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT // 4))
def test_random(seed: int) -> None:
    call, options, on_device = random_pages(seed)
    arrays = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    scales = {
        n: cupy.asarray(x) if on_device and isinstance(x, np.ndarray) else x
        for n, x in call.scales.items()
    }
    inputs = [on_gpu(x) for x in call.inputs]
    table = inputs[3] if on_device else call.block_table
    given = {**lengths_of(call, on_device=on_device), **scales, **arrays, "return_lse": True}
    with only("portable") if seed % 3 == 2 else nullcontext():
        out, lse = paged_attention(*inputs[:3], table, **given)
    verify(call, out.get(), lse.get(), **options)
