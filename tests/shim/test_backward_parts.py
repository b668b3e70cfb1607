"""Key tiles that several blocks share, each with a part of the query tiles, in whole calls on the CPU machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.target import without_device
from tests.shim.device import MakeDevice
from tests.shim.test_scores import BFLOAT16, arrays, normal
from tests.shim.whole import small_tiles, verify_backward

FLOAT32 = np.dtype(np.float32)
TILES = (32, 32, 2, 1, 2, 1, 1, False)


@pytest.mark.parametrize(
    ("wave", "dtype", "deterministic", "options"),
    [
        (32, BFLOAT16, False, {"causal": True, "bias": (2, 4)}),
        (32, BFLOAT16, True, {"causal": True}),
        (64, BFLOAT16, False, {"window": (9, 40), "bias": (2, 2)}),
        (32, FLOAT32, False, {"bias": (1, 1)}),
        (32, BFLOAT16, False, {"causal": True, "bias": (1, 4), "softcap": 3.0}),
    ],
    ids=str,
)
def test_parts(
    machine: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
    dtype: Any,
    deterministic: bool,
    options: dict[str, Any],
) -> None:
    """More of them than query tiles too."""
    monkeypatch.setattr(portable_backward, "parts", lambda *_: 3)
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(*given["bias"], 45, 72, dtype=dtype)
    device = machine(wave)
    with small_tiles(portable_backward=TILES):
        verify_backward(
            device,
            "portable",
            *arrays(dtype, rows=(45, 72)),
            dlse=normal(2, 4, 45),
            deterministic=deterministic,
            **given,
        )
    assert "rawattn_backward_parts" in device.launched


def _parts(batch: int, heads: tuple[int, int], seqlen: int, causal: bool) -> int:
    q, k = (np.broadcast_to(np.float16(0), (batch, seqlen, each, 64)) for each in heads)
    problem, _ = describe(q, k, k, causal=causal)
    target = replace(without_device("sm_90a"), multiprocessors=132)
    config = portable_backward.choose(problem, target, Operands())
    return portable_backward.parts(problem, target, config)


def test_few_key_tiles_are_shared() -> None:
    assert _parts(1, (2, 1), 4096, True) > 4
    assert _parts(1, (2, 1), 16384, True) > 1
    assert _parts(1, (1, 1), 4096, False) > 1


def test_many_key_tiles_are_not() -> None:
    assert _parts(4, (32, 32), 4096, True) == 1
    assert _parts(1, (1, 1), 128 * 132, False) == 1
    # There is little to share.
    assert _parts(1, (1, 1), 256, True) == 1
