"""Helpers that check the gradients of the frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.cases import dense, padded, ragged
from tests.frameworks import Framework
from tests.gradients import NAMES, Backward, check_gradient
from tests.memory import Strided

PAGE = Path(__file__).resolve().parents[1] / "docs/frameworks.md"
CASES = [
    dense("autograd", 2, 70, 90, nheads_q=4, nheads_kv=2, causal=True),
    dense("autograd-float32", 1, 140, 100, headdim=40, headdim_v=24, dtype="float32"),
    dense("autograd-bhsd", 1, 50, 60, layout="bhsd", dtype="float16", window=(20, 3), sink=4),
    padded("autograd-padded", (30, 0, 64), (90, 17, 0), 70, 95, causal=True),
    ragged(
        "autograd-ragged", (30, 5, 64), (90, 0, 5), room_q=(33, 9, 70), by_q="seqlen", lead=3,
        tail=9, headdim=128,
    ),
]  # fmt: skip


def verify(call: Backward, framework: Framework, gradients: Any) -> None:
    for n, (name, rows) in enumerate(zip(NAMES, call.rows, strict=True)):
        gradient = framework.host(gradients[n])
        assert gradient.shape == call.shapes[n]
        check_gradient(call, n, gradient[rows])
        assert not np.any(gradient[~rows].astype(np.float32) != 0), f"{name}: padding is not 0"


def dlse_of(call: Backward) -> Strided:
    values = np.zeros_like(call.lse) if call.dlse is None else call.dlse
    strides = [x // values.itemsize for x in values.strides]
    return Strided(values.ravel(), 0, values.shape, tuple(strides))
