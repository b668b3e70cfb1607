"""NaN in keys and values reaches only rows that see them (attn/row_alone.cuh), on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from tests import hidden_nan
from tests.shim.device import MakeDevice
from tests.shim.whole import run_forward, small_tiles

ROWS, KEYS = 70, 90
HIDING = hidden_nan.hiding(2, 4, ROWS, KEYS)


def shapes(headdim: int = 16, headdim_v: int = 24) -> tuple[tuple[int, ...], ...]:
    return ((2, ROWS, 4, headdim), (2, KEYS, 2, headdim), (2, KEYS, 2, headdim_v))


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("dtype", [hidden_nan.BFLOAT16, np.float32], ids=str)
def test_portable(machine: MakeDevice, how: str, dtype: Any) -> None:
    given = hidden_nan.inputs(shapes(), dtype)
    with small_tiles(portable_forward=(64, 32, 2, 2, 1, False)):
        out, lse = run_forward(machine(), "portable", *given, **HIDING[how])
    hidden_nan.check(given, out, lse, **HIDING[how])


@pytest.mark.parametrize("how", HIDING)
def test_hopper(machine: MakeDevice, how: str) -> None:
    given = hidden_nan.inputs(shapes(64, 64), hidden_nan.BFLOAT16)
    out, lse = run_forward(machine(arch="sm_90a"), "sm90", *given, **HIDING[how])
    hidden_nan.check(given, out, lse, **HIDING[how])


FEW = hidden_nan.hiding(2, 4, 5, 300)


@pytest.mark.parametrize("how", [how for how in FEW if how != "dropout"])
@pytest.mark.parametrize(("arch", "headdim_v"), [("sm_80", 24), ("sm_80", 72), ("sm_90a", 64)])
def test_decoding(machine: MakeDevice, arch: str, headdim_v: int, how: str) -> None:
    """Some head dims are such that a wave stores parts of rows."""
    given = hidden_nan.inputs(
        ((2, 5, 4, 64), (2, 300, 2, 64), (2, 300, 2, headdim_v)), hidden_nan.BFLOAT16
    )
    out, lse = run_forward(machine(arch=arch), "decode", *given, **FEW[how])
    hidden_nan.check(given, out, lse, **FEW[how])


@pytest.mark.parametrize("how", ["causal", "window", "top-left"])
def test_output_by_tma(machine: MakeDevice, how: str) -> None:
    """In packed batches Hopper's forward stores its output by TMA."""
    given = hidden_nan.inputs(((1, ROWS, 4, 64), (1, KEYS, 2, 64), (1, KEYS, 2, 64)), np.float16)
    seqs = SeqLayout(seqstart_q=[0, ROWS], seqstart_k=[0, KEYS])
    packed = [x[0] for x in given]
    out, lse = run_forward(machine(arch="sm_90a"), "sm90", *packed, seqs=seqs, **HIDING[how])
    hidden_nan.check(given, out[None], lse[None], **HIDING[how])
