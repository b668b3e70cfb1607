"""What a user can get wrong in a backward call: each mistake changes one thing in a good call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import Gradients

_Q, _K, _V = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16)
_OUT, _LSE = (2, 5, 4, 16), (2, 4, 5)


def _array(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def good_call() -> dict[str, Any]:
    shapes = {"dout": _OUT, "q": _Q, "k": _K, "v": _V, "out": _OUT, "lse": _LSE}
    return {name: _array(shape) for name, shape in shapes.items()}


def _readonly(shape: tuple[int, ...]) -> np.ndarray:
    array = _array(shape)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Bad:
    name: str
    change: dict[str, Any]
    error: type[Exception]
    says: str

    def __str__(self) -> str:
        return self.name


_SHARED = _array(_K)
_SHARED_BIAS = _array((5, 7))
BAD = [
    Bad("dout-shape", {"dout": _array(_Q)}, ValueError, r"^dout: .*\(2, 5, 4, 8\).*\(2, 5, 4, 16\)"),
    Bad("dout-dtype", {"dout": _array(_OUT, np.float16)}, TypeError, r"^dout: .*float16.*float32"),
    Bad("dout-none", {"dout": None}, TypeError, r"^dout: .*None"),
    Bad("out-shape", {"out": _array((2, 5, 16, 4))}, ValueError, r"^out: .*\(2, 5, 16, 4\)"),
    Bad("out-dtype", {"out": _array(_OUT, ml_dtypes.bfloat16)}, TypeError, r"^out: .*bfloat16"),
    Bad("lse-shape", {"lse": _array((2, 5, 4))}, ValueError, r"^lse: .*\(2, 5, 4\).*\(2, 4, 5\)"),
    Bad("lse-dtype", {"lse": _array(_LSE, np.float16)}, TypeError, r"^lse: .*float16.*float32"),
    Bad("lse-none", {"lse": None}, TypeError, r"^lse: .*None"),
    Bad("dlse-shape", {"dlse": _array((4, 5))}, ValueError, r"^dlse: .*\(4, 5\)"),
    Bad("dlse-dtype", {"dlse": _array(_LSE, np.float64)}, TypeError, r"^dlse: .*float64"),
    Bad("q-dtype", {"q": _array(_Q, np.int32)}, TypeError, r"^q: .*int32"),
    Bad("k-heads", {"k": _array((2, 7, 3, 8))}, ValueError, r"nheads_kv.*3"),
    Bad("want-dbias", {"want_dbias": True}, ValueError, r"^want_dbias: .*bias"),
    Bad("want-dbias-text", {"want_dbias": "yes"}, TypeError, r"^want_dbias: .*str"),
    Bad("deterministic-number", {"deterministic": 1}, TypeError, r"^deterministic: .*int"),
    Bad("backend", {"backend": "tpu"}, ValueError, r"^backend: .*tpu"),
    Bad("into-tuple", {"into": (None, None, None)}, TypeError, r"^into: .*tuple.*Gradients"),
    Bad("into-dbias", {"into": Gradients(dbias=_array(_Q))}, ValueError, r"^into\.dbias: "),
    Bad("into-shape", {"into": Gradients(dq=_array(_K))}, ValueError, r"^into\.dq: .*\(2, 7, 2, 8\)"),
    Bad("into-dtype", {"into": Gradients(dk=_array(_K, np.float16))}, TypeError, r"^into\.dk: .*float16"),
    Bad("into-readonly", {"into": Gradients(dv=_readonly(_V))}, ValueError, r"^into\.dv: .*read-only"),
    Bad("into-no-array", {"into": Gradients(dq=3)}, TypeError, r"^into\.dq: .*int"),
    Bad("into-shares-input", {"k": _SHARED, "into": Gradients(dk=_SHARED)}, ValueError,
        r"^into\.dk: shares memory with k"),
    Bad("into-shares-each-other", {"into": Gradients(dk=_SHARED, dv=_SHARED), "v": _array(_K),
        "out": _array(_Q), "dout": _array(_Q)}, ValueError, r"^into\.dk: shares memory with into\.dv"),
    Bad("into-last-stride", {"into": Gradients(dq=_array((2, 5, 4, 16))[..., ::2])}, ValueError,
        r"^into\.dq: .*stride"),
    Bad("window", {"window": (-1, 0)}, ValueError, r"^window: .*-1"),
    Bad("seqs", {"seqs": [0, 5]}, TypeError, r"^seqs: .*list"),
    Bad("bias-shape", {"bias": _array((1, 3, 5, 7))}, ValueError, r"^bias: got shape \(1, 3, 5, 7\), expected"),
    Bad("bias-dtype", {"bias": _array((5, 7), np.float16)}, TypeError, r"^bias: got dtype float16, expected float32"),
    Bad("mask-dtype", {"mask": _array((5, 7))}, TypeError, r"^mask: got dtype float32, expected bool"),
    Bad("softcap", {"softcap": -30.0}, ValueError, r"^softcap: got -30"),
    Bad("seed", {"dropout_p": 0.1}, ValueError, r"^seed: got None"),
    Bad("sink-logits", {"sink_logits": _array((2,))}, ValueError, r"^sink_logits: got shape \(2,\)"),
    Bad("into-dsink", {"into": Gradients(dsink_logits=_array((4,)))}, ValueError, r"^into\.dsink_logits: "),
    Bad("into-captured", {"into": Gradients(captured={"x": _array((4,))})}, ValueError, r"^into\.captured: "),
    Bad("into-dbias-shape", {"bias": _array((5, 7)), "into": Gradients(dbias=_array((1, 1, 5, 7)))}, ValueError,
        r"^into\.dbias: got shape \(1, 1, 5, 7\), expected \(5, 7\)"),
    Bad("into-dbias-dtype", {"bias": _array((5, 7)), "into": Gradients(dbias=_array((5, 7), np.float16))}, TypeError,
        r"^into\.dbias: got dtype float16"),
    Bad("into-dbias-shares", {"bias": _SHARED_BIAS, "into": Gradients(dbias=_SHARED_BIAS)}, ValueError,
        r"^into\.dbias: shares memory with bias"),
    Bad("into-dbias-unwanted", {"bias": _array((5, 7)), "want_dbias": False, "into": Gradients(dbias=_array((5, 7)))},
        ValueError, r"^into\.dbias: "),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_refused(bad: Bad) -> None:
    arguments = good_call() | bad.change
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(bad.error, match=bad.says):
        rawattn.attention_backward(**arguments)
    for name, array in before.items():
        np.testing.assert_array_equal(arguments[name], array)


def test_good_call() -> None:
    gradients = rawattn.attention_backward(**good_call())
    assert [x.shape for x in gradients[:3]] == [_Q, _K, _V]
    assert gradients.dbias is None and gradients.dsink_logits is None


def test_an_unwanted_dbias_is_none() -> None:
    bias = _array((5, 7))
    assert rawattn.attention_backward(**good_call(), bias=bias).dbias.shape == (5, 7)
    unwanted = rawattn.attention_backward(**good_call(), bias=bias, want_dbias=False)
    assert unwanted.dbias is None


def test_into_is_written_and_returned() -> None:
    into = Gradients(dq=np.full(_Q, np.nan, np.float32), dv=np.full(_V, np.nan, np.float32))
    expected = rawattn.attention_backward(**good_call())
    gradients = rawattn.attention_backward(**good_call(), into=into)
    assert gradients.dq is into.dq and gradients.dv is into.dv
    for a, b in zip(gradients[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, b)


def test_vjp() -> None:
    call = good_call()
    q, k, v, dout = call["q"], call["k"], call["v"], call["dout"]
    (out, lse), backward = rawattn.attention_vjp(q, k, v, causal=True, return_lse=True)
    expected = rawattn.attention_backward(dout, q, k, v, out, lse, causal=True, dlse=lse)
    for a, b in zip(backward(dout, dlse=lse)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    alone, _ = rawattn.attention_vjp(q, k, v, causal=True)
    np.testing.assert_array_equal(alone, out)
