"""Small calls with options that change scores and probabilities, for the simulator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import rawattn
from rawattn import ScoreMod

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
    """The bias with -inf in a third of its elements and in all of its first row."""
    bias[np.random.default_rng(seed).random(bias.shape) < 1 / 3] = -np.inf
    bias[..., 0, :] = -np.inf
    return bias


def option(name: str, dtype: Any) -> dict[str, Any]:
    """The keyword arguments of one option, for the batch `arrays()`."""
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


RAGGED = rawattn.SeqLayout(seqstart_q=[0, 40, 40, 61], seqstart_k=[0, 33, 40, 110])
PADDED = rawattn.SeqLayout(seqlen_q=[45, 30], seqlen_k=[60, 1])
