"""Mistakes in a call, as data: each changes one thing in a valid call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.frameworks import Framework
from tests.memory import strided

# The arrays of the valid call, in batch mode and (with `seqs`) packed.
_SHAPES = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 16)}
_PACKED = {"q": (10, 4, 8), "k": (14, 2, 8), "v": (14, 2, 16)}


@dataclass(frozen=True)
class Bad:
    """One mistake.

    change: the arguments that differ, by name. A Shape becomes an array, a dict for `seqs` becomes a SeqLayout.
    """

    name: str
    change: dict[str, Any]
    error: type[Exception]
    says: str  # a regular expression

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Shape:
    """Describes an array that the test makes in its framework when it calls."""

    shape: tuple[int, ...]
    dtype: str = "float16"


def _bad_arrays() -> list[Bad]:
    packed = {name: Shape(shape) for name, shape in _PACKED.items()}
    return [
        Bad("q-no-axes", {"q": Shape(())}, ValueError, r"^q: .*\(\)"),
        Bad("q-two-axes", {"q": Shape((5, 8))}, ValueError, r"^q: .*\(5, 8\)"),
        Bad("q-five-axes", {"q": Shape((1, 2, 5, 4, 8))}, ValueError, r"^q: "),
        Bad("k-three-axes", {"k": Shape((14, 2, 8))}, ValueError, r"^k: "),
        Bad("v-three-axes", {"v": Shape((14, 2, 16))}, ValueError, r"^v: "),
        Bad("packed-without-seqs", packed, ValueError, r"^seqs: .*None"),
        Bad("batch-of-k", {"k": Shape((3, 7, 2, 8))}, ValueError, r"^k: .*3"),
        Bad("rows-of-v", {"v": Shape((2, 6, 2, 16))}, ValueError, r"^v: .*6"),
        Bad("heads-of-v", {"v": Shape((2, 7, 4, 16))}, ValueError, r"^v: .*4"),
        Bad(
            "heads-do-not-divide",
            {"q": Shape((2, 5, 3, 8))},
            ValueError,
            r"nheads_q.*3.*nheads_kv.*2",
        ),
        Bad("headdim-of-k", {"k": Shape((2, 7, 2, 9))}, ValueError, r"^k: .*9"),
        Bad("headdim-0", {"v": Shape((2, 7, 2, 0))}, ValueError, r"^v: "),
        Bad(
            "headdim-257",
            {"q": Shape((2, 5, 4, 257)), "k": Shape((2, 7, 2, 257))},
            ValueError,
            r"257.*256",
        ),
        Bad("headdim-v-300", {"v": Shape((2, 7, 2, 300))}, ValueError, r"^v: .*300.*256"),
        Bad("integers", {"q": Shape((2, 5, 4, 8), "int32")}, TypeError, r"^q: .*int32"),
        Bad(
            "float64",
            {name: Shape(shape, "float64") for name, shape in _SHAPES.items()},
            TypeError,
            r"^q: .*float64",
        ),
        Bad("mixed-dtypes", {"k": Shape(_SHAPES["k"], "float32")}, TypeError, r"^k: .*float32"),
        Bad("q-text", {"q": "text"}, TypeError, r"^q: .*str"),
        Bad("k-none", {"k": None}, TypeError, r"^k: .*None"),
        Bad("v-list", {"v": [[1.0, 2.0]]}, TypeError, r"^v: .*list"),
        Bad("out-shape", {"out": Shape((2, 5, 4, 8))}, ValueError, r"^out: .*\(2, 5, 4, 8\)"),
        Bad("out-dtype", {"out": Shape((2, 5, 4, 16), "float32")}, TypeError, r"^out: .*float32"),
        Bad("out-no-array", {"out": 3}, TypeError, r"^out: .*int"),
    ]


def _bad_options() -> list[Bad]:
    return [
        Bad("causal-text", {"causal": "yes"}, TypeError, r"^causal: .*yes"),
        Bad("align-unknown", {"align": "middle"}, ValueError, r"^align: .*middle.*top-left"),
        Bad("window-number", {"window": 5}, TypeError, r"^window: .*5"),
        Bad("window-one-end", {"window": (5,)}, (ValueError, TypeError), r"^window: "),
        Bad("window-negative", {"window": (-1, 0)}, ValueError, r"^window: .*-1"),
        Bad("window-fraction", {"window": (1.5, 0)}, TypeError, r"^window: .*1\.5"),
        Bad("sink-negative", {"sink": -1}, ValueError, r"^sink: .*-1"),
        Bad("sink-fraction", {"sink": 1.5}, TypeError, r"^sink: .*1\.5"),
        Bad("scale-nan", {"scale": float("nan")}, ValueError, r"^scale: .*nan"),
        Bad("scale-infinite", {"scale": float("inf")}, ValueError, r"^scale: .*inf"),
        Bad("scale-text", {"scale": "big"}, TypeError, r"^scale: .*big"),
        Bad("backend-unknown", {"backend": "tpu"}, ValueError, r"^backend: .*tpu"),
        Bad("dropout-1", {"dropout_p": 1.0, "seed": 1}, ValueError, r"^dropout_p: .*1\.0"),
        Bad("dropout-without-seed", {"dropout_p": 0.1}, (TypeError, ValueError), r"^seed: "),
        Bad("softcap-negative", {"softcap": -1.0}, ValueError, r"^softcap: .*-1"),
        Bad("splits-0", {"num_splits": 0}, ValueError, r"^num_splits: .*0"),
        Bad("splits-257", {"num_splits": 257}, ValueError, r"^num_splits: .*257.*256"),
    ]


def _bad_arrays_of_options() -> list[Bad]:
    """Each message names what was passed, what is accepted, and the sizes from which the accepted shape follows."""
    f32, dropped = "float32", {"dropout_p": 0.1}

    def bias(name: str, shape: tuple[int, ...], says: str, error: Any = ValueError) -> Bad:
        return Bad(f"bias-{name}", {"bias": Shape(shape)}, error, rf"^bias: got {says}")

    def mask(name: str, shape: tuple[int, ...], says: str) -> Bad:
        return Bad(
            f"mask-{name}", {"mask": Shape(shape, "bool")}, ValueError, rf"^mask: got {says}"
        )

    axes = r".*\(1 or 2 \(batch\), 1, 2 \(nheads_kv\) or 4 \(nheads_q\), 1 or 5 .*, 1 or 7 "
    return [
        bias("five-axes", (1, 2, 4, 5, 7), rf"shape \(1, 2, 4, 5, 7\), expected at most four{axes}"),
        bias("five-axes-of-one", (1, 1, 1, 1, 7), rf"shape \(1, 1, 1, 1, 7\), expected at most four{axes}"),
        bias("batch", (3, 4, 5, 7), rf"shape \(3, 4, 5, 7\){axes}"),
        bias("heads", (2, 3, 5, 7), rf"shape \(2, 3, 5, 7\){axes}"),
        bias("rows", (2, 4, 6, 7), rf"shape \(2, 4, 6, 7\){axes}"),
        bias("keys", (8,), rf"shape \(8,\){axes}"),
        bias("of-q", _SHAPES["q"], rf"shape \(2, 5, 4, 8\){axes}"),
        Bad("bias-ints", {"bias": Shape((5, 7), "int32")}, TypeError,
            r"^bias: got dtype int32, expected float16, that of q, or float32; convert it"),
        Bad("bias-bool", {"bias": Shape((5, 7), "bool")}, TypeError, r"^bias: got dtype bool"),
        Bad("bias-number", {"bias": 0.5}, TypeError, r"^bias: got 0\.5 .*expected an array"),
        Bad("bias-list", {"bias": [[0.5]]}, TypeError, r"^bias: got \[\[0\.5\]\] .*an array"),
        mask("batch", (3, 1, 5, 7), rf"shape \(3, 1, 5, 7\){axes}"),
        mask("heads", (1, 8, 5, 7), rf"shape \(1, 8, 5, 7\){axes}"),
        mask("of-padding", (2, 7), r"shape \(2, 7\).*padding mask.*from_padding_mask"),
        Bad("mask-floats", {"mask": Shape((5, 7), f32)}, TypeError,
            r"^mask: got dtype float32, expected bool, where True keeps a key; .*bias="),
        Bad("mask-bytes", {"mask": Shape((5, 7), "uint8")}, TypeError, r"^mask: got dtype uint8"),
        Bad("mask-text", {"mask": "causal"}, TypeError, r"^mask: got 'causal' \(str\)"),
        Bad("alibi-heads", {"alibi_slopes": Shape((2,), f32)}, ValueError,
            r"^alibi_slopes: got shape \(2,\), expected \(nheads_q,\) = \(4,\) or .*\(2, 4\)"),
        Bad("alibi-batch", {"alibi_slopes": Shape((3, 4), f32)}, ValueError, r"^alibi_slopes: got .*3"),
        Bad("alibi-axes", {"alibi_slopes": Shape((2, 4, 1), f32)}, ValueError, r"^alibi_slopes: got "),
        Bad("alibi-ints", {"alibi_slopes": Shape((4,), "int32")}, TypeError,
            r"^alibi_slopes: got dtype int32, expected float32"),
        Bad("alibi-true", {"alibi_slopes": True}, TypeError, r"^alibi_slopes: got True \(bool\)"),
        Bad("sinks-heads", {"sink_logits": Shape((2,), f32)}, ValueError,
            r"^sink_logits: got shape \(2,\), expected \(nheads_q,\) = \(4,\)"),
        Bad("sinks-batch", {"sink_logits": Shape((2, 4), f32)}, ValueError, r"^sink_logits: got "),
        Bad("sinks-ints", {"sink_logits": Shape((4,), "int32")}, TypeError,
            r"^sink_logits: got dtype int32, expected float32"),
        Bad("sinks-number", {"sink_logits": 1}, TypeError, r"^sink_logits: got 1 \(int\)"),
        Bad("seed-bool", {**dropped, "seed": True}, TypeError, r"^seed: got True \(bool\), expected"),
        Bad("seed-fraction", {**dropped, "seed": 1.5}, TypeError, r"^seed: got 1\.5 \(float\)"),
        Bad("seed-two", {**dropped, "seed": Shape((2,), "int32")}, ValueError,
            r"^seed: got shape \(2,\), expected .*one element"),
        Bad("seed-floats", {**dropped, "seed": Shape((1,), f32)}, TypeError,
            r"^seed: got .*float32.*int32 .*int64"),
        Bad("score-mod-text", {"score_mod": "score * 2"}, TypeError,
            r"^score_mod: got 'score \* 2' .*rawattn\.ScoreMod"),
        Bad("score-mod-function", {"score_mod": len}, TypeError, r"^score_mod: got .*rawattn\.ScoreMod"),
        Bad("softcap-text", {"softcap": "30"}, TypeError, r"^softcap: got '30'"),
        Bad("slopes", {"slopes": Shape((4,), f32)}, TypeError, r"^slopes: .*no such argument"),
    ]  # fmt: skip


def _bad_lengths() -> list[Bad]:
    def padded(name: str, seqs: Any, error: type[Exception], says: str) -> Bad:
        return Bad(name, {"seqs": seqs}, error, says)

    def packed(name: str, seqs: Any, error: type[Exception], says: str) -> Bad:
        arrays = {key: Shape(shape) for key, shape in _PACKED.items()}
        return Bad(name, {**arrays, "seqs": seqs}, error, says)

    starts = {"seqstart_q": [0, 5, 10], "seqstart_k": [0, 7, 14]}
    return [
        Bad("seqs-list", {"seqs": [0, 5]}, TypeError, r"^seqs: .*list"),
        packed("starts-fall", {"seqstart_q": [0, 6, 5]}, ValueError, r"^seqstart_q: .*5.*6"),
        packed("start-negative", {"seqstart_q": [-1, 5, 10]}, ValueError, r"^seqstart_q: .*-1"),
        packed("end-past-rows", {"seqstart_q": [0, 5, 11]}, ValueError, r"^seqstart_q: .*11.*10"),
        packed("end-past-keys", {**starts, "seqstart_k": [0, 7, 15]}, ValueError, r"^seqstart_k"),
        packed("only-seqstart-k", {"seqstart_k": [0, 7, 14]}, ValueError, r"^seqstart_k: .*_q"),
        packed("no-starts", {"seqlen_q": [5, 5]}, ValueError, r"^seqs: .*seqstart_q"),
        packed("past-room", {**starts, "seqlen_q": [5, 6]}, ValueError, r"^seqlen_q: .*6.*5"),
        packed("counts", {**starts, "seqlen_q": [5, 5, 0]}, ValueError, r"^seqlen_q: "),
        packed("cu-falls", {**starts, "cu_seqlen_k": [0, 7, 6]}, ValueError, r"^cu_seqlen_k: .*6"),
        packed(
            "max-too-small", {**starts, "max_seqlen_q": 4}, ValueError, r"^max_seqlen_q: .*4.*5"
        ),
        packed("floats", {**starts, "seqlen_q": [5.0, 5.0]}, TypeError, r"^seqlen_q: "),
        packed("bools", {**starts, "seqlen_q": [True, True]}, TypeError, r"^seqlen_q: "),
        packed("two-axes", {**starts, "seqlen_q": [[5, 5]]}, ValueError, r"^seqlen_q: .*\(1, 2\)"),
        padded("starts-in-batch-mode", starts, ValueError, r"^seqs: .*seqstart_q"),
        padded("length-negative", {"seqlen_q": [5, -1]}, ValueError, r"^seqlen_q: .*-1"),
        padded("length-past-rows", {"seqlen_k": [7, 8]}, ValueError, r"^seqlen_k: .*8.*7"),
        padded("wrong-batch", {"seqlen_k": [7, 7, 7]}, ValueError, r"^seqs: .*3.*2"),
        padded("max-is-negative", {"max_seqlen_k": -2}, ValueError, r"^max_seqlen_k: .*-2"),
        padded("max-is-float", {"max_seqlen_k": 7.0}, TypeError, r"^max_seqlen_k: "),
    ]


BAD_CALLS = [*_bad_arrays(), *_bad_options(), *_bad_arrays_of_options(), *_bad_lengths()]


def good_call(framework: Framework) -> dict[str, Any]:
    return {name: _array(framework, Shape(shape)) for name, shape in _SHAPES.items()}


def check_refused(bad: Bad, framework: Framework, call: Callable[..., Any]) -> None:
    """Check that the bad call raises a helpful message and that the valid call after it works."""
    arguments: dict[str, Any] = {name: Shape(shape) for name, shape in _SHAPES.items()}
    arguments |= bad.change
    with pytest.raises(bad.error, match=bad.says):
        # SeqLayout validates some of its arguments itself, so the test constructs it inside `pytest.raises`.
        call(**{name: _argument(framework, x, name) for name, x in arguments.items()})
    out = framework.host(call(**good_call(framework)))
    assert np.all(out.astype(np.float32) == 1), "the call after a refused one is wrong"


def _argument(framework: Framework, value: Any, name: str) -> Any:
    if isinstance(value, Shape):
        return _array(framework, value)
    if name == "seqs" and isinstance(value, dict):
        return rawattn.SeqLayout(**value)
    return value


def _array(framework: Framework, shape: Shape) -> Any:
    dtype = np.dtype(shape.dtype)
    array = strided(shape.shape, np.dtype(np.float16), "dense")
    array = type(array)(
        np.ones(array.buffer.shape, dtype), array.offset, array.shape, array.strides
    )
    return framework.array(array)
