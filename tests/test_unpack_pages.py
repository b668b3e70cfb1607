"""`unpack_pages`: both orders of vectors in pages, every dtype and framework, mistakes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import unpack_pages

PAGES, PAGE, HEADS = 5, 16, 3
DTYPES = [
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    ml_dtypes.float8_e4m3fn,
    np.complex128,
    np.longdouble,
]


def rows(headdim: int, dtype: Any = np.float32, page: int = PAGE, pages: int = PAGES) -> np.ndarray:
    rng = np.random.default_rng(headdim)
    return rng.standard_normal((pages, page, HEADS, headdim)).astype(dtype)


def vectors_of_keys(k: np.ndarray, width: int) -> np.ndarray:
    pages, page, heads, headdim = k.shape
    split = k.reshape(pages, page, heads, headdim // width, width)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4))


def vectors_of_values(v: np.ndarray, width: int) -> np.ndarray:
    pages, page, heads, headdim = v.shape
    split = v.reshape(pages, page // width, width, heads, headdim)
    return np.ascontiguousarray(split.transpose(0, 3, 1, 4, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 8, 16])
def test_it_undoes_vectors(dtype: Any, width: int) -> None:
    k, v = rows(64, dtype), rows(48, dtype)
    transposed = np.ascontiguousarray(v.transpose(0, 2, 3, 1))
    for v_cache in (transposed, vectors_of_values(v, width)):
        got = unpack_pages(vectors_of_keys(k, width), v_cache)
        for one, wanted in zip(got, (k, v), strict=True):
            assert one.dtype == wanted.dtype and one.flags.c_contiguous
            bits = np.dtype(f"u{min(one.itemsize, 8)}")
            np.testing.assert_array_equal(one.view(bits), wanted.view(bits))


def test_any_strides_and_a_copy_always() -> None:
    k, v = rows(8), rows(8)
    k_cache = vectors_of_keys(k, 8)[::-1]
    v_cache = vectors_of_values(v, 16)[::-1]
    k_pages, v_pages = unpack_pages(k_cache, v_cache)
    np.testing.assert_array_equal(k_pages, k[::-1])
    np.testing.assert_array_equal(v_pages, v[::-1])
    assert not np.shares_memory(k_pages, k_cache)
    one = np.ones((2, 1, 1, 4, 8), np.float32)  # a view of rows as it is
    assert not np.shares_memory(unpack_pages(one, one[:, :, :, :, :4])[0], one)


def test_without_pages() -> None:
    k = rows(64, pages=0)
    got = unpack_pages(vectors_of_keys(k, 8), k.transpose(0, 2, 3, 1))
    assert [x.shape for x in got] == [k.shape, k.shape]


def test_attention_to_what_was_vectors() -> None:
    k, v = rows(32), rows(24)
    q = np.random.default_rng(1).standard_normal((2, 1, 6, 32), dtype=np.float32)
    table = np.array([[4, 1], [0, 3]])
    pages = unpack_pages(vectors_of_keys(k, 8), vectors_of_values(v, 8))
    got, wanted = (
        rawattn.paged_attention(q, *given, table, seqlen_k=[20, 32]) for given in (pages, (k, v))
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.frameworks
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    k, v = rows(16, np.float16), rows(16, np.float16)
    caches = vectors_of_keys(k, 8), vectors_of_values(v, 8)
    got = unpack_pages(*(torch.from_numpy(x).bfloat16() for x in caches))
    for one, wanted in zip(got, (k, v), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, torch.from_numpy(wanted).bfloat16())


SHAPE = (5, 3, 8, 16, 8)
BAD: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
    ((5, 3, 64, 16), (5, 3, 64, 16), r"^k_cache: got shape \(5, 3, 64, 16\), expected \(num_pages"),
    (SHAPE, (5, 3, 64), r"^v_cache: got shape \(5, 3, 64\), expected"),
    (
        SHAPE,
        (5, 2, 64, 16),
        r"^v_cache: got \(num_pages, nheads_kv\) = \(5, 2\), expected \(5, 3\)",
    ),
    (SHAPE, (5, 3, 64, 15), r"^v_cache: got page_size = 15, expected 16"),
    (SHAPE, (5, 3, 4, 64, 8), r"^v_cache: got page_size = 32, expected 16"),
]


@pytest.mark.parametrize(("k", "v", "says"), BAD)
def test_mistakes(k: tuple[int, ...], v: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        unpack_pages(np.zeros(k, np.float16), np.zeros(v, np.float16))


def test_other_dtypes_and_no_arrays() -> None:
    k, v = np.zeros(SHAPE, np.float16), np.zeros((5, 3, 64, 16), np.float32)
    with pytest.raises(TypeError, match=r"^v_cache: got dtype float32, expected float16"):
        unpack_pages(k, v)
    with pytest.raises(TypeError, match=r"^k_cache: got list"):
        unpack_pages([1], v)
    for dtype in (object, str):
        with pytest.raises(
            TypeError, match=r"^k_cache: got dtype (object|<U1), expected one of num"
        ):
            unpack_pages(np.empty(SHAPE, dtype), np.empty(v.shape, dtype))
