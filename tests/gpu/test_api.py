"""The public call on the GPU: frameworks, devices, mistakes, and integers that are not checked."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.bad_calls import BAD_CALLS, Bad, check_refused, good_call
from tests.cases import Case, dense, ragged
from tests.curated_cases import curated
from tests.frameworks import CuPy, Framework, Jax, NumPy, Torch
from tests.inputs import materialise
from tests.memory import CANARY, strided
from tests.tiles import tensor_stores
from tests.verify import run, verify

cupy = pytest.importorskip("cupy")
CUPY = CuPy()
EXCHANGED = [
    case
    for case in curated()
    if case.name.startswith(("d64", "d96", "empty-batch", "padded-", "ragged-bhsd", "slots-"))
    and case.layout != "reversed"  # torch has no negative strides
]


@pytest.mark.parametrize(
    "framework",
    [NumPy(), Torch("cuda"), Torch("cpu"), Jax("gpu"), Jax("cpu")],
    ids=["numpy", "torch-cuda", "torch-cpu", "jax-cuda", "jax-cpu"],
)
@pytest.mark.parametrize("case", EXCHANGED, ids=str)
def test_frameworks(case: Case, framework: Framework) -> None:
    pytest.importorskip(framework.name)
    verify(case, framework)


@pytest.mark.parametrize("case", [c for c in curated() if c.name in ("d64", "slots-both")], ids=str)
def test_cpu_backend_takes_gpu_arrays(case: Case) -> None:
    verify(case, CUPY, backend="cpu")


def test_gpu_backend_takes_numpy_arrays() -> None:
    verify(dense("numpy", 2, 70, 90), NumPy(), backend="cuda")


def test_result_is_in_the_framework_of_q() -> None:
    torch = pytest.importorskip("torch")
    arrays = good_call(CUPY)
    tensors = good_call(Torch("cuda"))
    assert isinstance(rawattn.attention(arrays["q"], tensors["k"], tensors["v"]), cupy.ndarray)
    out = rawattn.attention(tensors["q"], arrays["k"], tensors["v"])
    assert isinstance(out, torch.Tensor)
    assert bool((out == 1).all())


def test_torch_tensor_that_requires_grad_is_refused_while_torch_records() -> None:
    torch = pytest.importorskip("torch")
    tensors = {name: x.requires_grad_() for name, x in good_call(Torch("cuda")).items()}
    with pytest.raises(RuntimeError, match=r"^q: .*rawattn\.torch"):
        rawattn.attention(**tensors)
    with torch.no_grad():
        out = rawattn.attention(**tensors)
    assert not out.requires_grad
    assert bool((out == 1).all())


@pytest.mark.parametrize("framework", [CUPY, NumPy()], ids=lambda framework: framework.name)
@pytest.mark.parametrize("bad", BAD_CALLS, ids=str)
def test_mistakes_are_refused(bad: Bad, framework: Framework) -> None:
    check_refused(bad, framework, rawattn.attention)


@pytest.mark.parametrize("bad", [bad for bad in BAD_CALLS if "q" in bad.change], ids=str)
def test_mistakes_with_torch_are_refused(bad: Bad) -> None:
    pytest.importorskip("torch")
    check_refused(bad, Torch("cuda"), rawattn.attention)


def _raw(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    memory = cupy.zeros(1 << 12, np.float16)
    return cupy.ndarray(shape, np.float16, memory.data, tuple(2 * stride for stride in strides))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda call: {"out": call["q"]}, "shares memory with q"),
        (lambda call: {"out": _raw((2, 5, 4, 8), (0, 32, 8, 1))}, "overlap"),
        (lambda call: {"out": _raw((2, 5, 4, 8), (320, 64, 16, 2))}, "stride"),
        (lambda call: {"out": np.zeros((2, 5, 4, 8), np.float16)}, "host"),
    ],
    ids=["is-an-input", "overlaps-itself", "last-axis-strided", "on-the-host"],
)
def test_unusable_out_is_refused(change: Any, says: str) -> None:
    call = good_call(CUPY)
    call["v"] = call["k"].copy()
    with pytest.raises(ValueError, match=f"^out: .*{says}"):
        rawattn.attention(**call, **change(call))
    # Again, after a good call of the same form: its prepared launch is kept.
    rawattn.attention(**call, out=cupy.empty_like(call["q"]))
    with pytest.raises(ValueError, match=f"^out: .*{says}"):
        rawattn.attention(**call, **change(call))


def test_arrays_on_host_and_gpu_are_refused() -> None:
    on_gpu, on_host = good_call(CUPY), good_call(NumPy())
    with pytest.raises(ValueError, match=r"^k: .*host.*GPU 0"):
        rawattn.attention(on_gpu["q"], on_host["k"], on_gpu["v"])
    with pytest.raises(ValueError, match=r"^v: .*GPU 0.*host"):
        rawattn.attention(on_host["q"], on_host["k"], on_gpu["v"])


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_one_layout_for_calls_of_several_forms(framework: str) -> None:
    """A layout remembers its last call, yet calls of several forms that use it in turn each get their own kernels."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    seqs = rawattn.SeqLayout(seqstart_q=[0, 30, 70])

    def heads(count: int, dim: int) -> np.ndarray:
        return rng.standard_normal((70, count, dim)).astype(np.float16)

    def array(x: np.ndarray) -> Any:
        return cupy.asarray(x) if framework == "cupy" else torch.as_tensor(x, device="cuda")

    def near(got: Any, expected: np.ndarray, most: float = 2e-3) -> None:
        found = got.get() if framework == "cupy" else got.cpu().numpy()
        np.testing.assert_allclose(found, expected, rtol=most, atol=most)

    forms = [(4, 2, 64), (4, 4, 64), (4, 2, 32)]
    calls = [(heads(q, d), heads(k, d), heads(k, d)) for q, k, d in forms]
    given = [tuple(map(array, each)) for each in calls]
    exact = [rawattn.reference.attention(*each, seqs=seqs, return_lse=True) for each in calls]
    for _ in range(3):
        for arrays, each, (out, lse) in zip(given, calls, exact, strict=True):
            for _ in range(2):
                near(rawattn.attention(*arrays, seqs=seqs), out)
            near(rawattn.attention(*arrays, seqs=seqs, return_lse=True)[1], lse)
            into = array(np.zeros_like(each[0]))
            assert rawattn.attention(*arrays, seqs=seqs, out=into) is into
            near(into, out)
            results = map(array, (out.astype(np.float16), lse.astype(np.float32)))
            gradients = rawattn.attention_backward(arrays[0], *arrays, *results, seqs=seqs)
            expected = rawattn.reference.attention_backward(each[0], *each, out, lse, seqs=seqs)
            for got, right in zip(gradients[:3], expected[:3], strict=True):
                near(got, right, 2e-2)


def _devices() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.skipif(_devices() < 2, reason="needs two GPUs")
class TestTwoDevices:
    def test_runs_where_q_is(self) -> None:
        case = ragged("second", (70, 30), (90, 3), causal=True, on_device=True)
        with cupy.cuda.Device(1):
            expected = run(case, CUPY)
            verify(case, CUPY)
            inputs = materialise(case)
            arrays = [CUPY.array(array) for array in (inputs.q, inputs.k, inputs.v)]
            starts = {name: CUPY.integers(x) for name, x in inputs.integers.items()}
        # Device 0 is current here: the call must run on the device of q all the same.
        out = rawattn.attention(*arrays, seqs=rawattn.SeqLayout(**starts), causal=True)
        assert out.data.device_id == 1
        assert out.get().tobytes() == expected[0].get().tobytes()
        assert cupy.cuda.runtime.getDevice() == 0

    def test_torch_on_the_second(self) -> None:
        pytest.importorskip("torch")
        verify(dense("second", 2, 70, 90, causal=True), Torch("cuda:1"))

    def test_arrays_on_two_devices_are_refused(self) -> None:
        call = good_call(CUPY)
        out_shape = (*call["q"].shape[:3], call["v"].shape[3])
        with cupy.cuda.Device(1):
            there = good_call(CUPY)
            out = cupy.empty(out_shape, call["q"].dtype)
        with pytest.raises(ValueError, match=r"^k: .*GPU 1.*GPU 0"):
            rawattn.attention(call["q"], there["k"], call["v"])
        with pytest.raises(ValueError, match=r"^out: .*GPU 1"):
            rawattn.attention(**call, out=out)
        with cupy.cuda.Device(1):
            lengths = cupy.asarray([5, 5])
        with pytest.raises(ValueError, match=r"GPU 1.*GPU 0"):
            rawattn.attention(**call, seqs=rawattn.SeqLayout(seqlen_q=lengths))


_I32, _I64 = 2**31 - 1, 2**63 - 1
_JUNK = {
    "huge": [_I32, _I32, _I32, _I32],
    "negative": [-1, -5, -1000, -1],
    "extremes": [-_I64 - 1, _I64, -_I64 - 1, _I64],
    "alternating": [0, 120, -7, 1 << 40],
    "decreasing": [140, 90, 30, 0],
    "all-of-it-each-time": [0, 140, 0, 140],
    "just-past-the-end": [0, 50, 100, 141],
}


@dataclass(frozen=True, kw_only=True)
class BadIntegers:
    """packed: a packed batch, else a padded one. what: the keywords with bad values. max_seqlen: a bound that longer sequences
    exceed."""

    packed: bool
    what: str
    max_seqlen: int | None
    junk: str
    dtype: str

    def __str__(self) -> str:
        return "-".join(map(str, asdict(self).values()))


BAD_INTEGERS = [
    BadIntegers(packed=packed, what=what, max_seqlen=max_seqlen, junk=junk, dtype=dtype)
    for packed in (True, False)
    for what in ("seqstart_q", "seqstart_k", "cu_seqlen", "seqlen", "everything", "position")
    for max_seqlen in (None, 9)
    for junk in _JUNK
    for dtype in ("int32", "int64")
    if packed or not what.startswith("seqstart")
    if packed or what != "position" or max_seqlen is None  # else shorter than the arrays' own rows
    if dtype == "int64" or max(map(abs, _JUNK[junk])) <= _I32
]


@pytest.mark.parametrize("bad", BAD_INTEGERS, ids=str)
def test_bad_integers_on_the_gpu_stay_inside(bad: BadIntegers) -> None:
    """Bad integers raise no error and cause no access outside the arrays. NaN surrounds the inputs, canaries `out`."""
    check_bad_integers(bad, CUPY)


def check_bad_integers(case: BadIntegers, framework: CuPy) -> None:
    packed, what = case.packed, case.what
    bad = cupy.asarray(np.array(_JUNK[case.junk], case.dtype))
    lengths = bad[:3].copy()
    good = cupy.asarray(np.array([0, 40, 90, 140], case.dtype))
    integers: dict[str, Any] = {"seqstart_q": good, "seqstart_k": good} if packed else {}
    if what.startswith("seqstart"):
        integers[what] = bad
    elif what == "cu_seqlen":
        integers |= {"cu_seqlen_q": bad, "cu_seqlen_k": bad}
    elif what == "seqlen":
        integers |= {"seqlen_q": lengths, "seqlen_k": lengths}
    elif what == "position":
        integers |= {"position_q": lengths, "position_k": bad[1:].copy()}
    else:
        integers = {"cu_seqlen_q": bad, "seqlen_k": lengths}
        integers |= {"seqstart_q": bad, "seqstart_k": bad} if packed else {}
    most = case.max_seqlen
    seqs = rawattn.SeqLayout(**integers, max_seqlen_q=most, max_seqlen_k=most)

    leading = (140,) if packed else (3, 60)
    inputs = [strided((*leading, 2, 64), np.dtype(np.float16), "gaps") for _ in range(3)]
    out = strided((*leading, 2, 64), np.dtype(np.float16), "gaps")
    out.buffer.view(np.uint8)[:] = CANARY
    inside = np.zeros(out.buffer.shape, bool)
    type(out)(inside, out.offset, out.shape, out.strides).view()[...] = True
    for array in inputs:
        array.view()[...] = 1
    for around in (nullcontext, tensor_stores):
        given = framework.array(out)
        with around():
            _, lse = rawattn.attention(
                *map(framework.array, inputs), seqs=seqs, causal=True, out=given, return_lse=True
            )
        assert not np.isnan(lse.get()).any(), "NaN from outside reached lse"
        memory = framework.buffer_of(given, out)
        touched = memory.view(np.uint16) != out.buffer.view(np.uint16)
        assert not np.any(touched & ~inside), "memory outside out= changed"
        result = memory[touched]
        assert np.all((result == 1) | (result == 0)), "something else than the inputs reached out"
    assert np.all(rawattn.attention(**good_call(CUPY)).get() == 1)
