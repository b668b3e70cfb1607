"""Keys and values in pages of 8 bits on the CPU and in the reference: scales of all kinds, what is refused, plans."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import append_kv, paged_attention, reference
from rawattn._call import scales
from rawattn._interop import arrays, dlpack
from tests import exhaustive
from tests.append import appended
from tests.paged import BFLOAT16, FLOAT8, OPTIONS, Paged, paged, verify
from tests.random_pages import random_pages

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
LENS = (70, 3, 0, 129)


def verify_both(call: Paged, **options: Any) -> None:
    """Checks the CPU backend within tolerance, and that `reference.paged_attention` equals `reference.attention`."""
    given = {**call.lengths, **call.scales, **options, "return_lse": True}
    out, lse = paged_attention(*call.inputs, **given, backend="cpu")
    assert out.dtype == call.q.dtype
    verify(call, out, lse, **options)
    exact, _ = reference.paged_attention(*call.inputs, **given)
    inputs, layout = call.without_pages()
    wanted = reference.attention(*inputs, **layout, **options)
    np.testing.assert_array_equal(exact.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
@pytest.mark.parametrize("dtype", [BFLOAT16, F16, F32], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 24, 1000])
def test_pages(page_size: int, dtype: Any, float8: str) -> None:
    knobs = {"heads": (6, 2), "heads_first": page_size == 24, "pair": page_size == 1}
    call = paged(LENS, page_size, rows=3, dtype=dtype, float8=float8, **knobs)
    verify_both(call, causal=True)
    verify_both(call, window=(17, 0), sink=2)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_scores(name: str) -> None:
    verify_both(paged((150, 33, 0), 16, rows=9, float8="arrays"), **OPTIONS[name])


@pytest.mark.parametrize("seed", exhaustive.thin(range(30), 4))
def test_random(seed: int) -> None:
    call, options, *_ = random_pages(seed)
    verify_both(call, **options)


def test_scales_that_overflow_raise_nothing() -> None:
    call = paged(LENS, 16, float8="plain")
    with np.errstate(all="raise"):
        paged_attention(*call.inputs, **call.lengths, k_scale=3e38, v_scale=1e-38, backend="cpu")


def test_one_scale_of_each_kind() -> None:
    """One of k and v alone may have a scale, given as a number of any type or as an array, also a strided view."""
    call = paged(LENS, 16, float8="arrays", heads=(4, 2))
    exact = reference.paged_attention(*call.inputs, **call.lengths, k_scale=2.0)
    for k_scale in (
        2,
        2.0,
        np.float32(2),
        np.float64(2),
        ml_dtypes.bfloat16(2),
        np.array(2, F32),
        np.full(2, 2, F32),
    ):
        out = paged_attention(*call.inputs, **call.lengths, k_scale=k_scale, backend="cpu")
        np.testing.assert_allclose(out.astype(F32), exact, atol=0.02, rtol=0.02)
    wide = np.arange(1, 9, dtype=F32)
    out = paged_attention(*call.inputs, **call.lengths, v_scale=wide[::4], backend="cpu")
    exact = reference.paged_attention(*call.inputs, **call.lengths, v_scale=wide[::4].copy())
    np.testing.assert_allclose(out.astype(F32), exact, atol=0.05, rtol=0.02)


CALL = paged((40, 20), 16, heads=(4, 2), float8="plain")
WIDE = paged((40, 20), 16, heads=(4, 2))
E5M2 = CALL.k_pages.view(ml_dtypes.float8_e5m2)
FNUZ = CALL.k_pages.view(ml_dtypes.float8_e4m3fnuz)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k_scale": 0.0}, ValueError, "k_scale: got 0.0 (float), expected a finite number above 0"),
    ({"v_scale": -1}, ValueError, "v_scale: got -1 (int), expected a finite number above 0"),
    ({"v_scale": 1e-60}, ValueError, "v_scale: got 1e-60"),
    ({"v_scale": 1e60}, ValueError, "v_scale: got 1e+60"),
    ({"v_scale": float("nan")}, ValueError, "v_scale: got nan"),
    ({"k_scale": 1e-50}, ValueError, "k_scale: got 1e-50 (float), which is 0.0 in float32, expected"),
    ({"k_scale": "1"}, TypeError, "k_scale: got '1' (str), expected a finite number above 0"),
    ({"k_scale": True}, TypeError, "k_scale: got True (bool)"),
    ({"k_scale": [1.0, 1.0]}, TypeError, "k_scale: got [1.0, 1.0] (list)"),
    ({"k_scale": np.ones(3, F32)}, ValueError, "k_scale: got shape (3,), expected (nheads_kv,) = (2,)"),
    ({"k_scale": np.ones((1, 2), F32)}, ValueError, "k_scale: got shape (1, 2)"),
    ({"k_scale": np.ones(2)}, TypeError, "k_scale: got dtype float64, expected float32; convert it, as by k_scale.astype"),
    ({"k_scale": np.array(-1, F32)}, ValueError, "k_scale: got -1.0 (float), expected a finite number above 0"),
    ({"k_scale": np.array([1, 0], F32)}, ValueError, "k_scale: got 0.0 at [1], expected finite numbers above 0"),
    ({"v_scale": np.array([1, np.inf], F32)}, ValueError, "v_scale: got inf at [1]"),
    ({"k_pages": WIDE.k_pages}, TypeError, "v_pages: got dtype float8_e4m3fn, expected bfloat16, that of k_pages"),
    ({"v_pages": WIDE.v_pages}, TypeError, "v_pages: got dtype bfloat16, expected float8_e4m3fn, that of k_pages"),
    ({"k_pages": E5M2}, NotImplementedError, "k_pages: got dtype float8_e5m2, expected float8_e4m3fn, or bfloat16"),
    ({"v_pages": FNUZ}, NotImplementedError, "v_pages: got dtype float8_e4m3fnuz, expected float8_e4m3fn"),
    ({"q": CALL.q.astype(FLOAT8)}, TypeError, "q: got dtype float8_e4m3fn, expected float16, bfloat16 or float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "says"), WRONG, ids=[says[:50] for *_, says in WRONG])
def test_refused(change: dict[str, Any], error: type[Exception], says: str) -> None:
    given = {**CALL.named, **CALL.lengths, "backend": "cpu"}
    paged_attention(**given)
    with pytest.raises(error) as caught:
        paged_attention(**{**given, **change})
    assert str(caught.value).startswith(says)


def test_plans_check_scales_of_the_host() -> None:
    given = {"k_scale": np.ones(2, F32), "v_scale": np.ones(2, F32)}
    bad, new = np.array([1, np.nan], F32), appended((7, 9), 16, float8="plain", heads=(2, 2))
    made = rawattn.plan(paged_attention, *CALL.inputs, **CALL.lengths, **given, backend="cpu")
    pages = (new.k, new.v, *new.pools(), new.pages.block_table)
    append = rawattn.plan(append_kv, *pages, seqlen_k=new.pages.seqlen_k, **given)
    for each in (made, append):
        with pytest.raises(ValueError, match=r"^v_scale: got nan at \[1\], expected finite"):
            each(v_scale=bad)
        for wrong in (2.0, [1.0, 1.0], "a"):
            got = re.escape(f"k_scale: got {wrong!r} ({type(wrong).__name__}), expected an array")
            with pytest.raises(
                TypeError, match=rf"^{got}: the plan is for shape \(2,\), dtype float32"
            ):
                each(k_scale=wrong)
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"^k_scale: got nan at \[1\], expected finite"):
        paged_attention(*CALL.inputs, **CALL.lengths, k_scale=torch.from_numpy(bad))


@pytest.mark.parametrize("scale", [2.0, np.ones(2, F32)], ids=["number", "array"])
def test_scales_of_pages_that_are_not_of_8_bits(scale: Any) -> None:
    says = r"^v_scale: got it with v_pages that are not float8_e4m3fn"
    with pytest.raises(ValueError, match=says):
        paged_attention(*WIDE.inputs, **WIDE.lengths, v_scale=scale, backend="cpu")
    with pytest.raises(ValueError, match=says):
        reference.paged_attention(*WIDE.inputs, **WIDE.lengths, v_scale=scale)
    call = appended((9, 4), 4, heads=(4, 2))
    pools, table = call.pools(), call.pages.block_table
    with pytest.raises(ValueError, match=says):
        append_kv(call.k, call.v, *pools, table, seqlen_k=call.pages.seqlen_k, v_scale=scale)


def test_append_refuses() -> None:
    call = appended((9, 4), 4, heads=(4, 2), float8="plain")
    k_pages, v_pages = call.pools()
    table, lengths = call.pages.block_table, {"seqlen_k": call.pages.seqlen_k}
    with pytest.raises(TypeError, match=r"^v_pages: got dtype bfloat16, expected float8_e4m3fn"):
        append_kv(call.k, call.v, k_pages, v_pages.astype(BFLOAT16), table, **lengths)
    with pytest.raises(NotImplementedError, match=r"^k_pages: got dtype float8_e5m2"):
        append_kv(call.k, call.v, k_pages.view(ml_dtypes.float8_e5m2), v_pages, table, **lengths)
    with pytest.raises(TypeError, match=r"^k: got dtype float8_e4m3fn, expected float16"):
        append_kv(call.k.astype(FLOAT8), call.v, k_pages, v_pages, table, **lengths)


def test_attention_has_no_8_bits() -> None:
    q = np.zeros((1, 2, 1, 8), FLOAT8)
    with pytest.raises(TypeError, match=r"^q: got dtype float8_e4m3fn, expected float16, bfloat16"):
        rawattn.attention(q, q, q)


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("float8", ["plain", "numbers", "arrays"])
@pytest.mark.parametrize("dtype", [BFLOAT16, F32], ids=str)
def test_append(dtype: Any, float8: str, rotary_dim: int) -> None:
    call = appended((9, 1, 24, 3), 4, rotary_dim=rotary_dim, dtype=dtype, float8=float8)
    k_pages, v_pages = call.pools()
    given = {"seqlen_k": call.pages.seqlen_k, "q": call.q, **call.options}
    out = append_kv(call.k, call.v, k_pages, v_pages, call.pages.block_table, **given)
    call.verify(k_pages, v_pages, out)


def test_what_does_not_fit_is_the_largest_number() -> None:
    call = appended((4,), 4, rows=4, dtype=F32, heads=(1, 1), dims=(8, 8), float8="plain")
    rows = np.array([448, 449, 464, 1e9, np.inf, -np.inf, np.nan, 2.0**-11], F32)
    call = replace(call, k=np.broadcast_to(rows, call.k.shape).copy(), v=call.v * 1e5)
    k_pages, v_pages = call.pools()
    append_kv(call.k, call.v, k_pages, v_pages, call.pages.block_table, seqlen_k=[4])
    wanted = [448, 448, 448, 448, 448, -448, np.nan, 0]
    page = int(call.pages.block_table[0, 0])
    np.testing.assert_array_equal(k_pages[page, 0, 0].astype(F32), wanted)
    assert np.all(np.abs(v_pages[page].astype(F32)) == 448)


def test_plan() -> None:
    """A plan takes arrays of scales at each call. Scales that are numbers stay as they were when planning."""
    call = paged(LENS, 16, rows=2, dtype=F32, float8="arrays")
    made = rawattn.plan(
        paged_attention, *call.inputs, **call.lengths, **call.scales, return_lse=True, backend="cpu"
    )
    verify(call, *made())
    other = paged(LENS, 16, rows=2, dtype=F32, float8="arrays", seed=1)
    verify(other, *made(*other.inputs, other.k_scale, other.v_scale))
    verify(other, *made(*other.inputs, k_scale=other.k_scale, v_scale=other.v_scale))
    numbers = paged(LENS, 16, rows=2, dtype=F32, float8="numbers")
    made = rawattn.plan(
        paged_attention, *numbers.inputs, **numbers.lengths, **numbers.scales, return_lse=True, backend="cpu"
    )  # fmt: skip
    verify(numbers, *made(*numbers.inputs))
    with pytest.raises(TypeError, match=r"^k_scale: this plan takes"):
        made(*numbers.inputs, k_scale=2.0)
    new = appended((9, 1, 24, 3), 4, rotary_dim=8, dtype=F32, float8="arrays")
    given = (new.k, new.v, *new.pools(), new.pages.block_table)
    lengths = {"seqlen_k": new.pages.seqlen_k}
    planned = rawattn.plan(append_kv, *given, **lengths, q=new.q, **new.options)
    out = planned(*given)
    new.verify(given[2], given[3], out)


def test_a_pool_in_and_out_of_capsules() -> None:
    array = np.arange(24, dtype=np.uint8).view(FLOAT8).reshape(2, 3, 4)
    tensor = dlpack.read(dlpack.write(array, max_version=dlpack.MAX_VERSION))
    view = dlpack.host_view(tensor)
    assert view.dtype == FLOAT8
    assert view.ctypes.data == array.ctypes.data
    assert view.tobytes() == array.tobytes()
    assert arrays.import_array("k_pages", array).array is array


@pytest.mark.frameworks
def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    call = paged(LENS, 16, rows=2, dtype=F32, float8="arrays")
    q, table, lengths, k_scale, v_scale = map(
        torch.from_numpy, (call.q, call.block_table, call.seqlen_k, call.k_scale, call.v_scale)
    )
    pools = [
        torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
        for x in (call.k_pages, call.v_pages)
    ]
    given = {"seqlen_k": lengths, "k_scale": k_scale, "v_scale": v_scale}
    out, lse = paged_attention(q, *pools, table, **given, return_lse=True, backend="cpu")
    assert isinstance(out, torch.Tensor)
    verify(call, out.numpy(), lse.numpy())
    new = appended((9, 1, 24, 3), 4, dtype=F32, float8="plain")
    pools = [torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn) for x in new.pools()]
    k, v, table, lengths = map(
        torch.from_numpy, (new.k, new.v, new.pages.block_table, new.pages.seqlen_k)
    )
    append_kv(k, v, *pools, table, seqlen_k=lengths, backend="cpu")
    new.verify(*(x.view(torch.uint8).numpy().view(FLOAT8) for x in pools), None)


@pytest.mark.frameworks
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_formats_of_other_frameworks(framework: str, dtype: str) -> None:
    """Formats of 8 bits that no kernel reads are refused alike, whatever library the pages come from."""
    bits = [x.view(np.uint8) for x in (CALL.k_pages, CALL.v_pages)]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        pools = [torch.from_numpy(x).view(getattr(torch, dtype)) for x in bits]
    else:
        jax = pytest.importorskip("jax")
        pools = [jax.numpy.asarray(x.view(getattr(ml_dtypes, dtype))) for x in bits]
    says = f"^k_pages: got dtype {dtype}, expected float8_e4m3fn, or bfloat16, that of q"
    with pytest.raises(NotImplementedError, match=says):
        paged_attention(CALL.q, *pools, CALL.block_table, **CALL.lengths, backend="cpu")


@pytest.mark.frameworks
def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    call = paged(LENS, 16, rows=2, dtype=F32, float8="arrays")
    inputs = [jax.numpy.asarray(x) for x in call.inputs]
    given = {**call.lengths, **call.scales}
    out, lse = paged_attention(*inputs, **given, return_lse=True, backend="cpu")
    verify(call, np.asarray(out), np.asarray(lse))


def test_quantised_is_what_ml_dtypes_rounds() -> None:
    rows = np.random.default_rng(0).standard_normal((100, 2, 8)).astype(F32) * 30
    scale = np.array([[0.1], [0.37]], F32)
    wanted = np.clip(rows / scale, -448, 448).astype(FLOAT8)
    with np.errstate(all="ignore"):
        assert scales.quantised(rows, scale).tobytes() == wanted.tobytes()
