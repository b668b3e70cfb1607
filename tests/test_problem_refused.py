"""Every mistake in shapes, dtypes and options of a call is refused with a message that helps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rawattn._call.integers import LONGEST
from rawattn._call.problem import describe
from tests.problems import BATCH, BFLOAT16, INT32_MAX, PACKED, arrays, problem

# Each row: test id, changed shapes, pattern of the message (name, got, accepted, in this order).
BAD_SHAPES: list[tuple[str, dict[str, tuple[int, ...]], str]] = [
    ("q-two-axes", {"q": (5, 8)}, r"q: .*\(5, 8\).*\(batch, seqlen_q.*\(total_q"),
    ("q-five-axes", {"q": (1, 3, 5, 4, 8)}, r"q: .*\(1, 3, 5, 4, 8\).*\(batch, seqlen_q"),
    ("q-no-axes", {"q": ()}, r"q: .*\(\).*\(batch, seqlen_q"),
    ("k-three-axes", {"k": (21, 2, 8)}, r"k: .*\(21, 2, 8\).*\(batch, seqlen_k, nheads_kv, D\)"),
    ("v-three-axes", {"v": (21, 2, 16)}, r"v: .*\(21, 2, 16\).*\(batch, seqlen_k, nheads_kv, Dv\)"),
    ("packed-k-four-axes", PACKED | {"k": BATCH["k"]}, r"k: .*\(total_k, nheads_kv, D\)"),
    ("packed-without-seqs", PACKED, r"seqs: got None.*seqstart_q"),
    ("batch-of-k", {"k": (2, 7, 2, 8)}, r"k: got batch = 2 .*expected 3, that of q"),
    ("batch-of-v", {"v": (2, 7, 2, 16)}, r"v: got batch = 2 .*expected 3, that of q"),
    ("rows-of-v", {"v": (3, 6, 2, 16)}, r"v: got seqlen_k = 6 .*expected 7, that of k"),
    ("rows-of-packed-v", PACKED | {"v": (20, 2, 16)}, r"v: got total_k = 20 .*expected 21"),
    ("no-heads-of-q", {"q": (3, 5, 0, 8)}, r"q: got nheads_q = 0 .*at least 1"),
    (
        "no-heads-of-k",
        {"k": (3, 7, 0, 8), "v": (3, 7, 0, 16)},
        r"k: got nheads_kv = 0 .*at least 1",
    ),
    (
        "heads-do-not-divide",
        {"q": (3, 5, 3, 8)},
        r"q: got nheads_q = 3 .*multiple of nheads_kv = 2",
    ),
    ("more-heads-of-k", {"q": (3, 5, 1, 8)}, r"q: got nheads_q = 1 .*multiple of nheads_kv = 2"),
    ("heads-of-v", {"v": (3, 7, 4, 16)}, r"v: got nheads_kv = 4 .*expected 2, that of k"),
    ("headdim-0", {"q": (3, 5, 4, 0), "k": (3, 7, 2, 0)}, r"q: got D = 0 .*1 to 256"),
    ("headdim-257", {"q": (3, 5, 4, 257), "k": (3, 7, 2, 257)}, r"q: got D = 257 .*1 to 256"),
    ("headdim-of-k", {"k": (3, 7, 2, 9)}, r"k: got D = 9 .*expected 8, that of q"),
    ("headdim-v-0", {"v": (3, 7, 2, 0)}, r"v: got Dv = 0 .*1 to 256"),
    ("headdim-v-300", {"v": (3, 7, 2, 300)}, r"v: got Dv = 300 .*1 to 256"),
    (
        "seqlen-past-the-longest",
        {"q": (3, LONGEST + 1, 4, 8)},
        rf"q: .*{LONGEST + 1} rows.*at most {LONGEST}",
    ),
    (
        "batch-past-int32",
        {"q": (2**31, 0, 4, 8), "k": (2**31, 0, 2, 8), "v": (2**31, 0, 2, 16)},
        rf"q: got batch = {2**31} .*at most {INT32_MAX}",
    ),
    ("heads-past-int32", {"q": (3, 5, 2**31, 8)}, rf"q: got nheads_q = {2**31} .*at most"),
]


@pytest.mark.parametrize(
    ("shapes", "says"), [pytest.param(*row, id=name) for name, *row in BAD_SHAPES]
)
def test_shapes_refused(shapes: dict[str, tuple[int, ...]], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        problem(BATCH | shapes)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "dtype", ["float64", "int32", "int8", "bool", "complex64", ">f4", "float8_e4m3fn"]
)
def test_dtypes_refused(name: str, dtype: str) -> None:
    given = arrays(BATCH)
    given[name] = np.zeros(BATCH[name], dtype)
    accepted = rf"float16, bfloat16 or float32.*{name}\.astype"
    with pytest.raises(TypeError, match=rf"^{name}: got dtype {dtype}, expected {accepted}"):
        describe(**given)


@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_dtypes_refused(name: str) -> None:
    given = arrays(BATCH) | arrays({name: BATCH[name]}, BFLOAT16)
    says = rf"^{name}: got dtype bfloat16, expected float16, that of q; .*{name}\.astype"
    with pytest.raises(TypeError, match=says):
        describe(**given)


# Each row: test id, options, error, pattern of the message.
BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("seqs-list", {"seqs": [0, 5]}, TypeError, r"seqs: got list, expected a SeqLayout"),
    ("causal-int", {"causal": 1}, TypeError, r"causal: got 1 \(int\), expected a bool"),
    ("causal-none", {"causal": None}, TypeError, r"causal: got None .*expected a bool"),
    ("causal-array", {"causal": np.array([True])}, TypeError, r"causal: .*ndarray.*\(1,\).*bool"),
    ("align-other", {"align": "middle"}, ValueError, r"align: got 'middle' .*'bottom-right' or "),
    ("align-none", {"align": None}, TypeError, r"align: got None .*'bottom-right' or 'top-left'"),
    ("align-list", {"align": ["top-left"]}, TypeError, r"align: got \['top-left'\] .*'bottom-r"),
    ("window-int", {"window": 5}, TypeError, r"window: got 5 \(int\), expected a tuple"),
    ("window-list", {"window": [5, 0]}, TypeError, r"window: got \[5, 0\] \(list\).*a tuple.*tuple\(window\)"),
    ("window-one", {"window": (5,)}, ValueError, r"window: got \(5,\) .*\(left, right\)"),
    ("window-three", {"window": (5, 0, 1)}, ValueError, r"window: got \(5, 0, 1\) .*\(left, right"),
    ("window-minus-1", {"window": (-1, 0)}, ValueError, r"window: got -1, .*>= 0, or None"),
    ("window-right-below-0", {"window": (0, -3)}, ValueError, r"window: got -3, .*>= 0"),
    ("window-float", {"window": (1.0, 0)}, TypeError, r"window: got 1\.0 \(float\).*ints >= 0"),
    ("window-of-arrays", {"window": (np.array([3]), 0)}, TypeError, r"window: got \(ndarray\), expected.*int\(left\)"),
    ("window-bool", {"window": (True, 0)}, TypeError, r"window: got True \(bool\).*ints >= 0"),
    ("window-numpy-bool", {"window": (0, np.True_)}, TypeError, r"window: .*ints >= 0"),
    ("window-array", {"window": np.array([1, 0])}, TypeError, r"window: .*ndarray.*\(2,\).*tuple"),
    (
        "window-checked-under-causal",
        {"window": (0, -3), "causal": True},
        ValueError,
        r"window: got -3",
    ),
    ("sink-below-0", {"sink": -1}, ValueError, r"sink: got -1, expected an int >= 0"),
    ("sink-float", {"sink": 1.5}, TypeError, r"sink: got 1\.5 \(float\), expected an int >= 0"),
    ("sink-float-0", {"sink": 0.0}, TypeError, r"sink: got 0\.0 \(float\), expected an int >= 0"),
    ("sink-bool", {"sink": False}, TypeError, r"sink: got False \(bool\), expected an int >= 0"),
    ("sink-none", {"sink": None}, TypeError, r"sink: got None .*expected an int >= 0"),
    ("sink-array", {"sink": np.array(2)}, TypeError, r"sink: .*ndarray.*expected an int >= 0"),
    ("scale-nan", {"scale": math.nan}, ValueError, r"scale: got nan .*finite"),
    ("scale-infinite", {"scale": -math.inf}, ValueError, r"scale: got -inf .*finite"),
    ("scale-past-float32", {"scale": 1e39}, ValueError, r"scale: got 1e\+39 .*at most 1\.7e\+38"),
    ("scale-past-float64", {"scale": 10**400}, ValueError, r"scale: got 1000.*at most 1\.7e\+38"),
    ("scale-numpy-nan", {"scale": np.float32("nan")}, ValueError, r"scale: got .*nan.*finite"),
    ("scale-bool", {"scale": True}, TypeError, r"scale: got True \(bool\).*None for 1/sqrt\(D\)"),
    ("scale-complex", {"scale": 1j}, TypeError, r"scale: got 1j \(complex\).*finite number"),
    ("scale-text", {"scale": "1"}, TypeError, r"scale: got '1' \(str\).*finite number"),
    ("scale-array", {"scale": np.ones(2)}, TypeError, r"scale: .*ndarray.*\(2,\).*finite number"),
    ("scale-0d-array", {"scale": np.array(1.0)}, TypeError, r"scale: .*ndarray.*\(\).*number"),
    ("softcap-0", {"softcap": 0.0}, ValueError, r"softcap: got 0\.0 .*above 0"),
    ("softcap-below-0", {"softcap": -1}, ValueError, r"softcap: got -1 .*above 0"),
    ("softcap-nan", {"softcap": math.nan}, ValueError, r"softcap: got nan .*finite"),
    ("softcap-infinite", {"softcap": math.inf}, ValueError, r"softcap: got inf .*finite"),
    ("softcap-beyond-float32", {"softcap": 1e39}, ValueError, r"softcap: got 1e\+39 .*None for no"),
    ("softcap-tiny", {"softcap": 1e-40}, ValueError, r"softcap: got 1e-40 .*from 8\.7e-19 to"),
    ("softcap-text", {"softcap": "30"}, TypeError, r"softcap: got '30' .*finite number"),
    ("dropout-1", {"dropout_p": 1.0, "seed": 1}, ValueError, r"dropout_p: got 1\.0 .*\[0, 1\)"),
    ("dropout-below-0", {"dropout_p": -0.1, "seed": 1}, ValueError, r"dropout_p: got -0\.1 .*\[0,"),
    ("dropout-nan", {"dropout_p": math.nan, "seed": 1}, ValueError, r"dropout_p: got nan .*\[0, 1"),
    ("dropout-none", {"dropout_p": None}, TypeError, r"dropout_p: got None .*\[0, 1\)"),
    ("dropout-bool", {"dropout_p": False}, TypeError, r"dropout_p: got False .*\[0, 1\)"),
    ("dropout-without-seed", {"dropout_p": 0.1}, ValueError, r"seed: got None, .*integer.*0\.1"),
    ("seed-float", {"seed": 1.5}, TypeError, r"seed: got 1\.5 \(float\), expected an int"),
    ("seed-bool", {"seed": True}, TypeError, r"seed: got True \(bool\), expected an int"),
    ("seed-text", {"seed": "abc"}, TypeError, r"seed: got 'abc' \(str\), expected an int"),
    ("seed-text-unread", {"seed": "abc", "sink_logits": np.zeros(4, np.float32)}, TypeError, r"seed: got 'abc' "),
    ("seed-bool-unread", {"seed": False, "bias": np.zeros((5, 6), np.float16)}, TypeError, r"seed: got False "),
    ("seed-two", {"seed": np.array([1, 2])}, ValueError, r"seed: got shape \(2,\), .*one element"),
    ("seed-float-array", {"seed": np.array([1.0])}, TypeError, r"seed: got float64.*int64"),
    ("splits-0", {"num_splits": 0}, ValueError, r"num_splits: got 0, .*1 to 256, or None"),
    ("splits-257", {"num_splits": 257}, ValueError, r"num_splits: got 257, .*1 to 256, or None"),
    ("splits-below-0", {"num_splits": -1}, ValueError, r"num_splits: got -1, .*1 to 256"),
    ("splits-float", {"num_splits": 2.0}, TypeError, r"num_splits: got 2\.0 .*1 to 256"),
    ("splits-bool", {"num_splits": True}, TypeError, r"num_splits: got True .*1 to 256"),
    ("bias-text", {"bias": "x"}, TypeError, r"bias: got 'x' \(str\), expected an array"),
    ("mask-list", {"mask": [True]}, TypeError, r"mask: got \[True\] \(list\), expected an array"),
    ("alibi-float", {"alibi_slopes": 0.5}, TypeError, r"alibi_slopes: got 0\.5 .*an array"),
    ("sink-logits-int", {"sink_logits": 1}, TypeError, r"sink_logits: got 1 .*an array"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "says"), [pytest.param(*row, id=name) for name, *row in BAD_OPTIONS]
)
def test_options_refused(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        problem(**options)


def test_a_mistake_in_a_number_is_told_before_one_in_an_array() -> None:
    with pytest.raises(ValueError, match=r"^softcap: "):
        problem(bias=np.zeros((5, 6), np.float32), softcap=-1.0)
    with pytest.raises(ValueError, match=r"^scale: "):
        problem(bias=np.zeros((5, 6), np.float32), scale=math.nan)
