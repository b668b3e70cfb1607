"""Work runs on the caller's stream, waits for nothing, and can be captured and replayed."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn._kernels.sm90 import stream_k
from rawattn._kernels.sm90.forward import ALIGN_SEQLEN
from tests.cases import Case, dense, padded, ragged
from tests.frameworks import CuPy, Jax, Torch
from tests.gpu.gate import closed, of_torch, still_closed
from tests.inputs import Inputs, materialise
from tests.tolerance import check, low_precision_attention
from tests.verify import layout

cupy = pytest.importorskip("cupy")
CUPY = CuPy()

_LENS_Q, _LENS_K = (100, 3, 64), (80, 200, 0)
_SLOTS = {"room_q": (120, 64, 64), "room_k": (160, 200, 64), "by_q": "seqlen", "by_k": "cu_seqlen"}
_ON_DEVICE = {**_SLOTS, "on_device": True}
CASES = [
    dense("dense", 2, 200, 200, causal=True),
    ragged("host", _LENS_Q, _LENS_K, **_SLOTS, causal=True),
    ragged("device", _LENS_Q, _LENS_K, **_ON_DEVICE, tail=9),
    ragged("device-max", _LENS_Q, _LENS_K, **_ON_DEVICE, max_seqlen=True, causal=True),
    padded("device-padded", _LENS_Q, _LENS_K, 128, 256, on_device=True, max_seqlen=True),
    dense("unaligned", 1, 60, ALIGN_SEQLEN + 40, headdim=20),
    dense("shared", 1, 60, stream_k.ALWAYS_KEYS + 40),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def arguments(inputs: Inputs, case: Case, framework: Any) -> dict[str, Any]:
    arrays = {name: framework.array(getattr(inputs, name)) for name in "qkv"}
    return {**arrays, "seqs": layout(inputs, case, framework), **inputs.options, "return_lse": True}


def bits(results: Any, framework: Any) -> list[bytes]:
    return [framework.host(x).tobytes() for x in results]


@each_case
@pytest.mark.parametrize("fresh", [False, True], ids=["known", "fresh-lengths"])
def test_call_does_not_wait(case: Case, fresh: bool) -> None:
    """A call waits neither for its stream nor for lengths on the GPU, known to the library or new to it."""
    inputs = materialise(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call = arguments(inputs, case, CUPY)
        expected = bits(rawattn.attention(**call), CUPY)
        if fresh:
            call["seqs"] = layout(inputs, case, CUPY)
        stream.synchronize()
        with closed(stream):
            results = rawattn.attention(**call)
            assert still_closed(stream), "the call waited for work on the stream"
        assert bits(results, CUPY) == expected


def test_torch_call_does_not_wait() -> None:
    torch = pytest.importorskip("torch")
    framework = Torch("cuda")
    case = CASES[3]
    inputs = materialise(case)
    side = torch.cuda.Stream()
    stream = of_torch(side)
    with torch.cuda.stream(side):
        call = arguments(inputs, case, framework)
        expected = bits(rawattn.attention(**call), framework)
        side.synchronize()
        with closed(stream):
            results = rawattn.attention(**call)
            assert still_closed(stream), "the call waited for work on the stream"
        assert bits(results, framework) == expected


def _nan(array: Any) -> Any:
    nan = cupy.empty_like(array)
    nan.view(f"u{array.itemsize}").fill(
        (1 << 8 * array.itemsize) - 1
    )  # all bits set, in any floating dtype
    return nan


@each_case
def test_ordered_on_the_current_cupy_stream(case: Case) -> None:
    """The call reads inputs written just before it, and its results are there for work just after it."""
    call = arguments(materialise(case), case, CUPY)
    expected = bits(rawattn.attention(**call), CUPY)
    late = {name: call[name].copy() for name in "qkv"}
    stale = {name: _nan(call[name]) for name in "qkv"}
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        current = {name: array.copy() for name, array in stale.items()}
        with closed(stream):
            for name, array in current.items():
                cupy.copyto(array, late[name])
            results = [x.copy() for x in rawattn.attention(**{**call, **current})]
            for name, array in current.items():
                cupy.copyto(array, stale[name])
        assert bits(results, CUPY) == expected


@each_case
def test_ordered_on_the_current_torch_stream(case: Case) -> None:
    torch = pytest.importorskip("torch")
    framework = Torch("cuda")
    call = arguments(materialise(case), case, framework)
    expected = bits(rawattn.attention(**call), framework)
    stale = {name: torch.full_like(call[name], torch.nan) for name in "qkv"}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        current = {name: array.clone() for name, array in stale.items()}
        with closed(of_torch(side)):
            for name, array in current.items():
                array.copy_(call[name])
            results = [x.clone() for x in rawattn.attention(**{**call, **current})]
            for name, array in current.items():
                array.copy_(stale[name])
        assert bits(results, framework) == expected


def test_ordered_with_jax() -> None:
    """JAX does not expose its streams: inputs may still be being computed, and results may be used at once."""
    jax = pytest.importorskip("jax")
    framework = Jax("gpu")
    case = dense("jax", 2, 300, 300, causal=True, dtype="float32", nheads_q=4)
    call = arguments(materialise(case), case, framework)
    exact = framework.host(rawattn.attention(**call)[0])

    @jax.jit
    def slowly(x: Any, noise: Any) -> Any:
        for _ in range(8):
            noise = noise @ noise
        return x + 0 * noise[0, 0]

    noise = jax.numpy.zeros((2048, 2048))
    for _ in range(20):
        late = {name: slowly(call[name], noise) for name in "qkv"}
        out, _ = rawattn.attention(**{**call, **late})
        again = jax.jit(lambda x: x + 0)(out)
        del out, late
        np.testing.assert_array_equal(framework.host(again), exact)


def test_same_bits_under_load() -> None:
    cases = [
        ragged(
            "bits", (900, 30, 0, 257), (900, 500, 64, 300), nheads_q=8, headdim=128, causal=True
        ),
        dense("bits", 2, 700, 700, nheads_q=8, dtype="float16", window=(100, 20), sink=4),
        dense("bits", 1, 500, 500, nheads_q=4, dtype="float32", headdim=96),
        dense("bits", 1, 500, stream_k.ALWAYS_KEYS + 9, nheads_q=3, nheads_kv=3, headdim=128),
    ]
    load = cupy.cuda.Stream(non_blocking=True)
    noise = cupy.ones((4096, 4096), np.float16)
    for case in cases:
        call = arguments(materialise(case), case, CUPY)
        first = rawattn.attention(**call)
        different = cupy.zeros((), np.int64)
        for _ in range(100):
            with load:
                cupy.matmul(noise, noise)
            again = rawattn.attention(**call)
            for a, b in zip(first, again, strict=True):
                word = f"u{a.itemsize}"
                different += cupy.count_nonzero(a.view(word) != b.view(word))
        load.synchronize()
        assert int(different) == 0, f"{case}: {int(different)} elements differ over 100 runs"


def test_a_new_thread_that_only_launches() -> None:
    """A cached call into the caller's `out` works in a new thread, which has no CUDA context: the launch is the call's only
    request to CUDA."""
    q, k, v = (cupy.random.standard_normal((1, 70, 2, 64), dtype=np.float32) for _ in range(3))
    expected = rawattn.attention(q, k, v)
    out = cupy.full_like(expected, np.nan)
    rawattn.attention(q, k, v, out=out)
    out.fill(np.nan)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            rawattn.attention(q, k, v, out=out)
        except BaseException as error:
            failed.append(error)

    cupy.cuda.get_current_stream().synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert np.array_equal(out.get(), expected.get())


def test_threads_with_their_own_streams() -> None:
    calls = [arguments(materialise(case), case, CUPY) for case in CASES]
    expected = [bits(rawattn.attention(**call), CUPY) for call in calls]
    wrong: list[str] = []

    def work(thread: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for n in range(25):
                which = (thread + n) % len(calls)
                if bits(rawattn.attention(**calls[which]), CUPY) != expected[which]:
                    wrong.append(str(CASES[which]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What a replay reads instead: other values and, where lengths are on the GPU, other lengths that fit the same arrays.
_OTHER = {"lens_q": (5, 64, 33), "lens_k": (160, 0, 9), "seed": 7}


def _refresh(call: dict[str, Any], case: Case, write: Any) -> tuple[Inputs, dict[str, Any]]:
    """Writes another call's values into the arrays of this one, and returns that call's inputs."""
    other = replace(case, **(_OTHER if case.on_device else {"seed": 7}))
    inputs = materialise(other)
    for name in "qkv":
        write(call[name], getattr(inputs, name).view())
    if case.on_device:
        for name, values in inputs.integers.items():
            write(getattr(call["seqs"], name), values)
    options = {**inputs.options, "seqs": layout(inputs)}
    return inputs, options


def _check(out: np.ndarray, inputs: Inputs, options: dict[str, Any], what: str) -> None:
    arrays = [array.view() for array in (inputs.q, inputs.k, inputs.v)]
    exact = reference.attention(*arrays, **options)
    low, _ = low_precision_attention(*arrays, **options)
    rows = inputs.rows
    check(out[rows], exact[rows], tuple(x[rows] for x in low), what=what)
    assert not np.any(out[~rows].astype(np.float32)), f"{what}: padding rows are not 0"


# Without max_seqlen: the replays have longer sequences than the captured call, whose maximum they would exceed.
CAPTURED = [replace(case, max_seqlen=False) for case in CASES]


@pytest.mark.parametrize("case", CAPTURED, ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["warm", "first-call-of-its-shape"])
def test_cupy_graph(case: Case, known: bool) -> None:
    inputs = materialise(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call = arguments(inputs, case, CUPY)
        rawattn.attention(**call)
        if not known:  # its kernels are loaded, the call itself is new
            call["seqs"] = layout(inputs, case, CUPY)
        stream.synchronize()
        stream.begin_capture()
        out, _ = rawattn.attention(**call)
        graph = stream.end_capture()
        graph.launch(stream)
        _check(out.get(), inputs, {**inputs.options, "seqs": layout(inputs)}, "first replay")

        # A replay may write only memory that the graph owns: arrays allocated now must stay as they are.
        others = [cupy.full(size, 165, np.uint8) for size in (64, 512, 1024, 4096, 1 << 16) * 20]
        inputs, options = _refresh(call, case, lambda array, values: array.set(values))
        graph.launch(stream)
        _check(out.get(), inputs, options, "replay with other values")
        assert all(bool((other == 165).all()) for other in others), "a replay wrote elsewhere"


def test_cupy_graph_of_arrays_that_are_copied() -> None:
    """The graph owns its copies of arrays whose last axis is not dense: later allocations get other memory."""
    rng = np.random.default_rng(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = [cupy.zeros((1, 200, 2, 128), np.float16)[..., ::2] for _ in range(3)]
        rawattn.attention(*given)
        stream.synchronize()
        stream.begin_capture()
        out = rawattn.attention(*given)
        graph = stream.end_capture()
        others = [cupy.full(size, 165, np.uint8) for size in (512, 4096, 1 << 15, 51200) * 20]
        for _ in range(2):
            values = [rng.standard_normal((1, 200, 2, 64)).astype(np.float16) for _ in given]
            for array, x in zip(given, values, strict=True):
                array[...] = cupy.asarray(x)
            graph.launch(stream)
            np.testing.assert_allclose(out.get(), reference.attention(*values), atol=2e-3)
        assert all(bool((other == 165).all()) for other in others), "a replay wrote elsewhere"


def test_a_decoded_call_is_one_node() -> None:
    """A decoding call is one node of a graph: its counters are zero when it is captured, and each replay leaves them zero."""
    import ctypes

    q, k = (cupy.ones((2, rows, 4, 64), np.float16) for rows in (1, 4096))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = rawattn.attention(q, k, k).get()
        stream.begin_capture()
        out = rawattn.attention(q, k, k)
        graph = stream.end_capture()
        nodes = ctypes.c_size_t()
        driver = ctypes.CDLL("libcuda.so.1")
        assert not driver.cuGraphGetNodes(ctypes.c_void_p(graph.graph), None, ctypes.byref(nodes))
        assert nodes.value == 1
        for _ in range(3):
            out.fill(0)
            graph.launch(stream)
            np.testing.assert_array_equal(out.get(), expected)


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_torch_graph(case: Case) -> None:
    torch = pytest.importorskip("torch")
    framework = Torch("cuda")
    inputs = materialise(case)
    call = arguments(inputs, case, framework)
    rawattn.attention(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = rawattn.attention(**call)
    graph.replay()
    _check(framework.host(out), inputs, {**inputs.options, "seqs": layout(inputs)}, "first replay")

    others = [torch.full((1 << 14,), 165, dtype=torch.uint8, device="cuda") for _ in range(50)]

    def write(array: Any, values: np.ndarray) -> None:
        if isinstance(array, cupy.ndarray):  # the layout's view of a tensor's memory
            array.set(values.astype(array.dtype))
        else:
            source = values.view(np.int16) if values.dtype.name == "bfloat16" else values
            tensor = torch.from_numpy(source.copy()).cuda()
            array.copy_(tensor.view(array.dtype) if tensor.dtype == torch.int16 else tensor)

    inputs, options = _refresh(call, case, write)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    _check(framework.host(out), inputs, options, "replay with other values")
    assert all(bool((other == 165).all()) for other in others), "a replay wrote elsewhere"
