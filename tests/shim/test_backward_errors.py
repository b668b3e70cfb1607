"""Errors of dq and dk, compared with those of arithmetic that rounds no intermediate result but dS, as other kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import reference
from tests.shim.device import MakeDevice
from tests.shim.score_calls import BFLOAT16, normal
from tests.shim.whole import run_backward

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

_SEQLEN = 256


@pytest.mark.parametrize(
    ("dtype", "headdim", "deterministic"),
    [
        (BFLOAT16, 64, False),
        (BFLOAT16, 64, True),
        (BFLOAT16, 128, False),
        (np.dtype(np.float16), 64, False),
        (BFLOAT16, 192, False),
    ],
    ids=str,
)
def test_weights_are_not_rounded(
    machine: MakeDevice, dtype: Any, headdim: int, deterministic: bool
) -> None:
    shape = (1, _SEQLEN, 1, headdim)
    q, k, v, dout = (normal(*shape, dtype=dtype, seed=seed) for seed in range(4))
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    exact = reference.attention_backward(dout, q, k, v, out, lse, causal=True)
    out, lse = out.astype(dtype), lse.astype(np.float32)
    got = run_backward(
        machine(arch="sm_90a"),
        "portable",
        *(dout, q, k, v, out, lse),
        causal=True,
        deterministic=deterministic,
    )
    for name, gradient in _of_others(dout, q, k, v, out, lse).items():
        ours, theirs = (
            _error(x, getattr(exact, name)) for x in (getattr(got, name), gradient[None, :, None])
        )
        assert ours <= 1.05 * theirs, f"{name}: {ours / theirs:.3f} of the error"


def _of_others(*arrays: np.ndarray) -> dict[str, np.ndarray]:
    dtype = arrays[0].dtype
    dout, q, k, v, out = (x[0, :, 0].astype(np.float64) for x in arrays[:5])
    scale = q.shape[1] ** -0.5
    p = np.tri(_SEQLEN) * np.exp(scale * q @ k.T - arrays[5][0, 0][:, None])
    ds = p * (dout @ v.T - (dout * out).sum(axis=1, keepdims=True))
    ds = ds.astype(dtype).astype(np.float64)
    return {"dq": (scale * ds @ k).astype(dtype), "dk": (scale * ds.T @ q).astype(dtype)}


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(got.astype(np.float64) - exact))))
