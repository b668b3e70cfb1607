"""What changes scores and probabilities, in whole forwards on the CPU machine, against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import ScoreMod, reference
from tests.shim.device import MakeDevice
from tests.shim.whole import run_forward, small_tiles, verify_forward

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))
WAVES = (32, 64)


def arrays(
    dtype: Any = BFLOAT16,
    *,
    batch: int = 2,
    rows: tuple[int, int] = (45, 75),
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (24, 16),
    seed: int = 0,
) -> tuple[np.ndarray, ...]:
    """q, k, v of a dense batch."""
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, rows[0], heads[0], dims[0]),
        (batch, rows[1], heads[1], dims[0]),
        (batch, rows[1], heads[1], dims[1]),
    )
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def normal(*shape: int, dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def hiding(bias: np.ndarray, seed: int = 2) -> np.ndarray:
    """With -inf in a third of it, and in all of its first row."""
    bias[np.random.default_rng(seed).random(bias.shape) < 1 / 3] = -np.inf
    bias[..., 0, :] = -np.inf
    return bias


def option(name: str, dtype: Any) -> dict[str, Any]:
    """What a call has of one option. The batch is `arrays()`."""
    match name:
        case "softcap":
            return {"softcap": 1.5, "scale": 1.0}
        case "bias":
            return {"bias": hiding(normal(2, 4, 45, 75, dtype=dtype))}
        case "bias-float32":
            return {"bias": normal(1, 2, 45, 75), "causal": True}
        case "bias-broadcast":
            return {"bias": normal(1, 1, 1, 75, dtype=dtype)}
        case "bias-strided":
            return {"bias": normal(2, 75, 45, 4, dtype=dtype).transpose(0, 3, 2, 1)}
        case "bias-rows":
            return {"bias": normal(4, 45, 1, dtype=dtype), "window": (20, 5)}
        case "bias-least":
            bias = normal(2, 4, 45, 75, dtype=dtype)
            bias[..., 5:9, :] = (
                np.finfo(dtype).min if dtype != BFLOAT16 else ml_dtypes.finfo(dtype).min
            )
            return {"bias": bias, "causal": True}
        case "alibi-top-left":
            return {"alibi_slopes": np.abs(normal(4)), "align": "top-left"}
        case "alibi":
            return {"alibi_slopes": np.abs(normal(4)), "window": (30, 4)}
        case "alibi-causal":
            return {"alibi_slopes": normal(2, 4), "causal": True}
        case "sinks":
            return {"sink_logits": normal(4), "window": (9, 0)}
        case "sinks-hidden":
            return {"sink_logits": np.array([2, -np.inf, 0.5, -np.inf], np.float16), "causal": True}
        case "dropout":
            return {"dropout_p": 0.3, "seed": (1 << 63) + 12345}
        case "dropout-seed-on-device":
            return {"dropout_p": 0.6, "seed": np.array([-3]), "causal": True}
        case "score_mod":
            slope, table = normal(4), normal(45, 75, dtype=dtype, seed=3)
            text = "score + slope[head] * (kv_idx - q_idx) * rate + table[q_idx, kv_idx] * score"
            return {
                "score_mod": ScoreMod(text, slope=slope, table=table, rate=0.25),
                "causal": True,
            }
        case "score_mod-hiding":
            text = "where((q_idx + kv_idx) % 3 == 0 or q_idx == 4, -inf, tanh(score) * 2 + batch)"
            return {"score_mod": ScoreMod(text), "softcap": 2.0}
        case "everything":
            return {
                **{"softcap": 2.0, "scale": -0.7, "window": (40, 6), "sink": 3},
                **{"bias": hiding(normal(2, 4, 45, 75)), "alibi_slopes": normal(4)},
                **{"sink_logits": normal(4), "dropout_p": 0.2, "seed": 7},
                "score_mod": ScoreMod("where(score < 1, score * score, 2 * score - 1)"),
            }
    raise KeyError(name)


OPTIONS = (
    "softcap",
    "bias",
    "bias-float32",
    "bias-broadcast",
    "bias-strided",
    "bias-rows",
    "bias-least",
    "alibi-top-left",
    "alibi",
    "alibi-causal",
    "sinks",
    "sinks-hidden",
    "dropout",
    "dropout-seed-on-device",
    "score_mod",
    "score_mod-hiding",
    "everything",
)
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


RAGGED = rawattn.SeqLayout(seqstart_q=[0, 40, 40, 61], seqstart_k=[0, 33, 40, 110])
PADDED = rawattn.SeqLayout(seqlen_q=[45, 30], seqlen_k=[60, 1])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("wave", WAVES)
def test_forward_of_a_ragged_batch(machine: MakeDevice, wave: int, on_device: bool) -> None:
    """Positions are those in the sequence; the bias is longer than any of them, and NaN where there are none."""
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
    """And NaN in keys that nobody sees does not reach it."""
    q, k, v = arrays(rows=(9, 4))
    logits = np.array([1.5, -np.inf, -2, 0], np.float32)
    # bottom-right: the first five rows see nothing
    with small_tiles():
        out, lse = run_forward(
            machine(), "portable", q, k, v, causal=True, sink_logits=logits, softcap=5.0
        )
    exact = reference.attention(q, k, v, causal=True, sink_logits=logits, softcap=5.0)
    assert np.all(out[:, :5] == 0) and np.any(exact[:, 5:] != 0)
    np.testing.assert_array_equal(lse[:, :, :5], np.broadcast_to(logits[:, None], (2, 4, 5)))


@pytest.mark.parametrize("wave", WAVES)
def test_dropout_does_not_depend_on_tiles(machine: MakeDevice, wave: int) -> None:
    """The sum of what is kept, of values that are all 1, is exact in float32."""
    q, k, v = arrays(np.float32, dims=(16, 16))
    q, v = q * 0, np.ones_like(v)
    found = []
    for shape in ((32, 16, 2, 2, 1, False), (48, 32, 1, 1, 1, False)):
        with small_tiles(portable_forward=shape):
            out, _ = run_forward(machine(wave), "portable", q, k, v, dropout_p=0.5, seed=11)
        found.append(np.rint(out * 75 / 2))
    np.testing.assert_array_equal(*found)
    assert 20 < found[0].mean() < 55
