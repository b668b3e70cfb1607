"""The options that change scores and probabilities, as fields of a `Case`, and the arrays that they take.

Elements outside every sequence are NaN in a bias and random in a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

import rawattn
from tests.memory import DTYPES, Strided, expanded_axis, option_array

# Score options, as fields of `Case`, in the order in which error messages list missing ones.
OPTIONS = (
    "softcap",
    "score_mod",
    "bias",
    "alibi_slopes",
    "mask",
    "sink_logits",
    "dropout_p",
)
_FULL, _LONG = 128, 200  # keys of one key tile, and of several


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """A bias or mask, as an array that broadcasts to (batch, heads, rows, keys).

    heads: "one", "kv" or "q". short: without leading axes of one element. beyond: extra rows and keys past the longest
    sequence, in group mode. float32: makes a bias float32, whatever the dtype of q.
    """

    values: str = "normal"
    batch: bool = True
    heads: str = "q"
    rows: bool = True
    keys: bool = True
    short: bool = False
    beyond: tuple[int, int] = (0, 0)
    layout: str = "dense"
    float32: bool = False


class Sizes(Protocol):
    """The attributes of a `Case` that this module reads."""

    dtype: str
    nheads_q: int
    nheads_kv: int
    packed: bool
    on_device: bool
    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    bias: Pairs | None
    mask: Pairs | None
    alibi_slopes: str
    sink_logits: str
    dropout_p: float
    drawn_by: str
    score_mod: str
    seed: int

    @property
    def side_q(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
    @property
    def side_k(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...


# By name: (text, captured arrays, the captured arrays that have a gradient).
SCORE_MODS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "scaled": ("score * 1.25", (), ()),
    "relative": ("score + 0.02 * (kv_idx - q_idx)", (), ()),
    "tanh": ("3 * tanh(score / 3)", (), ()),
    "hidden": ("where((q_idx + kv_idx) % 3 == 0, -inf, score)", (), ()),
    "positions": (
        "score + 0.3 * (batch % 2) - 0.1 * head + 0.05 * kv_head + (seqlen_k - seqlen_q) / 512.0",
        (),
        (),
    ),
    "slopes": ("score - slope[head] * abs(q_idx - kv_idx) / 16", ("slope",), ("slope",)),
    "table": (
        "score + table[q_idx % 5, kv_idx % 7] - constant[kv_head]",
        ("table", "constant"),
        ("table",),
    ),
}


def captured_arrays(case: Sizes) -> dict[str, Strided]:
    if not case.score_mod:
        return {}
    rng = np.random.default_rng([7, case.seed])
    shapes = {"slope": (case.nheads_q,), "table": (5, 7), "constant": (case.nheads_kv,)}
    found = {}
    for name in SCORE_MODS[case.score_mod][1]:
        array = option_array(shapes[name], DTYPES["float32"], "gaps")
        array.view()[...] = rng.standard_normal(shapes[name])
        found[name] = array
    return found


def score_mod_of(case: Sizes, captured: dict[str, Any]) -> Any:
    text, _, wrt = SCORE_MODS[case.score_mod]
    return rawattn.ScoreMod(text, wrt=wrt, **captured)


def arrays_of(case: Sizes) -> dict[str, Strided]:
    """Return the option arrays by option name, including the seed if it is an array."""
    rng = np.random.default_rng([5, case.seed])
    found: dict[str, Strided] = {}
    if case.bias is not None:
        dtype = DTYPES["float32" if case.bias.float32 else case.dtype]
        found["bias"] = _pairs(case, case.bias, dtype, rng)
    if case.mask is not None:
        found["mask"] = _pairs(case, case.mask, np.dtype(bool), rng)
    if case.alibi_slopes:
        found["alibi_slopes"] = _slopes(case)
    if case.sink_logits:
        found["sink_logits"] = _sinks(case, rng)
    if case.dropout_p and case.drawn_by != "int":
        found["seed"] = _seed(case)
    return found


def seed_of(case: Sizes) -> int:
    return 0x5_1234_5678 + 977 * case.seed


def _seed(case: Sizes) -> Strided:
    dtype = np.dtype(case.drawn_by)
    value = np.array([seed_of(case) % 2**31 if dtype.itemsize == 4 else -seed_of(case)], dtype)
    return Strided(value, 0, () if case.seed % 2 else (1,), () if case.seed % 2 else (1,))


def _slopes(case: Sizes) -> Strided:
    """ALiBi slopes. With more than two heads, one slope is negative and so rewards distance."""
    slopes = 2.0 ** -(8 * np.arange(1, case.nheads_q + 1) / case.nheads_q)
    if case.nheads_q > 2:
        slopes[1] *= -0.25
    if case.alibi_slopes == "negative":
        slopes = -4.0 * slopes
    if case.alibi_slopes == "batch":
        slopes = slopes * (1 + np.arange(len(case.lens_q)))[:, None] / 4
    layout = "steps" if case.seed % 2 else "dense"
    array = option_array(slopes.shape, DTYPES["float32"], layout)
    array.view()[...] = slopes
    return array


def _sinks(case: Sizes, rng: np.random.Generator) -> Strided:
    """Learned sinks; with "hidden" those of every other head are -inf."""
    logits = 2 * rng.standard_normal(case.nheads_q)
    if case.sink_logits == "hidden":
        logits[::2] = -np.inf
    dtype = DTYPES["float32" if case.seed % 2 else case.dtype]
    array = option_array(logits.shape, dtype, "steps" if case.seed % 3 == 1 else "dense")
    array.view()[...] = logits.astype(dtype)
    return array


def _pairs(case: Sizes, spec: Pairs, dtype: np.dtype, rng: np.random.Generator) -> Strided:
    whole = pairs_shape(case, spec)
    array = option_array(whole, dtype, spec.layout)
    view = array.view()
    used = pairs_used(case, spec)
    values = _values(spec.values, whole, dtype, rng, _least(case))
    if dtype.kind == "b":
        # Elements outside every sequence are random: kernels must not read them, nor skip a tile because of them.
        values = np.where(used, values, rng.random(whole) < 0.5)
    else:
        values = np.where(used, values, np.nan)
    if spec.layout == "expanded" and (axis := expanded_axis(whole)) is not None:
        first = np.expand_dims(
            np.argmax(used, axis=axis), axis
        )  # of an element inside a sequence, if there is one
        values = np.broadcast_to(np.take_along_axis(values, first, axis), whole)
    with np.errstate(over="ignore"):
        view[...] = values.astype(dtype)
    if spec.short:
        lead = next((n for n, extent in enumerate(whole) if extent != 1), len(whole) - 1)
        array = Strided(array.buffer, array.offset, whole[lead:], array.strides[lead:])
    return array


def pairs_shape(case: Sizes, spec: Pairs) -> tuple[int, int, int, int]:
    """Return the shape with all four axes. An axis along which lengths on a GPU count has an element, whatever they are."""
    least = 1 if case.packed and case.on_device else 0
    sides = (
        max(*(lens if case.packed else rooms), least, 0) + (beyond if case.packed else 0)
        for (lens, rooms), beyond in zip((case.side_q, case.side_k), spec.beyond, strict=True)
    )
    rows, keys = (
        extent if has else 1 for extent, has in zip(sides, (spec.rows, spec.keys), strict=True)
    )
    heads = {"one": 1, "kv": case.nheads_kv, "q": case.nheads_q}[spec.heads]
    return len(case.lens_q) if spec.batch else 1, heads, rows, keys


def pairs_used(case: Sizes, spec: Pairs) -> np.ndarray:
    """True where some sequence has both the row and the key."""
    shape = pairs_shape(case, spec)
    used = np.zeros(shape, bool)
    for n, (rows, keys) in enumerate(zip(case.lens_q, case.lens_k, strict=True)):
        if rows and keys:
            used[
                n if spec.batch else 0, :, : rows if spec.rows else 1, : keys if spec.keys else 1
            ] = True
    return used


def _least(case: Sizes) -> float:
    """Return the large negative number with which a bias hides keys.

    float16 uses -6e4, because its least number would overflow when a score is added.
    """
    return -6e4 if case.dtype == "float16" else float(ml_dtypes.finfo(case.dtype).min)


def _values(
    kind: str, shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator, least: float
) -> np.ndarray:
    i, j = np.arange(shape[2])[:, None], np.arange(shape[3])[None, :]
    # Predicates of the visible pairs: True in a mask, and finite in a bias.
    kept = {
        "random": lambda: rng.random(shape) < 0.7,
        "sparse": lambda: rng.random(shape) < 0.05,
        "checkerboard": lambda: (i + j) % 2 == 0,
        "anti-causal": lambda: j > i,
        "tiles": lambda: (i // 64 + j // 64) % 2 == 0,
        "late-keys": lambda: j >= min(_LONG, shape[3] // 2),  # leading tiles have no visible key
        "early-keys": lambda: j < _FULL // 2,
        "some-rows": lambda: (i % 3 != 1) & (j >= 0),  # hidden rows within visible tiles
        "late-start": lambda: (
            j >= (i * 37) % (_FULL + 50)
        ),  # the first visible key differs between rows
        "diagonal": lambda: i == j,
        "nothing": lambda: np.zeros(shape, bool),
    }.get(kind)
    if dtype.kind == "b":
        assert kept is not None or kind == "everything", kind
        return np.broadcast_to(True if kept is None else kept(), shape)
    drawn = rng.standard_normal(shape)
    if kept is not None:
        return np.where(kept(), drawn, -np.inf)
    if kind == "least":
        return np.where(rng.random(shape) < 0.3, least, drawn)
    if kind == "least-rows":
        return np.where((i % 4 == 2) & (j >= 0), least, drawn)
    assert kind in ("normal", "large"), kind
    return drawn * (20 if kind == "large" else 1)
