"""Gradients where scores and probabilities are changed, by whole calls on the CPU machine, against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, ScoreMod
from tests import exhaustive
from tests.shim.device import Device
from tests.shim.test_scores import (
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
from tests.shim.whole import small_tiles, verify_backward

MakeDevice = Callable[..., Device]

CASES = [
    pytest.param(
        name,
        WAVES[n % 2],
        DTYPES[n % 3],
        n % 4 == 3,
        id=f"{name}-wave{WAVES[n % 2]}-{DTYPES[n % 3]}",
    )
    for n, name in enumerate(OPTIONS)
] + [
    pytest.param(
        name, 32, dtype, n % 2 == 0, id=f"{name}-wave32-{dtype}-{'dq' if n % 2 == 0 else 'main'}"
    )
    for n, name in enumerate(OPTIONS)
    for dtype in DTYPES
    if (n % 2, dtype) != (0, DTYPES[n % 3])
]


# In every run: all options together, of both waves, and those with code of their own in more than one kernel.
COMMON = ("bias-rows", "sinks-hidden", "dropout-seed-on-device", "score_mod")
MARKED = [
    case
    if n < len(OPTIONS) and case.values[0] in COMMON
    else pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive)
    for n, case in enumerate(CASES)
]
TOGETHER = [("everything", 64, BFLOAT16, False), ("everything", 32, BFLOAT16, True)]


@pytest.mark.parametrize(("name", "wave", "dtype", "deterministic"), TOGETHER + MARKED)
def test_backward(
    machine: MakeDevice, name: str, wave: int, dtype: Any, deterministic: bool
) -> None:
    with small_tiles():
        verify_backward(
            machine(wave),
            "portable",
            *arrays(dtype),
            dlse=normal(2, 4, 45),
            deterministic=deterministic,
            **option(name, dtype),
        )


CAPTURED = {
    "head": ("score + slope[head] * (kv_idx - q_idx)", {"slope": (4,)}),
    "row": ("score * row[q_idx, head] + row[q_idx, 0]", {"row": (45, 4)}),
    "key": ("score + score * key[batch, kv_idx]", {"key": (2, 75)}),
    "distance": ("score * table[kv_idx - q_idx + 44] + slope[kv_head]", {"table": (119,), "slope": (2,)}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wave"),
    exhaustive.thin(((name, wave) for wave in WAVES for name in CAPTURED), 6),
)
def test_captured_gradients(machine: MakeDevice, name: str, wave: int) -> None:
    """Twice: the second run finds sums of zeros."""
    text, shapes = CAPTURED[name]
    dtype = DTYPES[sorted(CAPTURED).index(name) % 3]
    found = {each: normal(*shape, dtype=dtype) for each, shape in shapes.items()}
    score_mod = ScoreMod(text, wrt=tuple(found), **found)
    with small_tiles():
        for seed in range(2):
            gradients = verify_backward(
                machine(wave),
                "portable",
                *arrays(),
                score_mod=score_mod,
                softcap=4.0,
                window=(30, 9),
                seed_of_dout=seed,
                dropout_p=0.1,
                seed=3,
            )
            assert set(gradients.captured) == set(found)


@pytest.mark.parametrize("wave", [32, 64])
def test_captured_gradients_in_any_order(machine: MakeDevice, wave: int) -> None:
    """Exact sums, which are zeros again for the second call."""
    table = normal(5, 7, dtype=np.float16)
    text = "score * slope[head] + table[q_idx % 5, kv_idx % 7]"
    score_mod = ScoreMod(text, wrt=("slope", "table"), slope=normal(4), table=table)
    device = machine(wave)
    with small_tiles():
        first, again = (
            verify_backward(
                device, "portable", *arrays(), score_mod=score_mod, deterministic=True
            ).captured
            for _ in range(2)
        )
    for name in ("slope", "table"):
        np.testing.assert_array_equal(first[name], again[name])


def test_captured_gradients_of_ragged_batches(machine: MakeDevice) -> None:
    """Two kernels of query tiles find their sequences in one order."""
    seqs = rawattn.SeqLayout(seqstart_q=[0, 30, 30, 45], seqstart_k=[0, 20, 61, 75])
    q, k, v = (x[0] for x in arrays())
    score_mod = ScoreMod("score * slope[head]", wrt="slope", slope=normal(4))
    options = {"seqs": seqs, "score_mod": score_mod, "deterministic": True}
    with small_tiles():
        for on_device in (False, True):
            verify_backward(machine(), "portable", q, k, v, on_device=on_device, **options)


BROADCASTS = list(itertools.product((1, 2, 4), (1, 2), (1, 45), (1, 75)))


@pytest.mark.parametrize(
    ("heads", "batch", "rows", "keys"), exhaustive.thin(BROADCASTS, 10), ids=str
)
def test_dbias_of_every_broadcast(
    machine: MakeDevice, heads: int, batch: int, rows: int, keys: int
) -> None:
    """Of float32, so that what is rounded on the way shows."""
    bias = normal(batch, heads, rows, keys)
    causal = (heads + batch + rows) % 2 == 0
    with small_tiles():
        verify_backward(machine(), "portable", *arrays(), bias=bias, causal=causal)


@pytest.mark.parametrize("shape", [(1, 4, 45, 75), (2, 4, 1, 1), (4, 45, 75)])
def test_dbias_is_the_same_bits(machine: MakeDevice, shape: tuple[int, ...]) -> None:
    bias = normal(*shape, dtype=BFLOAT16)
    with small_tiles():
        first, second = (
            verify_backward(machine(), "portable", *arrays(), bias=bias).dbias for _ in range(2)
        )
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))


def test_gradients_of_options_in_arrays_of_the_caller(machine: MakeDevice) -> None:
    into = Gradients(
        dbias=np.empty((2, 4, 90, 80), BFLOAT16)[:, ::-1, ::2, :75],
        dsink_logits=np.empty(8, np.float16)[:4],
    )
    device = machine()
    with small_tiles():
        verify_backward(
            device,
            "portable",
            *arrays(),
            bias=hiding(normal(2, 4, 45, 75, dtype=BFLOAT16)),
            sink_logits=np.array([0.5, -np.inf, 3, -1], np.float16),
            into=into,
        )


def test_a_bias_whose_gradient_is_not_wanted(machine: MakeDevice) -> None:
    device = machine()
    with small_tiles():
        bias = normal(1, 1, 45, 75)
        gradients = verify_backward(device, "portable", *arrays(), bias=bias, want_dbias=False)
    assert gradients.dbias is None
    assert "rawattn_backward_bias" not in device.launched


@pytest.mark.parametrize(
    ("wave", "on_device", "deterministic"),
    exhaustive.thin(itertools.product(WAVES, (False, True), (False, True)), 10),
)
def test_backward_of_a_ragged_batch(
    machine: MakeDevice, wave: int, on_device: bool, deterministic: bool
) -> None:
    """Where there are no sequences the bias is NaN, and its gradient 0."""
    q, k, v = (x[0] for x in arrays(batch=1, rows=(61, 110)))
    bias = hiding(normal(3, 2, 50, 81, dtype=BFLOAT16))
    bias[:, :, 40:] = np.nan
    bias[:, :, :, 70:] = np.nan
    with small_tiles():
        gradients = verify_backward(
            machine(wave),
            "portable",
            *(q, k, v),
            seqs=RAGGED,
            causal=True,
            align="top-left",
            softcap=3.0,
            alibi_slopes=normal(3, 4),
            sink_logits=normal(4),
            bias=bias,
            dropout_p=0.25,
            seed=5,
            dlse=normal(4, 61),
            on_device=on_device,
            deterministic=deterministic,
        )
    assert not np.any(gradients.dbias[1].astype(np.float32))
    assert not np.any(gradients.dbias[:, :, 40:].astype(np.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_slopes_that_reward_distance(machine: MakeDevice, packed: bool) -> None:
    """Of rows behind a sequence's last one the scores would be beyond all numbers."""
    slopes = -np.array([40, 2, 0.5, 8], np.float32)
    q, k, v = (x[0] for x in arrays(batch=1, rows=(61, 110))) if packed else arrays()
    with small_tiles():
        verify_backward(
            machine(),
            "portable",
            *(q, k, v),
            causal=True,
            alibi_slopes=slopes,
            **({"seqs": RAGGED} if packed else {}),
        )


@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-6])
def test_slopes_beside_any_scale(machine: MakeDevice, scale: float) -> None:
    """Products begin with what ALiBi adds over the scale."""
    slopes = np.array([0.5, 0.1, -0.2, 0], np.float32)
    with small_tiles():
        options = {"causal": True, "alibi_slopes": slopes, "scale": scale}
        verify_backward(machine(), "portable", *arrays(), **options)


@pytest.mark.parametrize(
    ("on_device", "shape"),
    [
        (True, (2, 4, 45, 75)),
        pytest.param(False, (1, 1, 45, 1), marks=pytest.mark.exhaustive),
        pytest.param(False, (2, 1, 75), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_backward_of_a_padded_batch(
    machine: MakeDevice, on_device: bool, shape: tuple[int, ...]
) -> None:
    bias = normal(*shape)
    if shape == (2, 4, 45, 75):
        bias[0, :, :, 60:], bias[1, :, 30:], bias[1, :, :, 1:] = np.nan, np.nan, np.nan
    score_mod = ScoreMod(
        "score + table[q_idx] * log(seqlen_q - q_idx)", wrt="table", table=normal(45)
    )
    with small_tiles():
        verify_backward(
            machine(),
            "portable",
            *arrays(),
            seqs=PADDED,
            bias=bias,
            score_mod=score_mod,
            sink_logits=normal(4),
            window=(11, None),
            on_device=on_device,
        )


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
    """Of every head, of the two heads of a group, and as float32 sums; in rows of any length."""
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
    """Groups of several pairs of heads that share a bias, and groups of three, which have none."""
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
    """One row for all queries, as masks of padding are; it hides keys, all of them in one sequence."""
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
    """Its rows begin anywhere: a copy of it has aligned ones."""
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
