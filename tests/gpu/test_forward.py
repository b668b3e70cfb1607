"""The kernels against the float64 reference."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._compile import compiler
from rawattn._kernels import params
from rawattn._kernels.selection import FAMILIES, only
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import stream_k
from rawattn._kernels.sm90.tile_choice import LONG_SEQLEN
from rawattn._runtime import on_gpu
from tests.cases import Case, dense, padded, ragged
from tests.curated_cases import curated, unaligned
from tests.frameworks import CuPy
from tests.landed import require
from tests.score_arrays import Pairs
from tests.score_cases import scores_of_kernels
from tests.tiles import (
    TileShape,
    aligning,
    clusters,
    shared_limit,
    splitting,
    splitting_by_length,
    splitting_in_clusters,
    tensor_stores,
    tile_shapes,
)
from tests.verify import verify

CUPY = CuPy()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", curated(), ids=str)
def test_curated(case: Case, family: str) -> None:
    with only(family):
        verify(case, CUPY)


SCORES = scores_of_kernels()
SHORT = [case for case in SCORES if case.dtype != "float32"]


@pytest.mark.parametrize("case", SCORES, ids=str)
def test_scores(case: Case) -> None:
    require(case, "cuda", "attention")
    verify(case, CUPY)


@pytest.mark.parametrize("case", SHORT[::10], ids=str)
def test_scores_of_16_bits_by_the_portable_kernel(case: Case) -> None:
    require(case, "cuda", "attention")
    with only("portable"):
        verify(case, CUPY)


# Cases whose options allow tiles in clusters. The tile tables of the other options have none.
IN_CLUSTERS = [
    case
    for case in SHORT
    if set(case.score_options) <= {"softcap", "score_mod", "sink_logits"}
    and case.window is None
    and case.lens_q
    and 0 not in (*case.lens_q, *case.lens_k)
]


@pytest.mark.parametrize("case", IN_CLUSTERS[::2], ids=str)
def test_scores_in_clusters(case: Case) -> None:
    require(case, "cuda", "attention")
    with clusters(), only("sm90"):  # not by decoding's kernels
        verify(case, CUPY)
        if compiler.device_arch(0) == sm90_forward.ARCH and not case.packed:
            config = _last_call().prepared.config
            assert config.cluster == (1 if config.mod_line else 2)  # mod_line: ALiBi's tiles


@pytest.mark.parametrize("case", [case for case in curated() if case.dtype != "float32"], ids=str)
def test_curated_in_clusters(case: Case) -> None:
    with clusters():
        verify(case, CUPY)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in curated()
        if case.dtype != "float32" and (case.packed or case.by_q != "room" or case.by_k != "room")
    ],
    ids=str,
)
def test_curated_stored_by_tma(case: Case) -> None:
    with tensor_stores():
        verify(case, CUPY)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [192, 256])
def test_clusters_of_long_sequences(headdim: int, causal: bool) -> None:
    """Long sequences at head dims 192 and 256 choose tiles in clusters of two by themselves."""
    knobs = {"headdim": headdim, "causal": causal, "nheads_q": 2, "nheads_kv": 1}
    # The mean length is long too, because calls with few tiles choose other tiles.
    lens = (LONG_SEQLEN + 300, 9, 4000), (LONG_SEQLEN + 1, 40, 4100)
    verify(ragged("clusters", *lens, **knobs), CUPY)
    if compiler.device_arch(0) == sm90_forward.ARCH:
        assert _last_call().prepared.config.cluster == 2


@pytest.mark.parametrize("in_clusters", [False, True])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_some_tiles_kept_for_the_end(headdim: int, in_clusters: bool) -> None:
    """Results are right where some query tiles of a sequence are kept for the end of the launch, and some are not."""
    knobs = {"headdim": headdim, "nheads_q": 14, "nheads_kv": 14, "causal": True}
    case = dense("kept", 5, 600, 600, **knobs)
    with clusters() if in_clusters else nullcontext():
        verify(case, CUPY)
    if compiler.device_arch(0) == sm90_forward.ARCH:
        config = _last_call().prepared.config
        assert 0 < _last_launch("kept_tiles") < -(-600 // config.schedule_rows)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in curated()
        if case.dtype != "float32"
        and not (case.packed or case.causal or case.window)
        and case.by_q == case.by_k == "room"
    ],
    ids=str,
)
def test_curated_split_by_keys(case: Case) -> None:
    with splitting():
        verify(case, CUPY)


@pytest.mark.parametrize("in_clusters", [False, True])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_tiles_split_by_keys(headdim: int, in_clusters: bool) -> None:
    """Stream-K is right with fewer tiles than blocks, with more tiles than blocks, with GQA groups and with an unusual head dim
    of v."""
    for rows_q, rows_k, nheads_q, nheads_kv in (
        (9, 4000, 3, 3),
        (700, 1500, 41, 41),
        (70, 2500, 24, 2),
    ):
        knobs = {"nheads_q": nheads_q, "nheads_kv": nheads_kv, "headdim": headdim}
        knobs |= {"headdim_v": headdim - 24} if nheads_q == 24 else {}
        with only("sm90"), splitting_in_clusters() if in_clusters else splitting():
            verify(dense("shared", 1, rows_q, rows_k, **knobs), CUPY)
            if compiler.device_arch(0) == sm90_forward.ARCH:
                assert _last_launch("stream_k")["tiles"] > 0


@pytest.mark.parametrize(
    ("batch", "rows_q", "rows_k", "nheads_q", "nheads_kv", "headdim"),
    [
        (1, 200, 6000, 3, 3, 128),  # rows for one of three consumers
        (3, 120, 1500, 16, 4, 128),
        (40, 60, 900, 16, 4, 104),  # whole rounds first
        (2, 310, 1500, 5, 5, 120),  # for two
        (9, 75, 1500, 8, 2, 128),
        (2, 210, 8300, 4, 2, 64),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_last_tiles_are_weighed(
    batch: int,
    rows_q: int,
    rows_k: int,
    nheads_q: int,
    nheads_kv: int,
    headdim: int,
    causal: bool,
) -> None:
    """Stream-K is right where last tiles have few rows and count less, behind whole rounds or alone."""
    knobs = {"nheads_q": nheads_q, "nheads_kv": nheads_kv, "headdim": headdim, "causal": causal}
    with only("sm90"), splitting():
        verify(dense("weighed", batch, rows_q, rows_k, **knobs), CUPY)
        if compiler.device_arch(0) == sm90_forward.ARCH:
            assert _last_launch("stream_k")["last_share"] > 0


@pytest.mark.parametrize("lens", [(200, 210, 255), (200, 255, 190), (200, 0, 250)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_last_tiles_are_weighed_by_lengths_on_the_device(
    lens: tuple[int, ...], causal: bool
) -> None:
    """The kernel weighs last tiles where all sequences have rows for four consumers, which it alone knows."""
    keys = (1500, 1430, 1480)
    knobs = {"nheads_q": 3, "nheads_kv": 3, "headdim": 128, "causal": causal}
    with only("sm90"), splitting():
        for case in (
            padded("weighed", lens, keys, 255, 1500, **knobs, on_device=True),
            ragged("weighed-packed", lens, keys, **knobs),
        ):
            verify(case, CUPY)
            if compiler.device_arch(0) == sm90_forward.ARCH and (min(lens) or not case.packed):
                assert _last_launch("stream_k")["busy_consumers"] == 4


@pytest.mark.parametrize(
    ("rows_q", "rows_k", "nheads_q", "nheads_kv", "headdim"),
    [
        (256, 33000, 8, 2, 128),
        (700, 9000, 12, 3, 128),
        (77, 9000, 20, 4, 128),
        # Tiles of one, two and three consumers with more items than the last one keeps its own in registers for.
        (128, 16000, 8, 8, 128),
        (100, 20000, 8, 2, 192),
        (180, 50000, 4, 1, 128),
    ],
)
def test_split_tiles_have_the_same_bits_each_time(
    rows_q: int, rows_k: int, nheads_q: int, nheads_kv: int, headdim: int
) -> None:
    """Whichever warp is the last of a split tile, all partial results have arrived and are merged in the order of keys.

    In calls one behind the other, and beside calls on another stream.
    """
    import cupy

    draw = cupy.random.default_rng(5)
    shapes = (1, rows_q, nheads_q, headdim), *[(1, rows_k, nheads_kv, headdim)] * 2
    q, k, v = (draw.standard_normal(shape, dtype=np.float32).astype(np.float16) for shape in shapes)
    first = rawattn.attention(q, k, v, causal=True)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    found = []
    for n in range(60):
        with streams[n // 3 % 2]:
            found.append(rawattn.attention(q, k, v, causal=True))
    cupy.cuda.Device().synchronize()
    assert all((x.view(np.uint16) == first.view(np.uint16)).all() for x in found)


@pytest.mark.parametrize("group", [3, 5, 7, 8, 12, 40])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_heads_interleaved(headdim: int, group: int) -> None:
    """GQA groups of sizes that divide no tile are right, in whole tiles and in tiles whose keys are split among blocks."""
    knobs = {"headdim": headdim, "nheads_q": 2 * group, "nheads_kv": 2}
    rows = 100 // group + 3
    lens = (rows, 0, 1, rows // 2 + 1, 2 * rows), (700, 40, 90, 33, 1300)
    cases = (
        dense("chunk", 2, rows, 1500, **knobs, causal=True),
        dense("capped", 3, rows + 5, 700, **knobs, softcap=4.0, dtype="float16"),
        dense("window", 1, rows, 900, **knobs, window=(300, 2), sink=5),
        ragged("ragged", *lens, **knobs, causal=True, on_device=group % 2 == 0),
        padded("padded", *lens, 2 * rows + 3, 1301, **knobs, headdim_v=headdim - 24),
        ragged("gaps", *lens, **knobs, layout="gaps", give_out=True, dtype="float16"),
    )
    interleaved = 0
    for case, around in itertools.product(cases, (nullcontext, splitting)):
        with only("sm90"), around():
            verify(case, CUPY)
        if compiler.device_arch(0) == sm90_forward.ARCH:
            interleaved += _last_call().prepared.config.interleaved
    if compiler.device_arch(0) == sm90_forward.ARCH:
        assert interleaved or group not in (5, 7)


@pytest.mark.parametrize("headdim", [64, 128, 192])
def test_unlike_tiles_split_by_keys(headdim: int) -> None:
    """Stream-K is right for tiles of unequal numbers of keys: under causal and window limits, and with lengths that only the
    kernel knows."""
    knobs = {"nheads_q": 8, "nheads_kv": 2, "headdim": headdim}
    lens = (300, 9, 0, 200), (1000, 700, 40, 1300)
    cases = (
        dense("causal", 2, 300, 1200, **knobs, causal=True),
        dense("window", 1, 500, 1500, **knobs, window=(700, 0), sink=5),
        ragged("ragged", *lens, **knobs, causal=True, on_device=True),
        ragged("one", (400,), (1100,), **knobs, on_device=True),
    )
    with only("sm90"), splitting():
        for case in cases:
            verify(case, CUPY)
            if compiler.device_arch(0) == sm90_forward.ARCH:
                assert _last_call().prepared.config.stream_k


@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_causal_tiles_split_by_their_length(headdim: int) -> None:
    """Causal query tiles may be split among blocks by their numbers of keys: with one head or several, one sequence or several,
    and rows that see no keys."""
    with only("sm90"), splitting_by_length():
        for batch, rows_q, rows_k, nheads in (
            (1, 1500, 1500, 1),
            (2, 700, 900, 3),
            (1, 900, 500, 2),
        ):
            knobs = {"nheads_q": nheads, "nheads_kv": nheads, "headdim": headdim}
            verify(dense("by-length", batch, rows_q, rows_k, **knobs, causal=True), CUPY)
            if compiler.device_arch(0) == sm90_forward.ARCH:
                assert _last_launch("stream_k")["rows"] > 0


def test_few_causal_heads_are_split() -> None:
    """A causal call with few heads chooses by itself to split its tiles among blocks by their numbers of keys."""
    verify(dense("few", 1, 4096, 4096, nheads_q=2, nheads_kv=2, causal=True), CUPY)
    if compiler.device_arch(0) == sm90_forward.ARCH:
        assert _last_launch("stream_k")["rows"] > 0


def test_long_keys_are_split() -> None:
    """A call with very many keys chooses stream-K by itself, and its counters are ready for the next launch."""
    case = dense("shared", 2, 40, stream_k.ALWAYS_KEYS + 300, nheads_q=8, nheads_kv=2)
    for _ in range(2):
        verify(case, CUPY)
        if compiler.device_arch(0) == sm90_forward.ARCH:
            assert _last_launch("stream_k")["tiles"] > 0


# Each call would leave SMs of a Hopper GPU idle if its query tiles stayed whole.
IDLE: list[dict[str, Any]] = [
    {"rows": (40, 4771), "heads": (16, 2)},
    {"rows": (76, 3100), "heads": (8, 8), "headdim": 256},
    {"rows": (100, 2000), "heads": (16, 4), "headdim": 64, "causal": True},
    {"rows": (33, 2500), "heads": (14, 2), "headdim": 96, "causal": True},
    {"rows": (100, 1900), "heads": (6, 3), "headdim": 192, "headdim_v": 128},
    {"rows": (50, 1300), "heads": (8, 2), "causal": True, "softcap": 9.0, "sink_logits": "normal"},
    {"rows": (70, 2500), "heads": (4, 4), "headdim": 64, "dropout_p": 0.2},
    {"rows": (60, 1700), "heads": (8, 2), "causal": True, "bias": Pairs(batch=False)},
]


@pytest.mark.parametrize("case", IDLE, ids=str)
def test_tiles_of_few_rows_are_split(case: dict[str, Any]) -> None:
    """Calls with few rows choose stream-K by themselves with far fewer keys than stream_k.ALWAYS_KEYS."""
    knobs = dict(case)
    rows, (nheads_q, nheads_kv) = knobs.pop("rows"), knobs.pop("heads")
    knobs = {"headdim": 128, **knobs, "nheads_q": nheads_q, "nheads_kv": nheads_kv}
    verify(dense("idle", 2, *rows, **knobs), CUPY)
    if compiler.device_arch(0) == sm90_forward.ARCH:
        assert _last_launch("stream_k")["tiles"] > 0


BIASES = {
    "rows": Pairs(batch=False),
    "each": Pairs(layout="gaps"),
    "odd-memory": Pairs(layout="odd"),
    "of-kv-heads": Pairs(heads="kv"),
    "copied": Pairs(batch=False, heads="one", layout="gaps"),
    "of-keys": Pairs(rows=False),
    "of-rows": Pairs(keys=False),
    "float32": Pairs(float32=True),
    "transposed": Pairs(layout="transposed"),
}


@pytest.mark.parametrize("headdim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("name", BIASES)
def test_biases_whose_rows_begin_anywhere(name: str, headdim: int) -> None:
    """Rows of a bias may begin at any address: Hopper's kernel reads them row by row, as an aligned copy, or element by
    element, in calls of few tiles and of many small ones."""
    knobs: dict[str, Any] = {"headdim": headdim, "bias": BIASES[name]}
    verify(dense("rows", 2, 210, 333, nheads_q=4, nheads_kv=2, **knobs, causal=True), CUPY)
    verify(dense("short", 9, 49, 51, nheads_q=6, nheads_kv=6, **knobs), CUPY)
    lens = (300, 0, 33, 130), (30, 9, 201, 151)
    verify(ragged("ragged", *lens, nheads_q=8, nheads_kv=2, **knobs, window=(60, 9)), CUPY)
    verify(padded("padded", *lens, 310, 205, nheads_q=2, nheads_kv=2, **knobs), CUPY)


def _last_call() -> on_gpu.Call:
    return list(on_gpu._prepared.values())[-1]


def _last_launch(field: str) -> Any:
    """A field of the Hopper kernel's parameters, from the call that was prepared last."""
    filled = _last_call().prepared.steps[-1].params
    return np.frombuffer(filled, params.SM90_FORWARD.dtype, count=1)[field][0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_long_sequences(headdim: int, causal: bool) -> None:
    """Long sequences are right: Hopper's kernel has separate tiles for them."""
    knobs = {"headdim": headdim, "causal": causal, "nheads_q": 1, "nheads_kv": 1}
    verify(dense("long", 1, 300, LONG_SEQLEN + 77, **knobs), CUPY)
    verify(ragged("long-ragged", (300, 9, 200), (40, LONG_SEQLEN + 1, 100), **knobs), CUPY)


@pytest.mark.parametrize("alignment", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_copy_width(dtype: str, alignment: int) -> None:
    """Rows may be aligned to any power of two from the element size (2 or 4 bytes) to 16 bytes."""
    if dtype == "float32" and alignment < 4:
        pytest.skip("a float32 is 4 bytes")
    headdim = 48 + alignment // (2 if dtype == "float16" else 4)
    verify(dense(f"width{alignment}", 2, 70, 90, headdim=headdim, dtype=dtype, causal=True), CUPY)


@pytest.mark.parametrize("case", unaligned(), ids=str)
def test_operands_that_hopper_cannot_read(case: Case) -> None:
    with aligning():
        verify(case, CUPY)
        prepared = list(on_gpu._prepared.values())
    if compiler.device_arch(0) == sm90_forward.ARCH:
        assert prepared and all(
            isinstance(each.prepared.config, sm90_forward_config.Config) for each in prepared
        )


@pytest.mark.parametrize("shape", tile_shapes(), ids=str)
def test_every_tile_shape(shape: TileShape) -> None:
    knobs = {"dtype": shape.dtype, "headdim": shape.headdim, "nheads_q": 4}
    lens = (130, 0, 65), (30, 9, 300)
    with shared_limit(shape.shared_limit):
        verify(dense("tile", 1, 200, 300, **knobs, causal=True), CUPY)
        verify(ragged("tile-ragged", *lens, **knobs, window=(60, 9), sink=5), CUPY)
