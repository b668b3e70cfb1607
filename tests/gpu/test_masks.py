"""Masks on a GPU: made there they equal those of the host, and calls of every family of kernels match the reference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import block_mask, reference, topk_mask
from rawattn._kernels.selection import only
from tests.gpu.pages import check_pages
from tests.paged import paged

cupy = pytest.importorskip("cupy")

RNG = np.random.default_rng(0)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FAMILIES = ("sm90", "portable")


def arrays(rows: tuple[int, int] = (333, 520), headdim: int = 64) -> list[np.ndarray]:
    shapes = ((2, rows[0], 4, headdim), (2, rows[1], 2, headdim), (2, rows[1], 2, headdim))
    return [RNG.standard_normal(shape).astype(BFLOAT16) for shape in shapes]


def blocky(*shape: int, block: int = 64) -> np.ndarray:
    kinds = RNG.integers(0, 3, (*shape[:2], *(-(-n // block) for n in shape[2:])))
    whole = np.repeat(np.repeat(kinds, block, 2), block, 3)[:, :, : shape[2], : shape[3]]
    keep = np.where(whole == 1, RNG.random(shape) < 0.5, whole == 2)
    keep[:, :, 5::9] = False
    return keep


def on_gpu(*given: np.ndarray) -> list[Any]:
    return [cupy.asarray(x) for x in given]


@pytest.mark.parametrize("shape", [(2, 4, 333, 520), (1, 2, 70, 33), (1, 1, 1, 900), (2, 1, 130, 1)], ids=str)  # fmt: skip
def test_bools_come_back(shape: tuple[int, ...]) -> None:
    keep = blocky(*shape)
    for given in (cupy.asarray(keep), cupy.asarray(np.asfortranarray(keep))):
        mask = block_mask(given)
        assert mask.device == 0
        np.testing.assert_array_equal(mask.to_bool().get(), keep)
        np.testing.assert_array_equal(mask.map.get(), block_mask(keep).map)


def test_ranges_and_predicates() -> None:
    ranges = RNG.integers(-9, 400, (2, 200, 3, 2))
    ours = block_mask(ranges=cupy.asarray(ranges), seqlen_k=390)
    theirs = block_mask(ranges=ranges, seqlen_k=390)
    np.testing.assert_array_equal(ours.to_bool().get(), theirs.to_bool())
    document = np.sort(RNG.integers(0, 9, 390)).astype(np.int32)
    text = "document[q_idx] == document[kv_idx] and kv_idx <= q_idx"
    made = block_mask(
        predicate=text, seqlen_q=390, seqlen_k=390, nheads=2, document=cupy.asarray(document)
    )
    expected = np.tri(390, dtype=bool) & (document[:, None] == document)
    np.testing.assert_array_equal(made.to_bool().get(), np.broadcast_to(expected, (1, 2, 390, 390)))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (100, 9), "sink": 3}], ids=str
)
@pytest.mark.parametrize(
    ("shape", "headdim"),
    [((2, 4, 333, 520), 64), ((1, 2, 333, 520), 128), ((2, 1, 1, 520), 256)],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls(family: str, shape: tuple[int, ...], headdim: int, options: dict[str, Any]) -> None:
    q, k, v = arrays(headdim=headdim)
    keep = blocky(*shape)
    exact, exact_lse = reference.attention(q, k, v, mask=keep, return_lse=True, **options)
    for mask in (cupy.asarray(keep), block_mask(cupy.asarray(keep))):
        with only(family):
            out, lse = rawattn.attention(*on_gpu(q, k, v), mask=mask, return_lse=True, **options)
        np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)
        np.testing.assert_allclose(lse.get(), exact_lse, atol=1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 4, 333, 520), (2, 1, 1, 520)], ids=str)
def test_gradients(shape: tuple[int, ...], deterministic: bool) -> None:
    q, k, v = arrays()
    keep = blocky(*shape)
    out, lse = reference.attention(q, k, v, mask=keep, causal=True, return_lse=True)
    dout = RNG.standard_normal(out.shape).astype(BFLOAT16)
    exact = reference.attention_backward(dout, q, k, v, out, lse, mask=keep, causal=True)
    given = on_gpu(dout, q, k, v, out.astype(BFLOAT16), lse.astype(np.float32))
    for mask in (cupy.asarray(keep), block_mask(cupy.asarray(keep))):
        got = rawattn.attention_backward(
            *given, mask=mask, causal=True, deterministic=deterministic
        )
        for name in ("dq", "dk", "dv"):
            wanted = getattr(exact, name)
            ours = getattr(got, name).get().astype(np.float64)
            assert np.linalg.norm(ours - wanted) <= 0.02 * np.linalg.norm(wanted), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_nobody_sees_may_be_anything(family: str) -> None:
    q, k, v = arrays()
    keep = blocky(2, 2, 333, 520)
    keep[..., 100:250] = False
    exact = reference.attention(q, k, v, mask=keep)
    k[:, 100:250], v[:, 100:250] = np.nan, np.inf
    with only(family):
        out = rawattn.attention(*on_gpu(q, k, v), mask=cupy.asarray(keep))
    np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)


@pytest.mark.parametrize(
    ("rows", "heads", "headdim"),
    [(1, (8, 2), 128), (1, (4, 4), 64), (3, (6, 1), 96), (16, (8, 2), 64), (60, (4, 2), 256)],
    ids=str,
)
@pytest.mark.parametrize("family", ["decode", "sm90", None])
def test_few_rows_on_many_keys(
    family: str | None, rows: int, heads: tuple[int, int], headdim: int
) -> None:
    """Few rows whose keys are split among blocks are right. Whole key tiles, and some keys of
    others, are hidden from all rows: they may hold anything."""
    keys = 5003
    shapes = ((2, rows, heads[0], headdim), *[(2, keys, heads[1], headdim)] * 2)
    q, k, v = (RNG.standard_normal(shape).astype(BFLOAT16) for shape in shapes)
    keep = blocky(2, heads[1], rows, keys)
    hidden = RNG.random((2, keys)) < 0.1
    hidden[:, 700:2300] = True
    keep &= ~hidden[:, None, None]
    options = {"mask": keep, "causal": rows > 1, "return_lse": True}
    exact, exact_lse = reference.attention(q, k, v, **options)
    k[hidden] = v[hidden] = np.nan
    with only(family) if family else nullcontext():
        out, lse = rawattn.attention(*on_gpu(q, k, v), **{**options, "mask": cupy.asarray(keep)})
    np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)
    np.testing.assert_allclose(lse.get(), exact_lse, atol=1e-2)


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("rows", [1, 4, 200])
def test_pages(rows: int, page_size: int) -> None:
    call = paged((3000, 70, 0, 1023), page_size, rows=rows, heads=(8, 2), dims=(64, 64))
    for mask in (blocky(4, 1, rows, 3000), blocky(1, 8, 1, 3000)):
        check_pages(call, mask=mask)


def test_a_mask_of_the_host_is_copied_once() -> None:
    q, k, v = arrays()
    mask = block_mask(blocky(2, 2, 333, 520))
    first = rawattn.attention(*on_gpu(q, k, v), mask=mask)
    assert mask.on_device_of(cupy.asarray(q))[0] is mask.on_device_of(cupy.asarray(q))[0]
    np.testing.assert_array_equal(rawattn.attention(*on_gpu(q, k, v), mask=mask).get(), first.get())
    np.testing.assert_array_equal(rawattn.attention(q, k, v, mask=mask), first.get())


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    given = [torch.from_dlpack(x.astype(cupy.float16)) for x in on_gpu(*map(np.float32, arrays()))]
    keep = blocky(2, 2, 333, 520)
    mask = block_mask(torch.from_dlpack(cupy.asarray(keep)))
    ours = rawattn.attention(*given, mask=mask)
    wanted = rawattn.attention(*given, mask=torch.from_dlpack(cupy.asarray(keep)))
    assert torch.equal(ours, wanted)


def test_the_largest_scores() -> None:
    scores = RNG.integers(-6, 6, (2, 2, 150, 300)).astype(np.float32)
    scores[RNG.random(scores.shape) < 0.2] = -np.inf
    ours = topk_mask(cupy.asarray(scores), 40, causal=True)
    np.testing.assert_array_equal(
        ours.to_bool().get(), topk_mask(scores, 40, causal=True).to_bool()
    )
    shared = topk_mask(cupy.asarray(scores[:, :, :1]), 40)
    np.testing.assert_array_equal(shared.kept.get(), topk_mask(scores[:, :, :1], 40).kept)
