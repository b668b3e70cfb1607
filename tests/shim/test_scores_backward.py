"""Gradients with options that change scores and probabilities: whole calls on the simulator, against the reference."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import Gradients, ScoreMod
from tests import exhaustive
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
from tests.shim.whole import small_tiles, verify_backward

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


# The options of every run: all together, with both wave sizes, and those with code of their own in more than one kernel.
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
    "score": ("score + table[int(min(abs(score), 0)) + head]", {"table": (4,)}),  # of head, to the eye
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wave"),
    exhaustive.thin(((name, wave) for wave in WAVES for name in CAPTURED), 5),
)
def test_captured_gradients(machine: MakeDevice, name: str, wave: int) -> None:
    """Gradients of captured arrays are right, also in a second run."""
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
    """Deterministic gradients of captured arrays are the same bits in a second call."""
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
    """Gradients of captured arrays are right in ragged batches, where two kernels of query tiles share one order."""
    seqs = rawattn.SeqLayout(seqstart_q=[0, 30, 30, 45], seqstart_k=[0, 20, 61, 75])
    q, k, v = (x[0] for x in arrays())
    score_mod = ScoreMod("score * slope[head]", wrt="slope", slope=normal(4))
    options = {"seqs": seqs, "score_mod": score_mod, "deterministic": True}
    with small_tiles():
        for on_device in (False, True):
            verify_backward(machine(), "portable", q, k, v, on_device=on_device, **options)


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


@pytest.mark.parametrize(
    ("wave", "on_device", "deterministic"),
    exhaustive.thin(itertools.product(WAVES, (False, True), (False, True)), 10),
)
def test_backward_of_a_ragged_batch(
    machine: MakeDevice, wave: int, on_device: bool, deterministic: bool
) -> None:
    """Gradients are right in a ragged batch. Beyond the sequences the bias is NaN, and its gradient must be 0."""
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
    """Negative ALiBi slopes are right, although the scores of padding rows would overflow."""
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
    """ALiBi is right with a scale of 0, below 0 or tiny, although Q K^T accumulators start from its term over the scale."""
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
