"""Tiles that Hopper's kernels choose: which leave no SM idle, and how many blocks fit an SM."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.layout import bound_of
from rawattn._call.options import ArrayForm
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem, describe
from rawattn._kernels import registry, tile_tables
from rawattn._kernels.operands import Operands, strides_of_pages
from rawattn._kernels.selection import using_tiles
from rawattn._kernels.sm90 import decode as sm90_decode
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_config as sm90_forward_config
from rawattn._kernels.sm90 import forward_steps as sm90_forward_steps
from rawattn._kernels.sm90 import stream_k, tile_choice, time_estimate
from tests.problems import CALL_OF_MANY, H200

NO_OPERANDS = Operands()


def test_slopes_of_long_sequences_have_rows_of_their_own() -> None:
    slopes = ArrayForm("float32", (4,), (4,))
    problem = replace(
        CALL_OF_MANY, nheads_q=4, nheads_kv=4, headdim=64, headdim_v=64, window_right=0
    )
    for keys, tile in ((8191, (256, 64)), (8192, (192, 128))):
        sizes = {"rows_q": keys, "rows_k": keys, "max_seqlen_q": keys, "max_seqlen_k": keys}
        long = replace(problem, alibi_slopes=slopes, batch=40, **sizes)
        config = sm90_forward.choose(long, H200, Operands())
        assert (config.tile_rows, config.tile_k) == tile


@pytest.mark.parametrize(
    ("keys", "batch", "heads", "headdim", "float8", "shape"),
    [
        (1000, 16, (32, 8), 64, False, (8, 1)),  # 128 streams of keys: one block an SM
        (1000, 17, (32, 8), 64, False, (6, 2)),  # 136 streams: two blocks share an SM
        (1600, 17, (32, 8), 64, False, (8, 1)),
        (1600, 33, (32, 8), 64, False, (8, 1)),
        (700, 34, (32, 8), 64, False, (3, 4)),  # 272 streams: four blocks
        (2100, 34, (32, 8), 40, False, (8, 1)),
        (9000, 50, (32, 8), 40, False, (3, 4)),  # 400 streams
        (1000, 17, (32, 8), 128, False, (4, 2)),
        (1000, 300, (32, 8), 128, False, (8, 1)),  # 16-bit keys beyond head dim 64
        (9000, 300, (32, 8), 128, False, (6, 1)),
        (3000, 16, (32, 8), 128, True, (8, 1)),
        (3000, 17, (32, 8), 128, True, (4, 2)),
        (3100, 17, (32, 8), 128, True, (8, 1)),
        (2000, 41, (32, 8), 128, True, (8, 1)),  # 328 streams
        (2000, 42, (32, 8), 128, True, (2, 4)),
        (2100, 42, (32, 8), 128, True, (8, 1)),
        (9000, 50, (32, 8), 128, True, (2, 4)),
        (1500, 17, (32, 8), 256, True, (4, 2)),
        (1600, 17, (32, 8), 256, True, (6, 1)),
        (500, 50, (32, 8), 256, True, (4, 2)),
        (600, 50, (32, 8), 256, True, (6, 1)),
        (700, 34, (32, 8), 64, True, (3, 4)),
        (700, 16, (160, 8), 64, False, (8, 1)),  # wide tiles
        (700, 17, (160, 8), 64, False, (4, 2)),
        (700, 17, (160, 8), 96, False, (6, 1)),
        (700, 24, (160, 8), 128, True, (8, 1)),
        (700, 25, (160, 8), 128, True, (4, 2)),
        (700, 50, (160, 8), 192, True, (6, 1)),  # not wide: values have more than 128 columns
        (700, 50, (160, 8), 128, False, (8, 1)),
    ],
)
def test_blocks_of_many_streams(
    keys: int,
    batch: int,
    heads: tuple[int, int],
    headdim: int,
    float8: bool,
    shape: tuple[int, int],
) -> None:
    operands, form = Operands(), None
    if float8:
        form = PageForm(100, batch * -(-keys // 100), -(-keys // 100), False, "int32")
    problem = Problem(
        **{"dtype": "bfloat16", "batch": batch, "nheads_q": heads[0], "nheads_kv": heads[1]},
        **{"headdim": headdim, "headdim_v": headdim, "packed": False, "rows_q": 1, "rows_k": keys},
        **{"max_seqlen_q": 1, "max_seqlen_k": keys, "ragged": float8, "window_left": None},
        **{"window_right": None, "sink": 0, "top_left": False, "scale": 1.0, "pages": form},
        float8=float8,
    )
    if float8:
        operands = replace(operands, strides=strides_of_pages(problem))
    config = sm90_decode.choose(problem, H200, operands)
    assert (config.waves, config.blocks_per_sm) == shape


def tile(
    batch: int,
    rows: int,
    keys: int,
    heads: tuple[int, int],
    headdim: int,
    causal: bool,
    page_size: int = 0,
    operands: Operands = NO_OPERANDS,
    window: int | None = None,
    **scores: Any,
) -> str:
    """The tile that a call on an H200 takes: blocks that share an SM, consumers x keys, "split" if stream-K splits tiles."""
    pages = -(-keys // page_size) if page_size else 0
    form = PageForm(page_size, batch * pages, pages, False, "int32") if page_size else None
    problem = Problem(
        **{"dtype": "bfloat16", "batch": batch, "nheads_q": heads[0], "nheads_kv": heads[1]},
        **{
            "headdim": headdim,
            "headdim_v": headdim,
            "packed": False,
            "rows_q": rows,
            "rows_k": keys,
        },
        **{"max_seqlen_q": rows, "max_seqlen_k": keys, "ragged": bool(page_size)},
        **{"window_left": window, "window_right": 0 if causal else None, "sink": 0},
        **{"top_left": False, "scale": 1.0, "pages": form},
        **scores,
    )
    if form is not None:
        operands = replace(operands, strides=strides_of_pages(problem))
    assert sm90_forward.supports(problem, H200, operands) is None
    config = sm90_forward.choose(problem, H200, operands)
    blocks = f"{config.blocks_per_sm} blocks " if config.blocks_per_sm > 1 else ""
    return f"{blocks}{config.consumers} x {config.tile_k}" + ", split" * config.stream_k


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # Chunks on cached keys: smaller tiles in whole rounds, or stream-K for the tiles behind the whole rounds.
        ((1, 256, 8448, (32, 8), 128, True), "2 x 128, split"),
        ((1, 512, 33280, (32, 8), 128, True), "3 x 80, split"),
        ((8, 512, 8704, (32, 8), 128, True, 16), "3 x 80, split"),
        ((1, 2048, 10240, (32, 8), 128, True, 16), "3 x 80, split"),
        ((1, 512, 8704, (32, 8), 128, True), "2 x 128"),
        ((1, 512, 8704, (32, 8), 128, True, 16), "2 x 128"),
        # Each head's last tile has rows for one of three consumers, which share its keys. It counts less in a line.
        ((8, 256, 8448, (32, 8), 128, True), "3 x 80, split"),
        ((8, 256, 8448, (32, 8), 128, True, 16), "3 x 80, split"),
        ((16, 128, 8448, (32, 8), 128, True), "3 x 80, split"),
        ((11, 256, 8448, (32, 8), 128, True), "3 x 80, split"),
        ((4, 256, 8448, (32, 8), 128, True), "3 x 80, split"),
        ((8, 256, 4096, (32, 8), 128, True), "3 x 64, split"),
        ((8, 100, 16384, (16, 2), 128, False), "3 x 80, split"),
        ((16, 192, 16384, (32, 8), 128, True), "3 x 80"),
        ((8, 2048, 10240, (32, 8), 128, True, 16), "3 x 80"),
        # Few rows on some thousand keys: tiles that would leave most SMs idle are split by keys, whatever the number of tiles.
        ((1, 40, 4771, (16, 2), 128, False), "1 x 128, split"),
        ((2, 76, 6813, (8, 8), 256, False), "1 x 64, split"),
        ((1, 64, 4096, (32, 8), 64, True, 16), "1 x 128, split"),
        ((1, 16, 32768, (64, 8), 256, True, 16), "1 x 64, split"),
        # Not split: the pieces would read other keys than their neighbours at any time, together more than the L2 cache holds.
        ((64, 16, 2048, (32, 8), 128, True, 16), "3 x 80"),
        # Short sequences: large tiles would leave consumers without rows, or parts of key tiles without keys.
        ((128, 128, 128, (16, 16), 64, False), "2 blocks 2 x 48"),
        ((2, 4096, 77, (10, 10), 64, False), "4 blocks 1 x 48"),
        ((32, 257, 257, (16, 16), 64, False), "4 blocks 1 x 48"),
        ((64, 197, 197, (12, 12), 64, False), "4 x 64"),
        ((16, 512, 512, (16, 16), 64, False), "4 x 64"),
        ((64, 128, 128, (16, 16), 128, False), "2 x 128"),
        ((4, 1024, 80, (16, 16), 128, False), "3 x 80"),
        ((32, 197, 197, (16, 16), 96, True), "2 blocks 2 x 32"),
        ((32, 256, 256, (16, 16), 96, False), "2 x 128"),
        ((64, 197, 197, (16, 16), 128, True), "2 blocks 1 x 64"),
        ((4, 128, 128, (8, 8), 192, False), "1 x 64"),
        ((2, 1024, 1024, (20, 20), 64, False), "3 x 128"),
        # Calls that fill the GPU keep the first rows of the tables.
        ((16, 1024, 1024, (16, 16), 128, True), "3 x 64"),
        ((4, 4096, 4096, (16, 16), 128, True), "3 x 64"),
        ((4, 4096, 4096, (32, 32), 64, False), "4 x 64"),
        ((1, 16384, 16384, (16, 16), 128, True), "3 x 80"),
        ((4, 4096, 4096, (8, 8), 256, True), "2 x 64"),
    ],
    ids=str,
)
def test_tiles_that_fill_the_machine(call: tuple[Any, ...], expected: str) -> None:
    """The chosen tile is the fastest of those measured, or within a tenth of it (docs/notes/hopper-forward.md)."""
    assert tile(*call) == expected


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "headdim", "window", "expected"),
    [
        # Tiles of few rows meet fewer keys that their rows do not see. The length of the sequences does not matter.
        (9, 338, (4, 4), 128, 58, "2 blocks 1 x 64"),
        (4, 1979, (4, 1), 128, 34, "2 blocks 1 x 64"),
        (4, 300, (12, 12), 64, 40, "3 blocks 1 x 64"),
        (22, 2172, (4, 4), 64, 76, "4 blocks 1 x 48"),
        (17, 7963, (8, 2), 64, 112, "4 blocks 1 x 48"),
        (21, 276, (32, 8), 96, 189, "2 blocks 2 x 32"),
        (3, 5609, (48, 12), 96, 28, "2 blocks 2 x 32"),
        # Wide windows and calls that fill the GPU keep the first rows of the tables.
        (8, 5057, (2, 2), 128, 1023, "3 x 64"),
        (1, 16384, (32, 32), 64, 1024, "4 x 64"),
        (6, 3962, (16, 16), 96, 789, "4 x 48"),
    ],
)
def test_tiles_under_a_window(
    batch: int, rows: int, heads: tuple[int, int], headdim: int, window: int, expected: str
) -> None:
    """The chosen tile is the fastest of those measured (docs/notes/hopper-forward.md)."""
    assert tile(batch, rows, rows, heads, headdim, True, window=window) == expected


@pytest.mark.parametrize(
    ("call", "option", "expected"),
    [
        ((4, 3082, (16, 16), 64, 54), "softcap", "3 blocks 1 x 64"),
        ((6, 3170, (16, 4), 96, 41), "alibi_slopes", "2 blocks 2 x 32"),
        ((3, 1412, (8, 8), 128, 269), "alibi_slopes", "2 blocks 1 x 64"),
        ((1, 4527, (32, 8), 64, 54), "alibi_slopes", "4 blocks 1 x 48"),
        # Here a softcap leaves no registers for blocks that share an SM.
        ((11, 3231, (4, 4), 128, 53), "softcap", "3 x 64"),
    ],
    ids=str,
)
def test_tiles_of_scores_under_a_window(call: tuple[Any, ...], option: str, expected: str) -> None:
    """The chosen tile is the fastest of those measured (docs/notes/hopper-forward.md)."""
    batch, rows, heads, headdim, window = call
    given = 30.0 if option == "softcap" else ArrayForm("float32", (heads[0],), (heads[0],))
    got = tile(batch, rows, rows, heads, headdim, True, window=window, **{option: given})
    assert got == expected


@pytest.mark.parametrize(
    ("batch", "rows", "longest", "heads", "headdim", "expected"),
    [
        # One or two sequences may be long, and the others then are short.
        (4, 1561, 686, 16, 96, (3, 112)),
        (23, 26785, 2219, 2, 96, (3, 112)),
        (7, 7517, 1488, 3, 64, (3, 128)),
        # Two short sequences: a consumer alone on its SM has all registers.
        (2, 570, 450, 12, 64, (1, 128)),
    ],
)
def test_tiles_of_unlike_lengths(
    batch: int, rows: int, longest: int, heads: int, headdim: int, expected: tuple[int, int]
) -> None:
    """The chosen tile is the fastest of those measured (docs/notes/hopper-forward.md)."""
    x = np.broadcast_to(np.zeros((), np.float16), (rows, heads, headdim))
    lengths = {"packed": True, "ragged": True, "batch": batch}
    most = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    problem = replace(describe(x[None], x[None], x[None])[0], **lengths, **most)
    config = sm90_forward.choose(problem, H200, Operands())
    assert (config.consumers, config.tile_k) == expected


@pytest.mark.parametrize(
    ("rows", "heads", "headdim", "causal", "expected"),
    [
        (4096, (2, 1), 64, True, "2 x 128, split"),
        (16384, (2, 1), 64, True, "3 x 64, split"),
        # With three consumers the longest tile alone would take longer than the whole call with two.
        (8192, (4, 4), 128, True, "2 x 128"),
        (4096, (8, 8), 128, False, "2 x 128"),
        (2048, (16, 16), 64, True, "3 x 64"),
        (16384, (16, 16), 128, True, "3 x 64"),
    ],
)
def test_few_tiles_beside_a_bias(
    rows: int, heads: tuple[int, int], headdim: int, causal: bool, expected: str
) -> None:
    shape = (1, 1, rows, rows)
    operands = Operands(option_strides={"bias": (0, 0, 2 * rows, 2)}, alignments={"bias": 0})
    bias = ArrayForm("bfloat16", shape, shape)
    found = tile(1, rows, rows, heads, headdim, causal, operands=operands, bias=bias)
    assert found == expected


@pytest.mark.parametrize(("batch", "rows", "headdim"), [(64, 128, 64), (64, 197, 128)])
def test_tiles_that_share_a_multiprocessor(batch: int, rows: int, headdim: int) -> None:
    """Blocks that share an SM fit it together. Only calls that scale and mask scores, and no more, choose such tiles."""
    q = np.broadcast_to(np.zeros((), np.float16), (batch, rows, 16, headdim))

    def chosen(**scores: Any) -> sm90_forward_config.Config:
        problem = replace(describe(q, q, q, causal=True)[0], **scores)
        return sm90_forward.choose(problem, H200, Operands())

    config = chosen()
    assert config.blocks_per_sm > 1
    registers = config.producer_registers + config.consumers * config.consumer_registers
    assert config.producer_registers >= 24
    assert 128 * registers * config.blocks_per_sm <= 1 << 16
    # Of the 228 KiB of an SM the system reserves 1 KiB for each block.
    assert (config.shared_bytes + 1024) * config.blocks_per_sm <= 228 << 10
    for scores in ({"softcap": 30.0}, {"dropout_p": 0.1}):
        assert chosen(**scores).blocks_per_sm == 1, scores


@pytest.mark.parametrize("mask", [False, True])
def test_short_sequences_of_padded_batches_and_under_masks(mask: bool) -> None:
    """Short sequences take smaller tiles than long ones in padded batches and under masks too."""

    def rows_of_tile(batch: int, rows: int) -> int:
        q = np.broadcast_to(np.zeros((), np.float16), (batch, rows, 8, 64))
        lengths = SeqLayout(seqlen_q=[rows] * batch, seqlen_k=[rows] * batch)
        options = {"mask": np.ones((batch, 1, 1, rows), bool)} if mask else {"seqs": lengths}
        problem, _ = describe(q, q, q, **options)
        return sm90_forward.choose(problem, H200, Operands()).tile_rows

    assert rows_of_tile(64, 49) == 64
    assert rows_of_tile(64, 2000) >= 128


def test_room_for_the_next_queries() -> None:
    """For every row of the tables: there is a second slot for queries if all blocks of an SM have room for one."""
    tables = tile_tables.SCHEMAS[tile_choice.TILES].tables
    taken: dict[int, set[int]] = {}
    for table in tables:
        for row in tile_tables.table(tile_choice.TILES, table):
            values = 128 if table == "narrow_values" else row.headdim
            q, v = (
                np.broadcast_to(np.float16(0), (1, 512, 2, wide)) for wide in (row.headdim, values)
            )
            with ExitStack() as stack:
                for each in tables:
                    stack.enter_context(using_tiles(tile_choice.TILES, each, [row]))
                config = sm90_forward.choose(describe(q, q, v)[0], H200, Operands())
            slot = config.tile_rows * 128 * -(-row.headdim // 64)
            # Of the 228 KiB of an SM the system reserves 1 KiB for each block.
            room = (228 << 10) // config.blocks_per_sm - 1024
            assert config.shared_bytes <= room, row
            assert config.query_slots == 2 or config.shared_bytes + slot > room, row
            taken.setdefault(row.headdim, set()).add(config.query_slots)
    assert 2 in taken[64]
    assert 1 in taken[256]


@pytest.mark.parametrize(
    ("call", "options", "slots"),
    [
        ((5, 600, 9700, 32, 8, 128), {}, 1),
        ((3, 1300, 9000, 24, 8, 128), {}, 1),
        ((8, 2048, 10240, 32, 8, 128), {}, 1),
        ((5, 600, 6500, 32, 8, 128), {}, 2),  # fewer keys
        ((1, 16384, 16384, 16, 16, 128), {}, 2),  # tiles that are not alike
        ((9, 600, 9700, 32, 8, 128), {}, 2),  # keys are split
        ((5, 600, 9700, 32, 8, 64), {}, 2),
        ((5, 600, 9700, 32, 8, 128), {"window": (4000, 0)}, 2),
        ((5, 600, 9700, 32, 8, 128), {"causal": False, "window": (None, None)}, 2),
    ],
)
def test_slots_of_queries_on_cached_keys(
    call: tuple[int, ...], options: dict[str, Any], slots: int
) -> None:
    batch, rows, keys, nheads_q, nheads_kv, headdim = call
    q, k = (
        np.broadcast_to(np.float16(0), (batch, n, heads, headdim))
        for n, heads in ((rows, nheads_q), (keys, nheads_kv))
    )
    problem, _ = describe(q, k, k, **{"causal": True} | options)
    assert sm90_forward.choose(problem, H200, Operands()).query_slots == slots


@pytest.mark.parametrize(
    "call",
    [
        (4, 300, 5000, 32, 8),
        (7, 90, 20000, 32, 8),
        (3, 77, 9000, 20, 4),
        (16, 112, 8448, 32, 8),
        (12, 1100, 1100, 16, 16),
    ],
)
def test_packed_sequences_of_one_length_have_the_tiles_of_dense_ones(call: tuple[int, ...]) -> None:
    """The bounds of their lengths are rounded up."""
    batch, rows, keys, nheads_q, nheads_kv = call
    q, k = (
        np.broadcast_to(np.float16(0), (batch, n, heads, 128))
        for n, heads in ((rows, nheads_q), (keys, nheads_kv))
    )
    dense, _ = describe(q, k, k, causal=True)
    packed = replace(
        dense,
        **{"packed": True, "ragged": True, "rows_q": batch * rows, "rows_k": batch * keys},
        max_seqlen_q=bound_of(rows, batch * rows),
        max_seqlen_k=bound_of(keys, batch * keys),
    )
    shapes = [
        (config.tile_rows, config.tile_k, config.heads_per_tile, config.stream_k)
        for config in (sm90_forward.choose(each, H200, Operands()) for each in (dense, packed))
    ]
    assert shapes[0] == shapes[1]


def test_blocks_that_share_a_multiprocessor() -> None:
    """Two blocks that share an SM each take longer than a block alone, but less than twice as long."""
    q, k = (np.broadcast_to(np.zeros((), np.float16), (1, n, 2, 64)) for n in (256, 4096))
    problem, _ = describe(q, k, k)
    fields = {"consumers": 1, "tile_k": 32}  # 8 tiles, of a shape that has no correction
    alone = time_estimate.duration(problem, 8, fields, 1)
    assert alone < time_estimate.duration(problem, 4, fields, 1, 2) < 2 * alone
    assert alone == time_estimate.duration(problem, 8, fields, 1, 2)  # each has its own SM


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.1}, {"mask": ArrayForm("bool", (1, 1, 300, 9000), (1, 1, 300, 9000))}],
    ids=("plain", "dropout", "mask"),
)
def test_pages_of_8_bits_have_room(options: dict[str, Any]) -> None:
    """Tiles of 8-bit keys fit shared memory at every head dim, beside the 16-bit tiles that they are converted to. The table's
    rows are used as they stand."""
    form = PageForm(16, 9000, 600, False, "int32")
    for dims in itertools.product((16, 64, 96, 128, 192, 256), repeat=2):
        problem = Problem(
            **{"dtype": "bfloat16", "batch": 8, "nheads_q": 32, "nheads_kv": 8, "packed": False},
            **dict(zip(("headdim", "headdim_v"), dims, strict=True)),
            **{"rows_q": 300, "rows_k": 9600, "max_seqlen_q": 300, "max_seqlen_k": 9000},
            **{"ragged": True, "window_left": None, "window_right": 0, "sink": 0},
            **{"top_left": False, "scale": 1.0, "pages": form, "float8": True, **options},
        )
        assert registry.choose("paged_attention", problem, H200, Operands()).name == "sm90"
        config = sm90_forward.choose(problem, H200, Operands())
        assert config.shared_bytes <= H200.shared_limit
        assert config.float8
        assert config.tile_k % config.page_rows == 0
        if not options and config.consumers == row_of(dims)["consumers"]:
            assert config.tile_k == row_of(dims)["tile_k"]
            assert config.stages == row_of(dims)["stages"]


def row_of(dims: tuple[int, int]) -> dict[str, Any]:
    rows = tile_tables.table(tile_choice.TILES, "paged_8bit")
    return next(row.fields for row in rows if max(dims) <= row.headdim)


def test_tiles_kept_for_the_end_are_shorter_ones() -> None:
    """Only where tiles differ in length are the shorter ones kept for the end. New rows on many cached keys have tiles of about
    one length: to keep some would only read their keys twice."""

    def kept(rows: int, keys: int) -> int:
        q, k = (np.broadcast_to(np.float16(0), (8, n, 8, 128)) for n in (rows, keys))
        problem, _ = describe(q, k, k, causal=True)
        config = sm90_forward.choose(problem, H200, Operands())
        return sm90_forward_steps.kept_tiles(problem, config, 132)

    assert 0 < kept(2048, 4096) < kept(2048, 2048) < -(-2048 // 192)
    assert kept(2048, 10240) == kept(256, 8448) == 0


@pytest.mark.parametrize(
    ("call", "options", "pairs"),
    [
        ((16, 192, 16384, 32, 8, 128), {}, True),  # four tiles of a kv head
        ((8, 256, 8448, 32, 8, 128), {}, False),  # of two consumers
        ((2, 768, 16384, 16, 16, 128), {}, True),
        ((8, 256, 8448, 16, 8, 192), {}, True),
        ((8, 512, 8704, 32, 8, 256), {}, True),  # sixteen tiles
        ((8, 384, 8192, 32, 8, 128), {}, False),  # eight
        ((16, 128, 10000, 32, 8, 128), {}, False),  # three
        ((8, 256, 12000, 32, 8, 64), {}, False),
        ((16, 320, 4096, 16, 16, 128), {}, False),  # few keys
        ((3, 320, 16384, 16, 16, 128), {}, False),  # few tiles
        ((8, 512, 8704, 32, 8, 128), {}, False),  # keys are split
        ((4, 320, 16384, 16, 16, 128), {}, False),  # split, as last tiles have rows for two: 0.90
        ((8, 256, 8448, 32, 8, 128), {"softcap": 30.0}, False),
        ((8, 256, 8448, 32, 8, 128), {"window": (4000, 0)}, False),
        ((8, 256, 8448, 32, 8, 128), {"seqs": SeqLayout(seqlen_k=[8448] * 8)}, False),
    ],
)
def test_pairs_of_blocks_on_cached_keys(
    call: tuple[int, ...], options: dict[str, Any], pairs: bool
) -> None:
    batch, rows, keys, nheads_q, nheads_kv, headdim = call
    shapes = ((batch, rows, nheads_q), (batch, keys, nheads_kv), (batch, keys, nheads_kv))
    arrays = [np.broadcast_to(np.zeros((), np.float16), (*x, headdim)) for x in shapes]
    problem, _ = describe(*arrays, causal=True, **options)
    assert (sm90_forward.choose(problem, H200, Operands()).cluster == 2) == pairs


def test_sections_of_few_rounds() -> None:
    """A section of heads has two rounds of tiles, where a call has few rounds of alike tiles."""

    def sections(batch: int, rows: int, keys: int, **options: Any) -> int:
        q, k = (
            np.broadcast_to(np.float16(0), (batch, n, h, 128)) for n, h in ((rows, 32), (keys, 8))
        )
        problem, _ = describe(q, k, k, **{"causal": True} | options)
        config = sm90_forward.choose(problem, H200, Operands())
        clusters = 132 // config.cluster
        nbytes = sm90_forward_steps.section_bytes(problem, config, clusters)
        # As sections_of() in kernels_cu/attn/schedule/order.cuh counts them.
        return min(8 * keys // (nbytes // 512), 7) + 1

    assert sections(1, 2048, 10240) == sections(1, 2048, 34816) == sections(2, 2048, 10240) == 1
    assert sections(1, 4096, 20000) == 2
    assert sections(8, 2048, 10240) == 5, "twenty rounds"
    assert sections(1, 1024, 9216) == 5, "one round and a third"
    assert sections(1, 512, 33280) == 8, "less than a round"
    assert sections(1, 4096, 12288) == 6, "unlike tiles"
    assert sections(1, 2048, 10240, causal=False) == 5
    assert sections(1, 2048, 10240, window=(4000, 0)) == 5


def test_no_queries() -> None:
    """A call whose lengths on the host are 0, though its arrays have rows, splits nothing."""
    for keys in (40, stream_k.ALWAYS_KEYS):
        q, k = (np.broadcast_to(np.float16(0), (1, rows, 4, 128)) for rows in (38, keys))
        problem, _ = describe(q, k, k, causal=True, seqs=SeqLayout(seqlen_q=[0]))
        assert not sm90_forward.choose(problem, H200, Operands()).stream_k
