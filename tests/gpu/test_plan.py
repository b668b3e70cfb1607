"""A plan gives the bits of a call, owns its memory, works in graphs of CuPy and torch, and follows lengths on the device."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import CuPy, Torch
from tests.gpu.gate import closed, still_closed
from tests.gpu.test_streams_graphs import _OTHER, arguments, bits
from tests.inputs import materialise
from tests.verify import layout

cupy = pytest.importorskip("cupy")
CUPY = CuPy()

_LENS_Q, _LENS_K = (100, 3, 64), (80, 200, 0)
_SLOTS = {"room_q": (120, 64, 64), "room_k": (160, 200, 64), "by_q": "seqlen", "by_k": "cu_seqlen"}
CASES = [
    dense("dense", 2, 200, 200, causal=True),
    dense("float32", 1, 90, 70, dtype="float32"),
    dense("shared", 1, 60, 8300),
    ragged("host", _LENS_Q, _LENS_K, **_SLOTS, causal=True),
    ragged("device", _LENS_Q, _LENS_K, **_SLOTS, on_device=True, tail=9),
    padded("device-padded", _LENS_Q, _LENS_K, 128, 256, on_device=True, max_seqlen=True),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def framework_of(name: str) -> Any:
    if name == "torch":
        pytest.importorskip("torch")
        return Torch("cuda")
    return CUPY


@each_case
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_same_bits_as_a_call(case: Case, name: str) -> None:
    framework = framework_of(name)
    call = arguments(materialise(case), case, framework)
    expected = bits(rawattn.attention(**call), framework)
    q, k, v = (call.pop(name) for name in "qkv")
    plan = rawattn.plan(rawattn.attention, q, k, v, **call)
    for result in (plan(q, k, v), plan(), plan(q, v=v, k=k)):
        assert bits(result, framework) == expected
    first, second = plan(q, k, v), plan(q, k, v)
    assert first[0] is second[0] and first[1] is second[1]


@each_case
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_planned_and_other_arrays_in_turns(case: Case, name: str) -> None:
    framework = framework_of(name)
    call = arguments(materialise(case), case, framework)
    q, k, v = (call.pop(name) for name in "qkv")
    other = arguments(materialise(replace(case, seed=9)), case, framework)["q"]
    expected = {id(x): bits(rawattn.attention(x, k, v, **call), framework) for x in (q, other)}
    assert expected[id(q)] != expected[id(other)]
    plan = rawattn.plan(rawattn.attention, q, k, v, **call)
    for first in (q, other, None, other, other, q, q):
        result = plan() if first is None else plan(first, k, v)
        assert bits(result, framework) == expected[id(q if first is None else first)]


@each_case
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_into_the_callers_own(case: Case, name: str) -> None:
    """A plan leaves the padding rows of a given `out` as they are, in the first such call and in later calls, which take the
    fast path."""
    framework = framework_of(name)
    full_like = cupy.full_like if framework is CUPY else pytest.importorskip("torch").full_like
    call = arguments(materialise(case), case, framework)
    expected = rawattn.attention(**call)[0]
    own = full_like(expected, 7)
    rawattn.attention(**{**call, "out": own})
    q, k, v = (call.pop(name) for name in "qkv")
    plan = rawattn.plan(rawattn.attention, q, k, v, **call)
    wanted = bits((own, rawattn.attention(q, k, v, **call)[1]), framework)
    for _ in range(3):
        plan()[1].fill_(7) if name == "torch" else plan()[1].fill(7)  # it must not show
        given = full_like(expected, 7)
        out, lse = plan(q, k, v, out=given)
        assert out is given
        assert bits((given, lse), framework) == wanted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_backward(name: str, deterministic: bool) -> None:
    framework = framework_of(name)
    case = replace(CASES[3], seed=3)
    call = arguments(materialise(case), case, framework)
    out, lse = rawattn.attention(**call)
    del call["return_lse"]
    q, k, v = (call.pop(name) for name in "qkv")
    arrays = (out, q, k, v, out, lse)
    expected = rawattn.attention_backward(*arrays, **call, deterministic=deterministic)
    plan = rawattn.plan(rawattn.attention_backward, *arrays, **call, deterministic=deterministic)
    for _ in range(3):
        gradients = plan(*arrays)
        assert isinstance(gradients, rawattn.Gradients)
        same = slice(0 if deterministic else 1, 3)  # else dq is summed in any order
        assert bits(gradients[same], framework) == bits(expected[same], framework)


def test_gradients_of_the_caller_and_of_the_plan() -> None:
    """Padding rows of gradients that the caller gives stay as they are. Those of the plan's own gradients are 0, whatever they
    held."""
    call = arguments(materialise(CASES[3]), CASES[3], CUPY)
    out, lse = rawattn.attention(**call)
    del call["return_lse"]
    q, k, v = (call.pop(name) for name in "qkv")
    arrays = (out, q, k, v, out, lse)
    expected = rawattn.attention_backward(*arrays, **call, deterministic=True)
    plan = rawattn.plan(rawattn.attention_backward, *arrays, **call, deterministic=True)
    for gradient in plan(*arrays)[:3]:
        gradient.fill(7)
    dk = cupy.full_like(k, 7)
    into = rawattn.Gradients(dq=cupy.full_like(q, 7), dk=cupy.full_like(k, 7))
    rawattn.attention_backward(*arrays, **call, deterministic=True, into=into)
    wanted = bits((expected.dq, into.dk, expected.dv), CUPY)
    for _ in range(3):
        gradients = plan(*arrays, into=rawattn.Gradients(dk=dk))
        assert gradients.dk is dk
        assert bits(gradients[:3], CUPY) == wanted
        for gradient in (gradients.dq, gradients.dv):
            gradient.fill(7)


@each_case
def test_a_call_allocates_nothing_and_waits_for_nothing(case: Case) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call = arguments(materialise(case), case, CUPY)
        q, k, v = (call.pop(name) for name in "qkv")
        plan = rawattn.plan(rawattn.attention, q, k, v, **call)
        plan(q, k, v)
        stream.synchronize()

        def refuse(nbytes: int) -> Any:
            raise AssertionError(f"{nbytes} bytes were allocated")

        with closed(stream), cupy.cuda.using_allocator(refuse):
            plan(q, k, v)
            assert still_closed(stream), "the call waited for work on the stream"


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_256_replays_while_lengths_grow(name: str) -> None:
    """A graph captured once follows lengths that grow in place on the device."""
    framework = framework_of(name)
    rng = np.random.default_rng(5)
    host = [rng.standard_normal((rows, 2, 64)).astype(np.float16) for rows in (3, 900, 900)]
    integers = {
        "seqstart_q": np.arange(4, dtype=np.int32),
        "seqstart_k": np.arange(0, 901, 300, dtype=np.int32),
        "seqlen_k": np.array([1, 2, 3], np.int32),
    }
    # These lengths are on the device too: known on the host they might choose other tiles, and so give other last bits.
    known = [
        rawattn.SeqLayout(
            **{name: cupy.asarray(x + step * (name == "seqlen_k")) for name, x in integers.items()}
        )
        for step in range(0, 256, 51)
    ]
    options = {"causal": True, "return_lse": True}
    expected = [
        bits(rawattn.attention(*map(cupy.asarray, host), seqs=seqs, **options), CUPY)
        for seqs in known
    ]
    arrays: list[Any] = [cupy.asarray(x) for x in host]
    if name == "torch":
        import torch

        arrays = [torch.from_numpy(x).cuda() for x in host]
    on_device = {key: framework.integers(x) for key, x in integers.items()}
    lengths = on_device["seqlen_k"]
    q, k, v = arrays
    plan = rawattn.plan(rawattn.attention, q, k, v, seqs=rawattn.SeqLayout(**on_device), **options)
    cupy.cuda.Device().synchronize()
    if name == "torch":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = plan(q, k, v)
        replay = graph.replay
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            result = plan(q, k, v)
            captured = stream.end_capture()

        def replay() -> None:
            captured.launch(stream)

    for step in range(256):
        replay()
        cupy.cuda.Device().synchronize()
        if step % 51 == 0:
            assert bits(result, framework) == expected[step // 51]
        lengths += 1
        cupy.cuda.Device().synchronize()


def test_other_integers_by_name() -> None:
    case = replace(CASES[5], max_seqlen=False)
    call = arguments(materialise(case), case, CUPY)
    q, k, v = (call.pop(name) for name in "qkv")
    plan = rawattn.plan(rawattn.attention, q, k, v, **call)
    other = materialise(replace(case, **_OTHER))
    assert set(other.integers) == {"seqlen_q", "cu_seqlen_k"} or set(other.integers) == {
        "seqlen_q",
        "seqlen_k",
    }
    on_device = {name: CUPY.integers(x) for name, x in other.integers.items()}
    seqs = layout(other, case, CUPY)
    expected = bits(rawattn.attention(q, k, v, **{**call, "seqs": seqs}), CUPY)
    for _ in range(3):
        assert bits(plan(q, k, v, **on_device), CUPY) == expected
    with pytest.raises(TypeError, match=r"^scale: this plan takes"):
        plan(q, k, v, scale=2.0)


def test_mistakes_are_told_before_a_launch() -> None:
    q, k, v = (cupy.ones((1, 40, 2, 64), np.float16) for _ in range(3))
    plan = rawattn.plan(rawattn.attention, q, k, v)
    with pytest.raises(ValueError, match=r"^k: got shape \(1, 39, 2, 64\)"):
        plan(q, k[:, 1:], v)
    with pytest.raises(ValueError, match=r"^q: .*dtype float32"):
        plan(q.astype(np.float32), k, v)
    with pytest.raises(TypeError, match=r"^v: got ndarray"):
        plan(q, k, v.get())
    with pytest.raises(TypeError, match="expected q, k, v"):
        plan(q, k, v, v)
    moved = cupy.ones(q.size + 1, np.float16)[1:].reshape(q.shape)
    with pytest.raises(ValueError, match="does not begin at a multiple"):
        plan(moved, k, v)
    with pytest.raises(ValueError, match="out: shares memory with q"):
        plan(q, k, v, out=q)
    with pytest.raises(ValueError, match=r"^k: its last axis is not dense"):
        rawattn.plan(rawattn.attention, q, cupy.ones((1, 40, 2, 128), np.float16)[..., ::2], v)


def test_memory_is_freed_with_the_plan() -> None:
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        q, k, v = (cupy.ones((1, 64, 4, 128), np.float16) for _ in range(3))
        k = v = cupy.ones((1, 16384, 4, 128), np.float16)
        rawattn.plan(rawattn.attention, q, k, v)()
        gc.collect()
        before = pool.used_bytes()
        for _ in range(5):
            plan = rawattn.plan(rawattn.attention, q, k, v)
            assert pool.used_bytes() > before
            plan()
            del plan
            gc.collect()
            assert pool.used_bytes() == before


def _scored(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arrays of options for 4 heads, 200 queries and 200 keys."""
    return {
        "bias": rng.standard_normal((1, 4, 200, 200)).astype(np.float16),
        "mask": rng.random((1, 1, 200, 200)) > 0.3,
        "alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32),
        "sink_logits": np.array([1.0, -1.0, 0.5, 0.0], np.float32),
        "seed": np.array([5]),
    }


@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("option", ["bias", "mask", "alibi_slopes", "sink_logits", "seed"])
def test_arrays_of_options(option: str, name: str) -> None:
    """A plan uses the option's array of planning time, another one given by name, and new values written in place."""
    framework = framework_of(name)
    rng = np.random.default_rng(0)
    given = {key: framework.integers(x) for key, x in _scored(rng).items()}
    other = framework.integers({**_scored(rng), "seed": np.array([6])}[option])
    if option == "mask":
        other[..., 7:20] = False
    elif option not in ("bias", "seed"):
        other += 1
    x = (rng.standard_normal((3, 1, 200, 4, 64)) / 2).astype(np.float16)
    q, k, v = (framework.integers(each) for each in x)
    options: dict[str, Any] = {option: given[option], "softcap": 5.0, "return_lse": True}
    if option == "seed":
        options["dropout_p"] = 0.3
    first = bits(rawattn.attention(q, k, v, **options), framework)
    second = bits(rawattn.attention(q, k, v, **{**options, option: other}), framework)
    assert first != second
    plan = rawattn.plan(rawattn.attention, q, k, v, **options)
    assert bits(plan(q, k, v), framework) == first
    assert bits(plan(q, k, v, **{option: other}), framework) == second
    assert bits(plan(), framework) == first
    given[option][...] = other
    assert bits(plan(), framework) == second


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_seed_on_the_host_is_that_of_planning_time(name: str) -> None:
    framework = framework_of(name)
    x = np.random.default_rng(0).standard_normal((3, 1, 90, 2, 64)).astype(np.float16)
    q, k, v = (framework.integers(each) for each in x)
    options: dict[str, Any] = {"dropout_p": 0.5, "seed": 2**63 + 5, "return_lse": True}
    expected = bits(rawattn.attention(q, k, v, **options), framework)
    plan = rawattn.plan(rawattn.attention, q, k, v, **options)
    assert bits(plan(q, k, v), framework) == expected
    assert bits(rawattn.attention(q, k, v, **{**options, "seed": 5}), framework) != expected


def test_gradients_of_arrays_of_options() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 1, 200, 4, 64)) / 2).astype(np.float16)
    q, k, v = map(cupy.asarray, x)
    scored = _scored(rng)
    options = {key: cupy.asarray(scored[key]) for key in ("bias", "sink_logits")}
    out, lse = rawattn.attention(q, k, v, **options, return_lse=True)
    arrays = (out, q, k, v, out, lse)
    options["deterministic"] = True
    expected = rawattn.attention_backward(*arrays, **options)
    plan = rawattn.plan(rawattn.attention_backward, *arrays, **options)
    for _ in range(2):
        gradients = plan()
        for each in ("dq", "dk", "dv", "dbias", "dsink_logits"):
            got, exact = (getattr(given, each) for given in (gradients, expected))
            assert got.get().tobytes() == exact.get().tobytes(), each


def _second_gpu(name: str) -> Any:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    framework_of(name)
    return Torch("cuda:1") if name == "torch" else CUPY


@each_case
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_planned_while_another_gpu_is_current(case: Case, name: str) -> None:
    framework = _second_gpu(name)
    with cupy.cuda.Device(1):
        call = arguments(materialise(case), case, framework)
        expected = bits(rawattn.attention(**call), framework)
    q, k, v = (call.pop(name) for name in "qkv")
    assert cupy.cuda.runtime.getDevice() == 0
    plan = rawattn.plan(rawattn.attention, q, k, v, **call)
    assert cupy.cuda.runtime.getDevice() == 0
    for given in ((), (q, k, v)):
        results = plan(*given)
        assert cupy.cuda.runtime.getDevice() == 0
        for x in results:
            assert (x.get_device() if name == "torch" else x.data.device_id) == 1
        with cupy.cuda.Device(1):
            assert bits(results, framework) == expected


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_backward_planned_while_another_gpu_is_current(name: str) -> None:
    framework = _second_gpu(name)
    case = CASES[0]
    with cupy.cuda.Device(1):
        call = arguments(materialise(case), case, framework)
        out, lse = rawattn.attention(**call)
        del call["return_lse"]
        call |= {"deterministic": True}
        arrays = (out, *(call.pop(name) for name in "qkv"), out, lse)
        expected = bits(rawattn.attention_backward(*arrays, **call)[:3], framework)
    plan = rawattn.plan(rawattn.attention_backward, *arrays, **call)
    gradients = plan()[:3]
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        assert bits(gradients, framework) == expected
