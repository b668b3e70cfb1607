"""`rawattn.combine` on a GPU: frameworks, lists and stacked arrays, streams, graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn._verbs import fast_path
from tests.gpu.gate import closed, of_torch, still_closed
from tests.partials import DTYPES, FORMS, Call, Form, call_of, pieces

cupy = pytest.importorskip("cupy")
PLAIN = [Form(), Form(stacked=True), Form("seventy", 70, (1, 3, 2, 16), "bfloat16")]


def to_cupy(array: np.ndarray) -> Any:
    """Copies an array to the GPU with its strides, into memory that ends with its last element."""
    low = sum(min(s * (n - 1), 0) for s, n in zip(array.strides, array.shape, strict=True))
    high = sum(max(s * (n - 1), 0) for s, n in zip(array.strides, array.shape, strict=True))
    if array.size == 0:
        return cupy.ndarray(array.shape, array.dtype)
    first = array.__array_interface__["data"][0] + low
    at = first % 16
    raw = np.full(at + high - low + array.itemsize, 0xFF, np.uint8)
    np.ndarray(array.shape, array.dtype, raw, at - low, array.strides)[...] = array
    buffer = cupy.asarray(raw)
    return cupy.ndarray(array.shape, array.dtype, buffer.data + (at - low), array.strides)


def to_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    dense = torch.from_numpy(np.ascontiguousarray(array.view(f"i{array.itemsize}"))).cuda()
    return dense.view(getattr(torch, array.dtype.name))


def given(arrays: Any, convert: Any) -> Any:
    return [convert(x) for x in arrays] if isinstance(arrays, list) else convert(arrays)


def host(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if not isinstance(array, cupy.ndarray):
        array = cupy.from_dlpack(array.detach())
    words = cupy.ascontiguousarray(array.view(f"u{array.itemsize}"))
    return words.get().view(array.dtype)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_cupy(form: Form) -> None:
    call = call_of(form)
    out, lse = rawattn.combine(
        given(call.outs, to_cupy), given(call.lses, to_cupy), **call.options()
    )
    assert isinstance(out, cupy.ndarray)
    assert isinstance(lse, cupy.ndarray)
    call.check(host(out), host(lse))


@pytest.mark.parametrize("form", FORMS[::3], ids=str)
def test_numpy(form: Form) -> None:
    call = call_of(form)
    out, lse = rawattn.combine(call.outs, call.lses, **call.options())
    assert isinstance(out, np.ndarray)
    call.check(out, lse)


@pytest.mark.parametrize("form", PLAIN, ids=["list", "stacked", "seventy"])
def test_torch(form: Form) -> None:
    torch = pytest.importorskip("torch")
    call = call_of(form)
    outs, lses = given(call.outs, to_torch), given(call.lses, to_torch)
    out, lse = rawattn.combine(outs, lses)
    assert isinstance(out, torch.Tensor)
    assert out.device == lse.device == outs[0].device
    call.check(host(out), host(lse))
    target = torch.empty_like(out)
    assert rawattn.combine(outs, lses, out=target)[0] is target
    call.check(host(target), host(lse))


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    call = call_of(Form())
    device = jax.devices("gpu")[0]
    outs, lses = ([jax.device_put(x, device) for x in each] for each in (call.outs, call.lses))
    out, lse = rawattn.combine(outs, lses)
    assert isinstance(out, jax.Array)
    call.check(np.asarray(out), np.asarray(lse))


def test_out_of_numpy() -> None:
    call = call_of(Form(dtype="float32", result="float16"))
    target = np.empty(call.form.shape, np.float16)
    out, lse = rawattn.combine(call.outs, call.lses, out=target, **call.options())
    assert out is target
    call.check(out, lse)


def test_arrays_on_two_devices_are_refused() -> None:
    call = call_of(Form())
    outs = [to_cupy(x) for x in call.outs]
    with pytest.raises(ValueError, match=r"lses\[0\]: on the host, but outs\[0\] is on GPU 0"):
        rawattn.combine(outs, call.lses)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pieces_of_the_keys_are_all_of_them(dtype: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
        for shape in ((2, 130, 8, 64), (2, 900, 2, 64), (2, 900, 2, 128))
    )
    outs, lses = pieces(rawattn.attention, *map(to_cupy, (q, k, v)), [100, 333, 800])
    out, lse = rawattn.combine(outs, lses)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(host(out).astype(np.float64), exact, atol=tolerance)
    np.testing.assert_allclose(host(lse), exact_lse, atol=1e-4)


@pytest.mark.parametrize("form", PLAIN, ids=["list", "stacked", "seventy"])
def test_call_does_not_wait(form: Form) -> None:
    call = call_of(form)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        outs, lses = given(call.outs, to_cupy), given(call.lses, to_cupy)
        rawattn.combine(outs, lses)
        stream.synchronize()
        with closed(stream):
            results = rawattn.combine(outs, lses)
            assert still_closed(stream), "the call waited for work on the stream"
        call.check(*map(host, results))


def test_ordered_on_the_current_torch_stream() -> None:
    torch = pytest.importorskip("torch")
    call = call_of(Form())
    outs, lses = given(call.outs, to_torch), given(call.lses, to_torch)
    rawattn.combine(outs, lses)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        late = [torch.full_like(x, torch.nan) for x in outs]
        with closed(of_torch(side)):
            for array, values in zip(late, outs, strict=True):
                array.copy_(values)
            results = [x.clone() for x in rawattn.combine(late, lses)]
            for array in late:
                array.fill_(torch.nan)
        call.check(*map(host, results))


@pytest.mark.parametrize("form", [*PLAIN, Form(layout="mixed")], ids=str)
def test_cupy_graph(form: Form) -> None:
    """The graph owns the copies that a captured call makes."""
    call = call_of(form)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        outs, lses = given(call.outs, to_cupy), given(call.lses, to_cupy)
        rawattn.combine(outs, lses)
        stream.synchronize()
        stream.begin_capture()
        results = rawattn.combine(outs, lses)
        graph = stream.end_capture()
        others = [cupy.full(size, 165, np.uint8) for size in (512, 4096, 1 << 14, 1 << 16) * 20]
        graph.launch(stream)
        call.check(*map(host, results))
        assert all(bool((x == 165).all()) for x in others), "a replay wrote elsewhere"


def test_torch_graph() -> None:
    torch = pytest.importorskip("torch")
    call, other = call_of(Form()), call_of(Form(), seed=3)
    outs, lses = given(call.outs, to_torch), given(call.lses, to_torch)
    rawattn.combine(outs, lses)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = rawattn.combine(outs, lses)
    for case in (call, other):
        for arrays, values in ((outs, case.outs), (lses, case.lses)):
            for array, value in zip(arrays, values, strict=True):
                array.copy_(to_torch(value))
        graph.replay()
        torch.cuda.synchronize()
        Call(case.form, None, None, case.values, case.logs).check(*map(host, results))


@pytest.mark.parametrize("form", PLAIN[:2], ids=["list", "stacked"])
@pytest.mark.parametrize("convert", [to_cupy, to_torch], ids=["cupy", "torch"])
def test_plan(form: Form, convert: Any) -> None:
    call, other = call_of(form), call_of(form, seed=3)
    first, second = ((given(x.outs, convert), given(x.lses, convert)) for x in (call, other))
    made = rawattn.plan(rawattn.combine, *first)
    for case, arrays in ((call, first), (other, second)):
        results = made(*arrays)
        case.check(*map(host, results))
    assert made(*first)[0] is results[0]
    call.check(*map(host, made()))
    target = results[0].copy() if convert is to_cupy else results[0].clone()
    out, lse = made(*second, out=target)
    assert out is target
    other.check(host(out), host(lse))
    outs, lses = first
    fewer = outs[:2], lses[:2]
    with pytest.raises(ValueError, match="outs"):
        made(*fewer)


def test_plan_in_a_graph() -> None:
    call, other = call_of(Form()), call_of(Form(), seed=3)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        outs, lses = given(call.outs, to_cupy), given(call.lses, to_cupy)
        made = rawattn.plan(rawattn.combine, outs, lses)
        stream.begin_capture()
        results = made(outs, lses)
        graph = stream.end_capture()
        for case in (call, other):
            for arrays, values in ((outs, case.outs), (lses, case.lses)):
                for array, value in zip(arrays, values, strict=True):
                    array[...] = to_cupy(value)
            graph.launch(stream)
            case.check(*map(host, results))


def test_plans_that_would_copy_are_refused() -> None:
    for form in (Form(layout="sparse"), Form(layout="mixed"), FORMS[2]):
        call = call_of(form)
        with pytest.raises(ValueError, match=r"outs(\[0\])?: .* a plan allocates nothing"):
            rawattn.plan(rawattn.combine, given(call.outs, to_cupy), given(call.lses, to_cupy))


@pytest.mark.parametrize("convert", [to_cupy, to_torch], ids=["cupy", "torch"])
@pytest.mark.parametrize("form", PLAIN[:2], ids=["list", "stacked"])
def test_repeated_calls_have_arrays_of_their_own(
    form: Form, convert: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(form)
    made: list[Any] = []
    run = fast_path.dispatch.run
    monkeypatch.setattr(fast_path.dispatch, "run", lambda *x: made.append(x) or run(*x))
    for name in fast_path.closures_by_call:
        monkeypatch.setitem(fast_path.closures_by_call, name, {})

    def turned(arrays: Any, n: int) -> Any:
        """The same parts in another order, which must not change the result."""
        if isinstance(arrays, list):
            return given(arrays[n:] + arrays[:n], convert)
        return convert(np.roll(arrays, n, axis=0))

    for n in range(4):
        outs, lses = turned(call.outs, n % 2), turned(call.lses, n % 2)
        out, lse = rawattn.combine(outs, lses)
        assert type(out) is type(lse) is type(outs[0])
        call.check(host(out), host(lse))
    assert len(made) <= 2
    made.clear()
    target = convert(np.zeros(call.form.shape, host(out).dtype))
    for _ in range(3):
        target[...] = 0
        found, lse = rawattn.combine(outs, lses, out=target)
        assert found is target
        call.check(host(target), host(lse))
    assert len(made) == 1
    for wrong, match in (({"dtype": "int8"}, "^dtype"), ({"out": outs[0]}, "^out: ")):
        with pytest.raises((TypeError, ValueError), match=match):
            rawattn.combine(outs, lses, **wrong)
