"""Options that change scores and probabilities: whole forwards on the simulator, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import reference
from tests.shim.device import MakeDevice
from tests.shim.score_calls import (
    BFLOAT16,
    DTYPES,
    OPTIONS,
    PADDED,
    RAGGED,
    WAVES,
    arrays,
    hiding,
    normal,
    option,
)
from tests.shim.whole import run_forward, small_tiles, verify_forward

CASES = [
    pytest.param(name, WAVES[n % 2], DTYPES[n % 3], id=f"{name}-wave{WAVES[n % 2]}-{DTYPES[n % 3]}")
    for n, name in enumerate(OPTIONS)
] + [
    pytest.param(
        *(name, WAVES[(n + 1) % 2], BFLOAT16),
        id=f"{name}-wave{WAVES[(n + 1) % 2]}",
        marks=pytest.mark.exhaustive,
    )
    for n, name in enumerate(OPTIONS)
    if DTYPES[n % 3] != BFLOAT16
]


@pytest.mark.parametrize(("name", "wave", "dtype"), CASES)
def test_forward(machine: MakeDevice, name: str, wave: int, dtype: Any) -> None:
    with small_tiles():
        verify_forward(machine(wave), "portable", *arrays(dtype), **option(name, dtype))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("wave", WAVES)
def test_forward_of_a_ragged_batch(machine: MakeDevice, wave: int, on_device: bool) -> None:
    """Options of scores use positions within the sequence. The bias is larger than any sequence, and NaN beyond them."""
    q, k, v = (x[0] for x in arrays(batch=1, rows=(61, 110)))
    bias = hiding(normal(3, 2, 50, 81, dtype=BFLOAT16))
    bias[:, :, 40:] = np.nan
    bias[:, :, :, 70:] = np.nan
    options = {"softcap": 3.0, "alibi_slopes": normal(3, 4), "sink_logits": normal(4)}
    with small_tiles():
        verify_forward(
            machine(wave), "portable", q, k, v, seqs=RAGGED, bias=bias, dropout_p=0.25, seed=5,
            causal=True, align="top-left", on_device=on_device, **options,
        )  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
def test_forward_of_a_padded_batch(machine: MakeDevice, on_device: bool) -> None:
    bias = normal(2, 4, 45, 75)
    bias[0, :, :, 60:], bias[1, :, 30:], bias[1, :, :, 1:] = np.nan, np.nan, np.nan
    options = {"sink_logits": normal(4), "dropout_p": 0.25, "seed": 5, "window": (11, None)}
    with small_tiles():
        verify_forward(
            machine(), "portable", *arrays(), seqs=PADDED, bias=bias, on_device=on_device, **options
        )


def test_a_row_without_keys_has_its_sink(machine: MakeDevice) -> None:
    """A row without keys has out 0 and its sink's logit as lse."""
    q, k, v = arrays(rows=(9, 4))
    logits = np.array([1.5, -np.inf, -2, 0], np.float32)
    # bottom-right alignment: the first five rows see no key
    with small_tiles():
        out, lse = run_forward(
            machine(), "portable", q, k, v, causal=True, sink_logits=logits, softcap=5.0
        )
    exact = reference.attention(q, k, v, causal=True, sink_logits=logits, softcap=5.0)
    assert np.all(out[:, :5] == 0) and np.any(exact[:, 5:] != 0)
    np.testing.assert_array_equal(lse[:, :, :5], np.broadcast_to(logits[:, None], (2, 4, 5)))


@pytest.mark.parametrize("wave", WAVES)
def test_dropout_does_not_depend_on_tiles(machine: MakeDevice, wave: int) -> None:
    """Kernels with other tiles drop the same keys. All values are 1, so that the number of kept keys is exact in float32."""
    q, k, v = arrays(np.float32, dims=(16, 16))
    q, v = q * 0, np.ones_like(v)
    found = []
    for shape in ((32, 16, 2, 2, 1, False), (48, 32, 1, 1, 1, False)):
        with small_tiles(portable_forward=shape):
            out, _ = run_forward(machine(wave), "portable", q, k, v, dropout_p=0.5, seed=11)
        found.append(np.rint(out * 75 / 2))
    np.testing.assert_array_equal(*found)
    assert 20 < found[0].mean() < 55
