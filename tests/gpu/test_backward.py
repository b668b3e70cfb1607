"""The backward's kernels against the float64 reference."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

import rawattn
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated
from tests.frameworks import CuPy, Jax, NumPy, Torch
from tests.gradients import _dense, backward_of, verify
from tests.landed import require, without_missing
from tests.random_cases import random_case
from tests.score_arrays import Pairs
from tests.score_cases import random_score_case, scores_of_kernels
from tests.tiles import TileShape, backward_tile_shapes, large_tiles, shared_limit
from tests.verify import options_of

CUPY = CuPy()
_FIRST, _COUNT = map(int, os.environ.get("RAWATTN_FUZZ", "0:160").split(":"))
_FRAMEWORKS = [CuPy(), CuPy(), CuPy(), NumPy(), CuPy(), CuPy(), CuPy(), Torch("cuda"), Jax("gpu")]


def tiles(n: int) -> AbstractContextManager[None]:
    """For odd n the backward's tiles for many rows, else the tiles that the case chooses by itself."""
    return large_tiles() if n % 2 else nullcontext()


@pytest.mark.parametrize(("n", "case"), list(enumerate(curated())), ids=str)
def test_curated(n: int, case: Case) -> None:
    with tiles(n):
        verify(case, CUPY)


@pytest.mark.parametrize(
    ("n", "case"),
    [(n, case) for n, case in enumerate(curated()) if case.scores <= 300_000],
    ids=str,
)
def test_curated_deterministic(n: int, case: Case) -> None:
    with tiles(n + 1):
        verify(case, CUPY, deterministic=True)


@pytest.mark.parametrize(("n", "case"), list(enumerate(scores_of_kernels()[::3])), ids=str)
def test_scores(n: int, case: Case) -> None:
    require(case, "cuda")
    with tiles(n):
        verify(case, CUPY, deterministic=n % 5 == 0)


@pytest.mark.parametrize(
    "case",
    [
        dense("same-bits-bias", 2, 300, 400, nheads_q=4, nheads_kv=2, bias=Pairs(batch=False, rows=False)),
        dense("same-bits-sinks", 2, 300, 400, nheads_q=4, nheads_kv=2, sink_logits="normal", score_mod="tanh"),
        dense("same-bits-slopes", 2, 300, 400, nheads_q=4, nheads_kv=2, score_mod="slopes"),
        dense("same-bits-table", 2, 300, 400, nheads_q=4, nheads_kv=2, score_mod="table", causal=True),
    ],
    ids=str,
)  # fmt: skip
def test_deterministic_sums_of_options_give_the_same_bits(case: Case) -> None:
    require(case, "cuda")
    call = backward_of(case)
    inputs = call.inputs
    arrays = [CUPY.array(x) for x in (call.dout, inputs.q, inputs.k, inputs.v, call.out)]
    options, first = options_of(inputs, CUPY), None
    for n in range(100):
        gradients = rawattn.attention_backward(
            *arrays, CUPY.array(_dense(call.lse)), **options, deterministic=True
        )
        words = [
            CUPY.host(x).tobytes()
            for x in (*gradients[:3], *(y.of(gradients) for y in call.others))
        ]
        first = words if first is None else first
        assert words == first, f"run {n} differs"


_GROUPS = {"nheads_q": 4, "nheads_kv": 2}
# Gradients of a bias that the main kernel computes. "heads": one for each query head. "pairs": one for two heads of a GQA
# group. "sums": summed over the batch or the heads. "odd": rows of any length. "short": small tiles.
_DBIAS = [
    dense("heads", 2, 150, 200, **_GROUPS, bias=Pairs(), causal=True, headdim=128),
    dense("heads-float16", 2, 300, 152, **_GROUPS, bias=Pairs(), window=(70, 30), dtype="float16", headdim=64),
    dense("heads-d256", 1, 150, 200, bias=Pairs(), headdim=256),
    dense("pairs", 2, 150, 200, **_GROUPS, bias=Pairs(heads="kv"), causal=True, headdim=64),
    dense("pairs-float16", 2, 200, 264, **_GROUPS, bias=Pairs(heads="kv"), dtype="float16", headdim=128),
    dense("pairs-d192", 1, 150, 200, **_GROUPS, bias=Pairs(heads="kv"), causal=True, headdim=192),
    dense("sums", 3, 300, 392, **_GROUPS, bias=Pairs(batch=False, heads="one"), causal=True, headdim=128),
    dense("sums-d64", 3, 300, 392, **_GROUPS, bias=Pairs(batch=False), headdim=64, dropout_p=0.2),
    dense("sums-d256", 2, 150, 200, **_GROUPS, bias=Pairs(heads="one"), headdim=256),
    dense("heads-odd", 2, 150, 201, **_GROUPS, bias=Pairs(), causal=True, headdim=128),
    dense("heads-given", 2, 150, 200, **_GROUPS, bias=Pairs(), headdim=64, give_out=True),
    dense("pairs-odd", 2, 150, 203, **_GROUPS, bias=Pairs(heads="kv"), window=(70, 30), headdim=64),
    dense("sums-odd", 3, 300, 391, **_GROUPS, bias=Pairs(batch=False), causal=True, headdim=64),
    dense("copied", 5, 77, 91, **_GROUPS, bias=Pairs(batch=False, heads="one", layout="gaps"), headdim=128),
    dense("short", 9, 49, 49, nheads_q=3, nheads_kv=3, bias=Pairs(batch=False), headdim=32),
    dense("short-pairs", 5, 60, 60, nheads_q=8, nheads_kv=2, bias=Pairs(heads="kv"), causal=True, headdim=64),
    dense("short-each", 3, 90, 177, **_GROUPS, bias=Pairs(), headdim=64, dtype="float16"),
    dense("short-float32", 3, 90, 177, **_GROUPS, bias=Pairs(float32=True), headdim=64),
]  # fmt: skip


@pytest.mark.parametrize("case", _DBIAS, ids=str)
def test_dbias_by_the_main_kernel(case: Case) -> None:
    require(case, "cuda")
    verify(case, CUPY)


@pytest.mark.parametrize("heads", ["one", "kv", "q"])
@pytest.mark.parametrize(
    "case",
    [
        dense("padding", 3, 150, 200, **_GROUPS, headdim=64),
        dense("odd", 2, 300, 211, **_GROUPS, headdim=128, causal=True, dtype="float16"),
        dense("float32", 2, 90, 130, **_GROUPS, headdim=64, dtype="float32"),
        ragged("ragged", (150, 0, 33), (60, 9, 200), **_GROUPS, headdim=64, on_device=True),
        dense("more", 2, 90, 130, **_GROUPS, headdim=64, alibi_slopes="batch", dropout_p=0.2),
    ],
    ids=str,
)
def test_a_bias_of_one_row(case: Case, heads: str) -> None:
    """The gradient of a bias that is the same for all queries, as padding masks are, is right."""
    require(case, "cuda")
    verify(replace(case, bias=Pairs(rows=False, heads=heads)), CUPY)


_LENGTHS = (40, 1100, 700, 0, 1100, 333)


@pytest.mark.parametrize("heads", ["one", "q"])
@pytest.mark.parametrize(
    "case",
    [
        ragged("causal", _LENGTHS, _LENGTHS, **_GROUPS, headdim=64, causal=True),
        ragged("full", _LENGTHS, _LENGTHS[::-1], **_GROUPS, headdim=128),
        ragged("float32", _LENGTHS, _LENGTHS, **_GROUPS, headdim=64, dtype="float32", window=(90, 30)),
        padded("padded", _LENGTHS, _LENGTHS, 1100, 1100, **_GROUPS, headdim=64, on_device=True, causal=True),
    ],
    ids=str,
)  # fmt: skip
def test_a_bias_of_sequences_of_other_lengths(case: Case, heads: str) -> None:
    """A block that sums the gradient over sequences finds the bias of what one of them does not see and the next one does."""
    require(case, "cuda")
    verify(replace(case, bias=Pairs(batch=False, heads=heads)), CUPY)


_GAPS = {"room_q": (920, 3, 1100), "room_k": (310, 80, 150), "by_q": "both", "by_k": "both"}


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize(
    "case",
    [
        dense("causal", 1, 2100, 2100, nheads_q=2, nheads_kv=1, causal=True, headdim=64),
        dense("full", 1, 1500, 700, nheads_q=4, nheads_kv=1, headdim=128),
        dense("window", 1, 2048, 2048, nheads_q=2, nheads_kv=1, window=(900, 0), bias=Pairs(heads="kv"), headdim=64),
        dense("float32", 1, 700, 900, nheads_q=2, nheads_kv=1, causal=True, dtype="float32"),
        dense("mask", 1, 2100, 900, nheads_q=2, nheads_kv=1, mask=Pairs(values="random"), causal=True, headdim=64),
        dense("mask-d128", 1, 1500, 700, nheads_q=4, nheads_kv=1, mask=Pairs(values="random", heads="one"), headdim=128),
        ragged("ragged", (1700, 0, 90, 333), (1650, 20, 0, 400), nheads_q=2, nheads_kv=1, causal=True, headdim=64),
        ragged("ragged-d128", (2000, 1000), (77, 60), nheads_q=4, nheads_kv=2, headdim=128, sink_logits="normal"),
        ragged("ragged-gaps", (900, 0, 1100), (300, 77, 150), nheads_q=4, nheads_kv=1, **_GAPS, give_out=True),
        ragged("ragged-bias", (1500, 200), (500, 300), nheads_q=2, nheads_kv=1, bias=Pairs(heads="kv"), on_device=True),
        ragged("ragged-mask", (1500, 200), (500, 300), nheads_q=2, nheads_kv=1, mask=Pairs(values="random")),
        padded("padded", (2000, 0), (77, 90), 2000, 100, nheads_q=4, nheads_kv=2, on_device=True, give_out=True),
    ],
    ids=str,
)  # fmt: skip
def test_key_tiles_that_several_blocks_share(case: Case, deterministic: bool) -> None:
    require(case, "cuda")
    verify(case, CUPY, deterministic=deterministic)


@pytest.mark.parametrize("headdim", [33, 40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_key_tile(dtype: str, headdim: int) -> None:
    """Where one key tile holds all keys of a sequence, dq is written, not accumulated: by one block or by several."""
    knobs = {"dtype": dtype, "headdim": headdim, "nheads_q": 4, "nheads_kv": 2}
    for case in (
        dense("lone", 2, 300, 32 if dtype == "float32" else 64, **knobs),
        dense("lone-causal", 3, 20, 120, **knobs, causal=True),
        dense("lone-top-left", 1, 90, 33, **knobs, causal=True, align="top-left"),
        dense("lone-split", 1, 5000, 30, **{**knobs, "nheads_q": 2}),
        dense("lone-gaps", 2, 77, 50, **knobs, headdim_v=70, layout="gaps", give_out=True),
    ):
        require(case, "cuda")
        verify(case, CUPY)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("headdim", [40, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_one_key_tile_of_packed_batches(dtype: str, headdim: int, on_device: bool) -> None:
    """Where queries and keys share their starts, no row is without keys, and a single key tile writes dq there too."""
    knobs = {"dtype": dtype, "headdim": headdim, "nheads_q": 4, "nheads_kv": 2}
    knobs |= {"share_starts": True, "on_device": on_device, "max_seqlen": True}
    # Longest sequences of one key tile of 128, of 64 or of 32 keys, and of one key more than a tile.
    for lens in ((128, 0, 5, 77), (64, 1, 33), (32,) * 9, (129, 3)):
        for mask in ({}, {"causal": True}):
            case = ragged(f"lone{lens[0]}", lens, lens, **knobs, **mask, lead=3, tail=20)
            require(case, "cuda")
            verify(case, CUPY)


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_copy_width(dtype: str, alignment: int) -> None:
    if dtype == "float32" and alignment < 4:
        pytest.skip("a float32 is 4 bytes")
    headdim = 48 + alignment // (2 if dtype == "float16" else 4)
    case = dense(f"width{alignment}", 2, 70, 90, headdim=headdim, dtype=dtype, causal=True)
    verify(case, CUPY)
    verify(case, CUPY, deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("shape", backward_tile_shapes(), ids=str)
def test_every_tile_shape(shape: TileShape, deterministic: bool) -> None:
    knobs = {"dtype": shape.dtype, "headdim": shape.headdim, "nheads_q": 4, "nheads_kv": 2}
    lens = (130, 0, 33), (30, 9, 200)
    with shared_limit(shape.shared_limit):
        verify(
            dense("causal", 2, 200, 300, **knobs, causal=True), CUPY, deterministic=deterministic
        )
        window = ragged("window", *lens, **knobs, window=(60, 9), sink=5)
        verify(window, CUPY, deterministic=deterministic)


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT))
def test_random(seed: int) -> None:
    framework = _FRAMEWORKS[seed % len(_FRAMEWORKS)]
    case = random_case(seed)
    if framework.name in ("torch", "jax"):
        pytest.importorskip(framework.name)
    if framework.name == "torch" and case.layout == "reversed":
        framework = CuPy()
    with tiles(seed):
        verify(case, framework, deterministic=seed % 3 == 0)


@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT // 16))
def test_random_scores(seed: int) -> None:
    framework = _FRAMEWORKS[seed % len(_FRAMEWORKS)]
    case = without_missing(random_score_case(seed), "cuda")
    if framework.name in ("torch", "jax"):
        pytest.importorskip(framework.name)
    if framework.name == "torch" and case.layout == "reversed":
        framework = CuPy()
    verify(case, framework, deterministic=seed % 3 == 0)


@pytest.mark.parametrize(
    "case",
    [
        dense("same-bits", 2, 700, 700, nheads_q=4, causal=True, headdim=128),
        dense("same-bits-gqa", 1, 700, 900, nheads_q=8, nheads_kv=2, window=(200, 30), sink=5),
        ragged("same-bits-ragged", (700, 0, 90, 333), (650, 20, 100, 400), nheads_q=4, nheads_kv=4),
        dense("same-bits-float32", 1, 300, 400, dtype="float32", causal=True),
    ],
    ids=str,
)
def test_deterministic_gives_the_same_bits(case: Case) -> None:
    """Every run gives the same bits, though work on another stream changes the order in which blocks run."""
    import cupy

    call = backward_of(case)
    inputs = call.inputs
    arrays = [CUPY.array(x) for x in (call.dout, inputs.q, inputs.k, inputs.v, call.out)]
    lse = cupy.asarray(call.lse)
    from tests.verify import layout

    options = {**inputs.options, "seqs": layout(inputs, case, CUPY)}
    first = None
    busy = cupy.cuda.Stream(non_blocking=True)
    load = cupy.ones(1 << 22, np.float32)
    for n in range(1000):
        if n % 7 == 0:
            with busy:
                load = cupy.sin(load)
        gradients = rawattn.attention_backward(*arrays, lse, **options, deterministic=True)
        words = [cupy.ascontiguousarray(x).view(f"u{x.itemsize}") for x in gradients[:3]]
        if first is None:
            first = [x.copy() for x in words]
        assert all((a == b).all() for a, b in zip(words, first, strict=True)), f"run {n} differs"
