"""Problem: what a call means, and every mistake in one is refused with a message that helps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from rawattn._call.checks import check_out
from rawattn._call.layout import SeqLayout
from rawattn._call.options import Options, structural
from rawattn._call.problem import Problem, describe, result_shapes
from rawattn._runtime.verbs import FORWARD, with_arrays

INT32_MAX = 2**31 - 1
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# D 8, Dv 16, four query heads in groups of two.
BATCH = {"q": (3, 5, 4, 8), "k": (3, 7, 2, 8), "v": (3, 7, 2, 16)}
PACKED = {"q": (15, 4, 8), "k": (21, 2, 8), "v": (21, 2, 16)}
STARTS = SeqLayout(seqstart_q=[0, 5, 15], seqstart_k=[0, 7, 21])


def arrays(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float16) -> dict[str, np.ndarray]:
    """Arrays of any size without the memory for them."""
    return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, shape in shapes.items()}


def problem(shapes: dict[str, tuple[int, ...]] = BATCH, **options: Any) -> Problem:
    """As a verb describes a call: arrays of options are inputs of their own."""
    given = with_arrays(FORWARD, Options(**options))
    named = dict(zip(given.verb.extras, given.arrays, strict=True))
    return describe(**arrays(shapes), options=given.options, arrays=named)[0]


# -- what a call means ---------------------------------------------------------------------------


def test_a_dense_batch() -> None:
    described, lengths = describe(**arrays(BATCH))
    assert described == Problem(
        dtype="float16",
        batch=3,
        nheads_q=4,
        nheads_kv=2,
        headdim=8,
        headdim_v=16,
        group=False,
        rows_q=5,
        rows_k=7,
        max_seqlen_q=5,
        max_seqlen_k=7,
        ragged=False,
        window_left=None,
        window_right=None,
        sink=0,
        top_left=False,
        scale=1 / math.sqrt(8),
    )
    assert (lengths.batch, lengths.q.rows, lengths.k.rows) == (3, 5, 7)


def test_a_packed_batch() -> None:
    described, lengths = describe(**arrays(PACKED), seqs=STARTS)
    assert (described.group, described.ragged, described.batch) == (True, True, 2)
    assert (described.rows_q, described.rows_k) == (15, 21)
    assert (described.max_seqlen_q, described.max_seqlen_k) == (10, 14)
    assert lengths.group


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "cu_seqlen_q", "cu_seqlen_k"])
def test_a_padded_batch_is_ragged(name: str) -> None:
    integers = [0, 1, 2, 3] if name.startswith("cu") else [1, 2, 3]
    described = problem(seqs=SeqLayout(**{name: integers}))
    assert (described.group, described.ragged) == (False, True)


def test_a_layout_without_lengths_is_not_ragged() -> None:
    assert problem(seqs=SeqLayout()) == problem()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes(dtype: Any) -> None:
    assert describe(**arrays(BATCH, dtype))[0].dtype == np.dtype(dtype).name


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 2, np.float32(0.25), np.int64(3), 2.0**127])
def test_scale_becomes_a_float(scale: Any) -> None:
    described = problem(scale=scale).scale
    assert type(described) is float
    assert described == scale


def test_a_bfloat16_scale() -> None:
    assert problem(scale=ml_dtypes.bfloat16(0.25)).scale == 0.25


@pytest.mark.parametrize(
    ("options", "left", "right", "sink"),
    [
        pytest.param({}, None, None, 0, id="none"),
        pytest.param({"causal": True}, None, 0, 0, id="causal"),
        pytest.param({"causal": np.bool_(True)}, None, 0, 0, id="numpy-causal"),
        pytest.param({"causal": np.bool_(False)}, None, None, 0, id="numpy-not-causal"),
        pytest.param({"window": (3, 4)}, 3, 4, 0, id="window"),
        pytest.param({"window": (0, 0)}, 0, 0, 0, id="diagonal"),
        pytest.param({"window": (None, 4)}, None, 4, 0, id="right-alone"),
        pytest.param({"window": (3, None)}, 3, None, 0, id="left-alone"),
        pytest.param({"window": (None, None)}, None, None, 0, id="unbounded"),
        pytest.param({"window": (np.int32(3), np.int64(4))}, 3, 4, 0, id="numpy-window"),
        pytest.param({"window": (3, 4), "causal": True}, 3, 0, 0, id="causal-over-right"),
        pytest.param({"window": (3, None), "causal": True}, 3, 0, 0, id="causal-bounds-right"),
        pytest.param({"window": (2**70, 2**70)}, None, None, 0, id="huge"),
        pytest.param({"window": (3, 0), "sink": 2}, 3, 0, 2, id="sink"),
        pytest.param({"window": (3, 0), "sink": np.int64(2)}, 3, 0, 2, id="numpy-sink"),
        pytest.param({"causal": True, "sink": 2}, None, 0, 0, id="sink-without-left"),
        pytest.param({"window": (3, 0), "sink": 2**70}, 3, 0, INT32_MAX, id="huge-sink"),
    ],
)
def test_window_and_sink(
    options: dict[str, Any], left: int | None, right: int | None, sink: int
) -> None:
    described = problem(**options)
    assert (described.window_left, described.window_right, described.sink) == (left, right, sink)
    for value in (described.window_left, described.window_right, described.sink):
        assert value is None or type(value) is int


@pytest.mark.parametrize(("align", "top_left"), [("bottom-right", False), ("top-left", True)])
def test_align(align: str, top_left: bool) -> None:
    assert problem(align=align).top_left is top_left


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"seed": 7}, id="seed"),
        pytest.param({"seed": -(2**80)}, id="any-int-seed"),
        pytest.param({"seed": np.array([7])}, id="array-seed"),
        pytest.param({"dropout_p": 0}, id="int-dropout"),
        pytest.param({"dropout_p": np.float32(0)}, id="numpy-dropout"),
        pytest.param({"dropout_p": 0.0, "seed": np.int32(3)}, id="dropout-0-with-seed"),
    ],
)
def test_options_that_change_nothing(options: dict[str, Any]) -> None:
    assert problem(**options) == problem()


@pytest.mark.parametrize(
    ("change", "seqs"),
    [
        pytest.param({"q": (0, 5, 4, 8), "k": (0, 7, 2, 8), "v": (0, 7, 2, 16)}, None, id="batch"),
        pytest.param({"q": (3, 0, 4, 8)}, None, id="seqlen-q"),
        pytest.param({"k": (3, 0, 2, 8), "v": (3, 0, 2, 16)}, None, id="seqlen-k"),
        pytest.param(
            {"q": (0, 4, 8), "k": (0, 2, 8), "v": (0, 2, 16)},
            SeqLayout(seqstart_q=[0, 0]),
            id="totals",
        ),
        pytest.param(PACKED, SeqLayout(seqstart_q=[3], seqstart_k=[3]), id="packed-batch"),
    ],
)
def test_axes_of_length_0(change: dict[str, tuple[int, ...]], seqs: Any) -> None:
    described = problem(BATCH | change, seqs=seqs)
    assert min(described.batch, described.rows_q, described.rows_k) == 0


@pytest.mark.parametrize("headdim", [1, 3, 256])
@pytest.mark.parametrize("headdim_v", [1, 256])
def test_headdims(headdim: int, headdim_v: int) -> None:
    described = problem(
        {"q": (1, 2, 2, headdim), "k": (1, 2, 1, headdim), "v": (1, 2, 1, headdim_v)}
    )
    assert (described.headdim, described.headdim_v) == (headdim, headdim_v)


def test_result_shapes() -> None:
    assert result_shapes(problem()) == ((3, 5, 4, 16), (3, 4, 5))
    assert result_shapes(problem(PACKED, seqs=STARTS)) == ((15, 4, 16), (4, 15))


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param({"q": (3, INT32_MAX, 4, 8)}, id="seqlen"),
        pytest.param(
            {"q": (3, 5, INT32_MAX, 8), "k": (3, 7, 1, 8), "v": (3, 7, 1, 16)}, id="heads"
        ),
        pytest.param(
            {name: (INT32_MAX, 0, *shape[2:]) for name, shape in BATCH.items()}, id="batch"
        ),
    ],
)
def test_int32_itself_is_legal(shapes: dict[str, tuple[int, ...]]) -> None:
    described = problem(BATCH | shapes)
    assert max(described.rows_q, described.nheads_q, described.batch) == INT32_MAX


def test_a_total_past_int32_is_legal() -> None:
    rows = 2**32
    shapes = {"q": (rows, 4, 8), "k": (rows, 2, 8), "v": (rows, 2, 16)}
    described = problem(shapes, seqs=SeqLayout(seqstart_q=[0, 2**31 - 1, 2**31]))
    assert (described.rows_q, described.max_seqlen_q) == (rows, INT32_MAX)


def test_describe_is_fast() -> None:
    """Beside the making of what it returns: a limit in seconds would be one of the machine."""
    given = arrays(BATCH, BFLOAT16)
    made, _ = describe(**given, causal=True)
    best = [math.inf, math.inf]
    for _ in range(20):
        for n, call in enumerate((lambda: describe(**given, causal=True), lambda: replace(made))):
            start = time.perf_counter()
            for _ in range(100):
                call()
            best[n] = min(best[n], time.perf_counter() - start)
    assert best[0] < 3 * best[1]


# -- what is refused -----------------------------------------------------------------------------

# Each row: id, shapes changed, error, what the message says in this order (name, got, accepted).
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
    ("seqlen-past-int32", {"q": (3, 2**31, 4, 8)}, rf"q: .*{2**31} rows.*at most {INT32_MAX}"),
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


# Each row: id, options, error, message.
BAD_OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("seqs-list", {"seqs": [0, 5]}, TypeError, r"seqs: got list, expected a SeqLayout"),
    ("causal-int", {"causal": 1}, TypeError, r"causal: got 1 \(int\), expected a bool"),
    ("causal-none", {"causal": None}, TypeError, r"causal: got None .*expected a bool"),
    ("causal-array", {"causal": np.array([True])}, TypeError, r"causal: .*ndarray.*\(1,\).*bool"),
    ("align-other", {"align": "middle"}, ValueError, r"align: got 'middle' .*'bottom-right' or "),
    ("align-none", {"align": None}, TypeError, r"align: got None .*'bottom-right' or 'top-left'"),
    ("align-list", {"align": ["top-left"]}, TypeError, r"align: got \['top-left'\] .*'bottom-r"),
    ("window-int", {"window": 5}, TypeError, r"window: got 5 \(int\), expected a tuple"),
    ("window-list", {"window": [5, 0]}, TypeError, r"window: got \[5, 0\] \(list\).*a tuple"),
    ("window-one", {"window": (5,)}, ValueError, r"window: got \(5,\) .*\(left, right\)"),
    ("window-three", {"window": (5, 0, 1)}, ValueError, r"window: got \(5, 0, 1\) .*\(left, right"),
    ("window-minus-1", {"window": (-1, 0)}, ValueError, r"window: got -1, .*>= 0, or None"),
    ("window-right-below-0", {"window": (0, -3)}, ValueError, r"window: got -3, .*>= 0"),
    ("window-float", {"window": (1.0, 0)}, TypeError, r"window: got 1\.0 \(float\).*ints >= 0"),
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


@pytest.mark.parametrize("splits", [1, 2, 256, np.int64(2)])
def test_splits_are_numbers(splits: Any) -> None:
    described = problem(num_splits=splits).num_splits
    assert described == splits and type(described) is int


def test_a_mistake_in_a_number_is_told_before_one_in_an_array() -> None:
    with pytest.raises(ValueError, match=r"^softcap: "):
        problem(bias=np.zeros((5, 6), np.float32), softcap=-1.0)
    with pytest.raises(ValueError, match=r"^scale: "):
        problem(bias=np.zeros((5, 6), np.float32), scale=math.nan)


# -- out -----------------------------------------------------------------------------------------

SHAPE = (3, 5, 4, 16)
F16 = np.dtype(np.float16)


def inputs() -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(shape, F16) for shape in BATCH.values())


def named() -> dict[str, np.ndarray]:
    return dict(zip("qkv", inputs(), strict=True))


class OnDevice:
    """Stands for a CuPy array: an address that nobody may read."""

    def __init__(self, like: np.ndarray, address: int) -> None:
        self.shape, self.strides, self.dtype, self.flags = (
            like.shape,
            like.strides,
            like.dtype,
            like.flags,
        )
        self.data = SimpleNamespace(ptr=address)


def check(out: Any, *others: Any) -> None:
    given = [*others, *inputs()[len(others) :]]
    check_out(out, shape=out.shape, dtype=F16, others=dict(zip("qkv", given, strict=True)))


def test_a_good_out() -> None:
    check_out(np.empty(SHAPE, F16), shape=SHAPE, dtype=F16, others=named())


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(np.empty((3, 4, 5, 16), F16).transpose(0, 2, 1, 3), id="bhsd"),
        pytest.param(np.empty((3, 9, 4, 24), F16)[:, 2:7, :, 4:20], id="slice"),
        pytest.param(np.empty(SHAPE, F16)[::-1, :, ::-1], id="reversed"),
        pytest.param(np.empty((3, 5, 4, 1), F16)[..., ::-1], id="headdim-1"),
        pytest.param(np.broadcast_to(np.empty(1, F16), (1, 1, 1, 1)).copy(), id="one-element"),
        pytest.param(as_strided(np.empty(64, F16), (1, 2, 1, 16), (0, 64, 0, 2)), id="axes-of-1"),
        pytest.param(np.empty((3, 0, 4, 16), F16), id="no-rows"),
    ],
)  # fmt: skip
def test_any_strides_with_a_unit_last_one(out: np.ndarray) -> None:
    check(out)


def test_out_of_the_wrong_shape() -> None:
    with pytest.raises(
        ValueError, match=r"^out: got shape \(3, 5, 4, 8\), expected \(3, 5, 4, 16\)"
    ):
        check_out(np.empty((3, 5, 4, 8), F16), shape=SHAPE, dtype=F16, others=named())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", ">f2"])
def test_out_of_the_wrong_dtype(dtype: str) -> None:
    with pytest.raises(TypeError, match=rf"^out: got dtype {dtype}, expected float16, that of q"):
        check(np.empty(SHAPE, dtype))


def test_read_only_out() -> None:
    out = np.empty(SHAPE, F16)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: got a read-only array, expected a writable"):
        check(out)


def test_out_with_a_strided_last_axis() -> None:
    with pytest.raises(ValueError, match=r"^out: got a last-axis stride of 4 bytes, expected 2"):
        check(np.empty((3, 5, 4, 32), F16)[..., ::2])


def test_unaligned_out() -> None:
    raw = np.zeros(2 * math.prod(SHAPE) + 1, np.uint8)
    with pytest.raises(ValueError, match=r"^out: got strides .* address .*multiples of 2 bytes"):
        check(raw[1:].view(F16).reshape(SHAPE))
    record = np.dtype([("x", np.uint8), ("row", F16, 16)])
    with pytest.raises(ValueError, match=r"^out: got strides .*multiples of 2 bytes"):
        check(np.zeros(SHAPE[:-1], record)["row"])


@pytest.mark.parametrize(
    "strides",
    [
        pytest.param((0, 128, 32, 2), id="broadcast"),
        pytest.param((640, 128, 30, 2), id="overlapping-heads"),
        pytest.param((640, 96, 32, 2), id="overlapping-rows"),
    ],
)
def test_out_whose_elements_share_memory(strides: tuple[int, ...]) -> None:
    out = as_strided(np.zeros(960, F16), SHAPE, strides)
    with pytest.raises(
        ValueError, match=r"^out: got strides .*expected memory of its own for each"
    ):
        check(out)


OVERLAPS = [
    pytest.param(0, 0, True, id="the-same"),
    pytest.param(0, 1914, True, id="last-element"),
    pytest.param(0, 1920, False, id="right-after"),
    pytest.param(1920, 0, False, id="right-before"),
    pytest.param(1914, 0, True, id="first-element"),
]


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(("at_out", "at_input", "overlap"), OVERLAPS)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_out_that_overlaps_an_input(
    position: int, at_out: int, at_input: int, overlap: bool, on_device: bool
) -> None:
    raw = np.zeros(2 * 1920, np.uint8)
    out, other = (raw[at : at + 1920].view(F16).reshape(SHAPE) for at in (at_out, at_input))
    given: list[Any] = list(inputs())
    given[position] = other
    if on_device:
        given = [OnDevice(x, 2**40 + i * 2**20) for i, x in enumerate(given)]
        given[position] = OnDevice(other, 2**50 + at_input)
        out = OnDevice(out, 2**50 + at_out)  # type: ignore[assignment]
    if not overlap:
        check(out, *given)
        return
    with pytest.raises(ValueError, match=rf"^out: shares memory with {'qkv'[position]}, expected"):
        check(out, *given)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_interleaved_arrays_of_one_buffer_do_not_overlap(on_device: bool) -> None:
    buffer = np.zeros((3, 5, 2, 4, 16), F16)
    out: Any = buffer[:, :, 0]
    q: Any = buffer[:, :, 1]
    clash: Any = buffer.reshape(3, 5, 8, 16)[:, :, 3:7]
    if on_device:
        out, q, clash = OnDevice(out, 2**50), OnDevice(q, 2**50 + 128), OnDevice(clash, 2**50 + 96)
    check(out, q)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        check(out, clash)


def test_overlap_with_reversed_and_broadcast_inputs() -> None:
    buffer = np.zeros((6, 5, 4, 16), F16)
    check(buffer[:3], buffer[3:][::-1], np.broadcast_to(buffer[5, 4, 3], SHAPE))
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        check(buffer[:3], buffer[2:5][::-1])
    with pytest.raises(ValueError, match=r"^out: shares memory with k"):
        check(buffer[:3], buffer[3:], np.broadcast_to(buffer[2, 4, 3], SHAPE))


def test_empty_inputs_overlap_nothing() -> None:
    buffer = np.zeros(SHAPE, F16)
    check(buffer, buffer[:, :0], buffer[:, :0], buffer[:, :0])


def test_calls_that_differ_in_a_type_alone_share_nothing() -> None:
    """A call that was refused must be refused after one like it was accepted."""
    usual = structural(Options(sink=0, window=(1, 2)))
    assert structural(Options(sink=0, window=(1, 2))) == usual
    for other in (
        Options(sink=False, window=(1, 2)),
        Options(sink=0, window=(True, 2)),
        Options(sink=0, window=(1.0, 2)),
        Options(sink=0, window=(1, 2), num_splits=0),
    ):
        assert structural(other) != usual


def test_the_values_of_options_arrays_tell_no_calls_apart() -> None:
    """They are data: another array of the same form is the same call."""
    first, second = (with_arrays(FORWARD, Options(bias=np.full((5, 7), x))) for x in (0.0, 1.0))
    assert structural(first.options) == structural(second.options)
    assert first.verb is second.verb
    assert first.arrays[0] is not second.arrays[0]


def test_which_arrays_a_call_has_tells_it_apart() -> None:
    bias, slopes = np.zeros((5, 7), np.float32), np.zeros(4, np.float32)
    verbs = {
        with_arrays(FORWARD, options).verb
        for options in (
            Options(),
            Options(bias=bias),
            Options(alibi_slopes=slopes),
            Options(bias=bias, alibi_slopes=slopes),
            Options(dropout_p=0.5, seed=3),
            Options(dropout_p=0.5, seed=np.array([3])),
        )
    }
    assert len(verbs) == 6
    assert FORWARD in verbs


def test_an_int_seed_is_a_value_of_the_call() -> None:
    first, second = (with_arrays(FORWARD, Options(dropout_p=0.5, seed=x)) for x in (3, -1))
    assert (first.values, second.values) == ((3,), (2**64 - 1,))
    assert structural(first.options) == structural(second.options)
