"""The gradient of a bias, and the other gradients of a call with one: whole calls on the simulator, against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from tests import exhaustive
from tests.shim.device import MakeDevice
from tests.shim.score_calls import BFLOAT16, DTYPES, arrays, hiding, normal
from tests.shim.whole import small_tiles, verify_backward

BROADCASTS = list(itertools.product((1, 2, 4), (1, 2), (1, 45), (1, 75)))


@pytest.mark.parametrize(
    ("heads", "batch", "rows", "keys"), exhaustive.thin(BROADCASTS, 10), ids=str
)
def test_dbias_of_every_broadcast(
    machine: MakeDevice, heads: int, batch: int, rows: int, keys: int
) -> None:
    """dbias is right for every way to broadcast the bias. In float32, so that any rounding to 16 bits on the way shows."""
    bias = normal(batch, heads, rows, keys)
    causal = (heads + batch + rows) % 2 == 0
    with small_tiles():
        verify_backward(machine(), "portable", *arrays(), bias=bias, causal=causal)


@pytest.mark.parametrize("keys", [(9, 75, 40), (75, 9, 75)], ids=str)
@pytest.mark.parametrize(
    ("heads", "dtype", "option"),
    [
        (1, DTYPES[2], {}),
        (4, BFLOAT16, {"causal": True}),
        (1, BFLOAT16, {"window": (20, 9)}),
        (2, DTYPES[2], {"mask": normal(45, 75) < 1}),
    ],
    ids=str,
)
def test_dbias_of_sequences_of_other_lengths(
    machine: MakeDevice, heads: int, dtype: Any, option: dict[str, Any], keys: tuple[int, ...]
) -> None:
    """A block that sums dbias over sequences finds the bias of what one of them does not see and the next one does."""
    seqs = SeqLayout(seqlen_q=[45, 25, 45], seqlen_k=list(keys))
    with small_tiles():
        verify_backward(
            machine(),
            "portable",
            *arrays(dtype, batch=3),
            bias=normal(1, heads, 45, 75, dtype=dtype),
            seqs=seqs,
            **option,
        )


@pytest.mark.parametrize("shape", [(1, 4, 45, 75), (2, 4, 1, 1), (4, 45, 75)])
def test_dbias_is_the_same_bits(machine: MakeDevice, shape: tuple[int, ...]) -> None:
    bias = normal(*shape, dtype=BFLOAT16)
    with small_tiles():
        first, second = (
            verify_backward(machine(), "portable", *arrays(), bias=bias).dbias for _ in range(2)
        )
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


def test_a_bias_whose_gradient_is_not_wanted(machine: MakeDevice) -> None:
    device = machine()
    with small_tiles():
        bias = normal(1, 1, 45, 75)
        gradients = verify_backward(device, "portable", *arrays(), bias=bias, want_dbias=False)
    assert gradients.dbias is None
    assert "rawattn_backward_bias" not in device.launched


@pytest.mark.parametrize("keys", [72, 69])
@pytest.mark.parametrize(
    ("batches", "heads", "wave", "dtype", "window"),
    exhaustive.thin([
        (2, 4, 32, BFLOAT16, None),
        (2, 4, 64, DTYPES[0], (20, 3)),
        (2, 2, 32, BFLOAT16, (None, 0)),
        (2, 2, 64, BFLOAT16, (5, 5)),
        (1, 4, 32, DTYPES[0], (None, 0)),
        (2, 1, 32, BFLOAT16, (9, 40)),
        (1, 1, 64, BFLOAT16, (None, 0)),
    ], 3),
    ids=str,
)  # fmt: skip
def test_dbias_by_the_main_kernel(
    machine: MakeDevice,
    batches: int,
    heads: int,
    wave: int,
    dtype: Any,
    window: tuple[int | None, int] | None,
    keys: int,
) -> None:
    """dbias of each head, of a group's two heads, and summed in float32 is right in rows of any length."""
    bias = normal(batches, heads, 45, keys, dtype=dtype)
    device = machine(wave)
    waves = (1, 2) if window is None or window[0] is None else (2, 1)  # of keys and columns
    with small_tiles(portable_backward=(32, 32, *waves, 2, 1, 1, False)):
        verify_backward(
            device,
            "portable",
            *arrays(dtype, rows=(45, keys)),
            bias=bias,
            window=window,
            dropout_p=0.1,
            seed=3,
        )
    assert "rawattn_backward_bias" not in device.launched
    apart = heads == 1 or batches == 1 or keys % 8 > 0
    assert ("rawattn_backward_bias_rows" in device.launched) == apart


@pytest.mark.parametrize(
    ("nheads", "heads", "window", "wave", "keys"),
    exhaustive.thin(
        (
            (*heads, window, wave, keys)
            for heads in (((4, 1), 1), ((8, 2), 2), ((8, 2), 1), ((6, 2), 2))
            for window in (None, (None, 0), (20, 3))
            for wave in (32, 64)
            for keys in (72, 67)
        ),
        13,
    ),
    ids=str,
)
def test_dbias_of_heads_by_twos(
    machine: MakeDevice,
    nheads: tuple[int, int],
    heads: int,
    window: tuple[int | None, int] | None,
    wave: int,
    keys: int,
) -> None:
    """dbias is right for GQA groups of several pairs of heads that share a bias, and for groups of three heads."""
    device = machine(wave)
    q = normal(2, 75, nheads[0], 16, dtype=BFLOAT16, seed=2)
    k, v = (normal(2, keys, nheads[1], n, dtype=BFLOAT16, seed=n) for n in (16, 24))
    with small_tiles(portable_backward=(32, 32, 1, 2, 2, 1, 1, False)):
        bias = normal(1, heads, 75, keys, dtype=BFLOAT16)
        verify_backward(device, "portable", q, k, v, bias=bias, window=window)
    assert "rawattn_backward_bias_rows" in device.launched


ONE_ROW: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 1, 1, 72), {}),
    ((2, 4, 1, 72), {"window": (9, 40), "dropout_p": 0.2, "seed": 5}),
    ((1, 2, 1, 72), {"causal": True, "alibi": True}),
    ((2, 4, 1, 72), {"softcap": 3.0, "mask": True}),
]


@pytest.mark.parametrize(
    ("shape", "options", "dtype", "wave"),
    exhaustive.thin(
        ((*each, dtype, w) for each in ONE_ROW for dtype in DTYPES for w in (32, 64)), 13
    ),
    ids=str,
)
def test_a_bias_of_keys(
    machine: MakeDevice, shape: tuple[int, ...], options: dict[str, Any], dtype: Any, wave: int
) -> None:
    """Gradients are right for a bias of one row for all queries that hides keys, in one sequence all of them."""
    bias = normal(*shape, dtype=dtype)
    bias[..., 60:] = -np.inf
    bias[-1, -1] = -np.inf
    if shape[0] == 2:
        bias[0, 0, 0, 3] = np.finfo(np.float32).min if dtype == np.float32 else -3e4
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = np.array([0.5, -0.25, 0.0, 1.5], np.float32)
    if options.pop("mask", False):
        options["mask"] = np.random.default_rng(4).random((1, 1, 45, 72)) < 0.7
    device = machine(wave)
    with small_tiles():
        verify_backward(device, "portable", *arrays(dtype, rows=(45, 72)), bias=bias, **options)
    (main,) = (each for each in device.summaries if each.startswith("portable backward "))
    assert "one-row" in main


SHARED: list[tuple[int, dict[str, Any]]] = [
    (1, {"causal": True}),
    (2, {"dropout_p": 0.2, "seed": 3}),
    (4, {"window": (20, 3)}),
]


@pytest.mark.parametrize(
    ("heads", "options", "wave", "keys"),
    exhaustive.thin(
        ((*each, w, keys) for each in SHARED for w in (32, 64) for keys in (75, 72)), 5
    ),
    ids=str,
)
def test_a_bias_that_many_scores_share(
    machine: MakeDevice, heads: int, options: dict[str, Any], wave: int, keys: int
) -> None:
    """A bias that many scores share and whose rows are unaligned is copied into aligned rows."""
    around = np.full((1, heads, 45, keys + 9), np.nan, BFLOAT16)
    bias = around[..., 3 : 3 + keys]
    bias[:] = hiding(normal(1, heads, 45, keys, dtype=BFLOAT16))
    device = machine(wave)
    q = normal(3, 45, 4, 16, dtype=BFLOAT16, seed=2)
    k, v = (normal(3, keys, 2, n, dtype=BFLOAT16, seed=n) for n in (16, 24))
    with small_tiles():
        verify_backward(device, "portable", q, k, v, bias=bias, **options)
    assert "rawattn_align_bias" in device.launched
    mains = [each for each in device.summaries if each.startswith("portable backward ")]
    assert all("bias-chunks" in each for each in mains)
