"""Calls on a GPU whose rows all see the same few keys: gathered keys give the reference's results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import BlockMask, block_mask, reference, topk_mask
from rawattn._kernels.selection import only

cupy = pytest.importorskip("cupy")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROWS, KEYS, KEPT = 333, 1100, 260
RULES: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (300, 40), "sink": 70}]


def arrays(
    headdim: int = 64, *, batch: int = 2, rows: int = ROWS, heads: tuple[int, int] = (4, 2)
) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    q, kv = (batch, rows, heads[0], headdim), (batch, KEYS, heads[1], headdim)
    shapes = q, kv, kv
    return [rng.standard_normal(shape).astype(BFLOAT16) for shape in shapes]


def shared(batch: int, heads: int) -> BlockMask:
    """A mask of kept keys, made on the GPU. Its last list is shorter than the others."""
    scores = np.random.default_rng(1).standard_normal((batch, heads, 1, KEYS), np.float32)
    scores[-1, -1, :, KEPT // 2 :] = -np.inf
    return topk_mask(cupy.asarray(scores), KEPT)


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("headdim", [64, 100, 128])
@pytest.mark.parametrize("family", ["sm90", "portable"])
def test_calls(family: str, headdim: int, options: dict[str, Any]) -> None:
    q, k, v = arrays(headdim)
    for lists in ((1, 1), (2, 2)):
        mask = shared(*lists)
        keep = mask.to_bool().get()
        exact, exact_lse = reference.attention(q, k, v, mask=keep, return_lse=True, **options)
        hidden = np.broadcast_to(~keep[:, :, 0].swapaxes(1, 2), (2, KEYS, 2))
        given = [x.copy() for x in (k, v)]
        given[0][hidden], given[1][hidden] = np.nan, np.inf
        with only(family):
            out, lse = rawattn.attention(
                *map(cupy.asarray, (q, *given)), mask=mask, return_lse=True, **options
            )
        np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)
        np.testing.assert_allclose(lse.get(), exact_lse, atol=1e-2)


@pytest.mark.parametrize("family", ["decode", "sm90", "portable"])
@pytest.mark.parametrize(("rows", "lists"), [(1, (2, 2)), (1, (1, 1)), (3, (2, 1))], ids=str)
def test_few_rows(family: str, rows: int, lists: tuple[int, int]) -> None:
    """Few rows are right where decoding takes each list as a sequence of keys, one of them empty, and where other families take
    the mask."""
    q, k, v = arrays()
    q = np.ascontiguousarray(q[:, :rows])
    scores = np.random.default_rng(1).standard_normal((*lists, 1, KEYS), np.float32)
    scores[-1, -1, :, KEPT // 2 :] = -np.inf
    if lists != (1, 1):
        scores[0, 0] = np.nan
    mask = topk_mask(cupy.asarray(scores), KEPT)
    keep = mask.to_bool().get()
    exact, exact_lse = reference.attention(q, k, v, mask=keep, return_lse=True)
    hidden = np.broadcast_to(~keep[:, :, 0].swapaxes(1, 2), (2, KEYS, 2))
    k[hidden], v[hidden] = np.nan, np.inf
    given = [*map(cupy.asarray, (q, k, v))]
    with only(family):
        out, lse = rawattn.attention(*given, mask=mask, return_lse=True)
    np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)
    np.testing.assert_allclose(lse.get(), exact_lse, atol=1e-2)


def test_repeated_calls_with_new_masks() -> None:
    """Repeated calls with new masks, which take the fast path from the third on, are right."""
    for n in range(5):
        q, k, v = arrays()
        scores = np.random.default_rng(n).standard_normal((2, 2, 1, KEYS), np.float32)
        mask = topk_mask(cupy.asarray(scores), KEPT)
        for rows in (1, ROWS):
            given = [*map(cupy.asarray, (q[:, :rows], k, v))]
            out = rawattn.attention(*given, mask=mask, causal=True)
            exact = reference.attention(q[:, :rows], k, v, mask=mask.to_bool().get(), causal=True)
            np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)


def test_graphs_of_gathered_calls() -> None:
    """Each replay reads the arrays and the list of keys anew."""
    q, k, v = map(cupy.asarray, arrays())
    q = q[:, :1].copy()
    each_scores = [np.random.default_rng(n).standard_normal((1, 2, 1, KEYS)) for n in (1, 2)]
    mask, other = (topk_mask(cupy.asarray(scores), KEPT) for scores in each_scores)
    out = cupy.empty_like(q)
    plan = rawattn.plan(rawattn.attention, q, k, v, mask=mask)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        plan(q, k, v, out=out)
        graph = stream.end_capture()
        for each in (mask, other):
            mask.kept[...] = each.kept
            graph.launch()
            stream.synchronize()
            exact = reference.attention(*(x.get() for x in (q, k, v)), mask=each.to_bool().get())
            np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=0.03)


def verify_gradients(
    arrays: list[np.ndarray], mask: BlockMask, *, deterministic: bool, **options: Any
) -> None:
    q, k, v = arrays
    keep = mask.to_bool().get()
    hidden = k.shape[0], k.shape[2], k.shape[1]
    out, lse = reference.attention(q, k, v, mask=keep, return_lse=True, **options)
    dout = np.random.default_rng(2).standard_normal(out.shape).astype(BFLOAT16)
    exact = reference.attention_backward(dout, q, k, v, out, lse, mask=keep, **options)
    given = map(cupy.asarray, (dout, q, k, v, out.astype(BFLOAT16), lse.astype(np.float32)))
    got = rawattn.attention_backward(*given, mask=mask, deterministic=deterministic, **options)
    for name in ("dq", "dk", "dv"):
        wanted = getattr(exact, name)
        ours = getattr(got, name).get().astype(np.float64)
        assert np.linalg.norm(ours - wanted) <= 0.02 * np.linalg.norm(wanted), name
        # Zeros are required of rows that see no key and of keys that no row sees. A row that sees one key has an exact dq of 0
        # too, but ours is a rounding error.
        nothing = np.isneginf(lse) if name == "dq" else np.broadcast_to(~keep[:, :, 0], hidden)
        assert not ours[nothing.swapaxes(1, 2)].any(), name


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(deterministic: bool, options: dict[str, Any]) -> None:
    verify_gradients(arrays(), shared(2, 2), deterministic=deterministic, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_gradients_where_several_blocks_share_a_key_tile(headdim: int, deterministic: bool) -> None:
    given = arrays(headdim, batch=1, rows=2600, heads=(2, 1))
    options = {"causal": True, "align": "top-left"}
    verify_gradients(given, shared(1, 1), deterministic=deterministic, **options)


def test_plans_and_the_ordinary_way() -> None:
    given = [cupy.asarray(x) for x in arrays()]
    mask = shared(1, 2)
    plan = rawattn.plan(rawattn.attention, *given, mask=mask, causal=True)
    once = rawattn.attention(*given, mask=mask, causal=True).get()
    for _ in range(2):
        np.testing.assert_array_equal(plan(*given).get(), once)
    plain = rawattn.attention(*given, mask=block_mask(mask.to_bool()), causal=True).get()
    np.testing.assert_allclose(once.astype(np.float32), plain.astype(np.float32), atol=0.03)


def test_lists_of_the_host_and_of_torch() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (x.astype(np.float16) for x in arrays())
    mask = topk_mask(np.random.default_rng(1).standard_normal((1, 2, 1, KEYS)), KEPT)
    once = rawattn.attention(*map(cupy.asarray, (q, k, v)), mask=mask)
    tensors = [torch.from_dlpack(cupy.asarray(x)) for x in (q, k, v)]
    ours = rawattn.attention(*tensors, mask=mask)
    np.testing.assert_array_equal(ours.cpu().numpy(), once.get())
    np.testing.assert_array_equal(rawattn.attention(q, k, v, mask=mask), once.get())
