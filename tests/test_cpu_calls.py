"""Repeated calls of the CPU backend: their form is described once, but every call is checked as if it were the first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from rawattn._runtime import dispatch, on_cpu


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_known", {})


def arrays(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, *shape), np.float32)


def call(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    return rawattn.attention(q, k, v, **options, backend="cpu")


def test_a_like_call_is_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = on_cpu.describe

    def counting(*args: Any) -> Any:
        described.append(1)
        return describe(*args)

    monkeypatch.setattr(on_cpu, "describe", counting)
    q, k, v = arrays(2, 5, 2, 8)
    bias = np.zeros((5, 5), np.float32)
    for options in ({}, {"causal": True}, {"window": (1, 0)}, {"softcap": 2.0}, {"bias": bias}):
        described.clear()
        first = call(q, k, v, **options)
        np.testing.assert_array_equal(call(q, k, v, **options), first)
        assert len(described) == 1
        assert np.any(call(q, k, 2 * v, **options) != first)
        assert len(described) == 1
    for changed in ((q[:1], k[:1], v[:1]), (q[:, :4], k, v), (q, k, v[..., :7])):
        described.clear()
        call(*changed)
        assert len(described) == 1
    described.clear()
    call(*(x.astype(np.float16) for x in (q, k, v)))
    call(q, k, v, bias=bias.astype(np.float32)[:1])
    call(q, k, v, scale=3.0)
    call(q, k, v, scale=4.0)
    assert len(described) == 4


@pytest.mark.parametrize("bias", [False, True])
def test_lengths_of_each_call_count(bias: bool) -> None:
    """The lengths of each call count, also if an earlier call had the same form and the same largest length."""
    q, k, v = arrays(12, 2, 8)
    options = {"bias": np.arange(36, dtype=np.float32).reshape(6, 6)} if bias else {}
    for starts in ([0, 5, 9, 12], [0, 3, 8, 12], [1, 6, 8, 9], [0, 6, 9, 12]):
        out = call(q, k, v, seqs=SeqLayout(seqstart_q=starts), causal=True, **options)
        assert not out[: starts[0]].any() and not out[starts[-1] :].any()
        for first, last in itertools.pairwise(starts):
            n = last - first
            alone = {name: x[:n, :n] for name, x in options.items()}
            one = (x[None, first:last] for x in (q, k, v))
            np.testing.assert_allclose(
                out[first:last], call(*one, causal=True, **alone)[0], atol=1e-6
            )
    if bias:  # a longer sequence is checked against the bias again
        with pytest.raises(ValueError, match=r"^bias: got shape \(6, 6\), .*>= 7 \(longest"):
            call(q, k, v, seqs=SeqLayout(seqstart_q=[0, 7, 9, 12]), causal=True, **options)


def test_mistakes_are_found_after_a_good_call() -> None:
    q, k, v = arrays(2, 5, 2, 8)
    for options, error, message in (
        ({"causal": 1}, TypeError, "^causal: got 1"),
        ({"scale": True}, TypeError, "^scale: got True"),
        ({"window": (1.0, 0)}, TypeError, r"^window"),
        ({"out": q}, ValueError, "^out: "),
        ({"out": np.zeros((2, 5, 2, 9), np.float32)}, ValueError, "^out: got shape"),
        ({"mask": np.ones((5, 6), bool)}, ValueError, "^mask: got shape"),
        ({"seqs": 3}, TypeError, "^seqs: got int"),
    ):
        for good in ({}, {"causal": True}, {"scale": 1.0}, {"window": (1, 0)}):
            call(q, k, v, **good)
        call(q, k, v, mask=np.ones((5, 5), bool))
        for _ in range(2):
            with pytest.raises(error, match=message):
                call(q, k, v, **options)
    with pytest.raises(TypeError, match=r"^k: got dtype float16, expected float32"):
        call(q, k.astype(np.float16), v)


def test_gradients_of_like_calls() -> None:
    q, k, v = arrays(2, 5, 2, 8)
    bias = np.zeros((5, 5), np.float32)
    out, lse = rawattn.attention(q, k, v, bias=bias, return_lse=True, backend="cpu")
    for want in (None, False, None):
        found = rawattn.attention_backward(
            out, q, k, v, out, lse, bias=bias, want_dbias=want, backend="cpu"
        )
        assert (found.dbias is None) == (want is False)
    with pytest.raises(ValueError, match=r"^lse: got shape"):
        rawattn.attention_backward(out, q, k, v, out, lse[:, :1], bias=bias, backend="cpu")
    dout = out.astype(np.float16)
    with pytest.raises(TypeError, match=r"^dout: got dtype float16"):
        rawattn.attention_backward(dout, q, k, v, out, lse, bias=bias, backend="cpu")


def test_numpys_own_arrays_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy arrays reach `import_array` only if it has to change or refuse them."""
    imported: list[str] = []
    importing = dispatch.arrays.import_array

    def counting(name: str, array: Any, **keywords: Any) -> Any:
        imported.append(name)
        return importing(name, array, **keywords)

    monkeypatch.setattr(dispatch.arrays, "import_array", counting)
    q, k, v = arrays(2, 5, 2, 8)
    out, bias = np.empty_like(q), np.zeros((5, 5), np.float32)
    first = call(q, k, v, bias=bias)
    assert call(q, k, v, bias=bias, out=out) is out and not imported
    np.testing.assert_array_equal(out, first)
    rawattn.attention_backward(out, q, k, v, out, first[..., 0].swapaxes(1, 2), backend="cpu")
    assert not imported

    class Own(np.ndarray):
        pass

    frozen, swapped = np.empty_like(q), q.astype(q.dtype.newbyteorder())
    frozen.flags.writeable = False
    np.testing.assert_array_equal(call(q, k, frozen * 0 + v), call(q, k, v))
    assert not imported
    assert type(call(q.view(Own), k, v)) is not Own and imported
    for arguments, options, error, message in (
        ((q, swapped, v), {}, TypeError, "^k: got dtype >f4|^k: got dtype <f4"),
        ((q, k, np.ma.masked_array(v)), {}, TypeError, "^v: got a masked array"),
        ((q, None, v), {}, TypeError, "^k: got NoneType"),
        ((q, k, v), {"out": frozen}, ValueError, "^out: got a read-only array"),
        ((q, k, v), {"out": np.empty_like(swapped)}, TypeError, "^out: got dtype"),
        ((q, k, v), {"out": out.tolist()}, TypeError, "^out: got list"),
        ((q, k, v), {"bias": bias.astype(swapped.dtype)}, TypeError, "^bias: got dtype"),
    ):
        with pytest.raises(error, match=message):
            call(*arguments, **options)
    with pytest.raises(ValueError, match=r"^backend: got 'gpu'"):
        rawattn.attention(q, k, v, backend="gpu")
