"""Estimates of the time that tiles of Hopper's forward take, and lengths that packed batches may have for them."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.pages import PageForm
from rawattn._call.problem import Problem, describe
from rawattn._kernels.operands import Operands
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import line_estimate, packed_lengths, time_estimate
from rawattn._kernels.sm90.tile_heads import heads_per_tile
from rawattn._kernels.sm90.tile_times import BEGIN_KEYS
from tests.problems import CALL_OF_MANY, H200


@pytest.mark.parametrize(
    ("group", "rows", "heads"),
    [(2, 400, 2), (4, 197, 4), (5, 197, 5), (9, 70, 9), (3, 400, 3), (6, 200, 6), (12, 197, 12)],
)
def test_last_tiles_that_are_weighed(group: int, rows: int, heads: int) -> None:
    """A last tile of few rows counts less, unless each consumer has all rows of some heads, so that none is idle."""
    q = np.broadcast_to(np.float16(0), (64, rows, group, 128))
    k = np.broadcast_to(np.float16(0), (64, 9000, 1, 128))
    problem, _ = describe(q, k, k, causal=True)
    assert heads_per_tile(problem, 192) == heads
    weighed = line_estimate.last_share(problem, 3, 80, heads, 132, 1) > 0
    assert weighed == (heads not in (3, 6, 12))


@pytest.mark.parametrize(
    ("rows", "weighed"),
    [((197,) * 64, True), ((208, 193) * 32, True), ((250, 130) * 32, False), ((192,) * 64, False)],
)
def test_last_tiles_of_a_packed_batch(rows: tuple[int, ...], weighed: bool) -> None:
    """Last tiles of a packed batch may be weighed if so many rows can be rows for as many consumers in all sequences."""
    q = np.broadcast_to(np.float16(0), (sum(rows), 4, 128))
    k = np.broadcast_to(np.float16(0), (64 * 9000, 1, 128))
    starts = [np.cumsum((0, *lens)).astype(np.int32) for lens in (rows, (9000,) * 64)]
    problem, _ = describe(
        q, k, k, causal=True, seqs=SeqLayout(seqstart_q=starts[0], seqstart_k=starts[1])
    )
    heads = heads_per_tile(problem, 192)
    busy = line_estimate.busy_consumers(problem, 3, heads)
    assert busy == 3 * (max(rows) // 48) + -(-(max(rows) % 48) // 16)
    assert (line_estimate.last_share(problem, 3, 80, heads, 132, 1) > 0) == weighed


def test_lengths_of_a_packed_batch() -> None:
    """Lengths that a packed batch may have use its rows up. In pages nobody has counted the keys."""
    fields = {"consumers": 1, "tile_k": 32}
    batch = replace(
        CALL_OF_MANY,
        **{"batch": 10, "nheads_q": 2, "nheads_kv": 2, "packed": True, "ragged": True},
        **{
            "window_right": None,
            "rows_q": 640,
            "max_seqlen_q": 64,
            "rows_k": 10_000 + 9 * 96,
            "max_seqlen_k": 10_000,
        },
    )
    found = [
        [(part.batch, part.max_seqlen_q, part.max_seqlen_k) for part in parts]
        for _, parts in packed_lengths.possible_lengths(batch)
    ]
    assert found[0] == [(1, 64, 10_000), (9, 64, 96)]
    assert found[2] == [(10, 64, 1087)]
    for lengths in found:
        assert sum(count for count, _, _ in lengths) == 10
        assert sum(count * q for count, q, _ in lengths) == 640
        assert sum(count * k for count, _, k in lengths) == pytest.approx(10_864, abs=10)
    of_k = [k for count, _, k in found[1] for _ in range(count)]
    assert of_k[0] == 10_000 and of_k == sorted(of_k, reverse=True) and of_k[1] > 96 > of_k[-1] > 0

    def duration(problem: Problem) -> float:
        return time_estimate.duration(problem, 1, fields, 1) - time_estimate.CALL_KEYS

    # One SM takes about as long for each of them. Reads overlap products of the other as well.
    one = replace(batch, batch=1, rows_q=64, rows_k=10_000)
    others = replace(batch, batch=9, rows_q=576, rows_k=864, max_seqlen_k=96)
    assert duration(batch) == pytest.approx(duration(one) + duration(others), rel=0.02)
    pages = PageForm(16, 6250, 625, False, "int32")
    paged = duration(replace(one, pages=pages))
    assert duration(replace(batch, pages=pages)) == pytest.approx(10 * paged)


def test_sequences_that_are_about_as_long() -> None:
    """The mean length stands for the bound where both are rounded to the same. In pages nobody has counted the keys."""
    batch = replace(
        CALL_OF_MANY,
        **{"batch": 16, "packed": True, "ragged": True, "rows_q": 4800, "rows_k": 80_000},
        **{"max_seqlen_q": 320, "max_seqlen_k": 5120},
    )

    def likely(**changes: Any) -> tuple[int, int]:
        found = packed_lengths.as_long_as_likely(replace(batch, **changes))
        return found.max_seqlen_q, found.max_seqlen_k

    assert likely() == (300, 5000)
    assert likely(max_seqlen_q=352) == (352, 5000)
    assert likely(max_seqlen_k=6144) == (300, 6144)
    assert likely(packed=False) == (320, 5120)
    assert likely(pages=PageForm(16, 6250, 625, False, "int32")) == (300, 5120)


def test_decoded_sequences_among_chunks_in_pages() -> None:
    """One sequence of a packed batch in pages may have nearly all rows, and the others one each."""
    pages = PageForm(16, 40_000, 512, False, "int32")
    batch = replace(
        CALL_OF_MANY,
        **{"batch": 64, "packed": True, "ragged": True, "rows_q": 2048 + 63, "rows_k": 640_000},
        **{"max_seqlen_q": 2048, "max_seqlen_k": 8192, "pages": pages},
    )
    parts = [
        [(part.batch, part.max_seqlen_q, part.max_seqlen_k) for part in parts]
        for _, parts in packed_lengths.possible_lengths(batch)
    ]
    assert parts[0] == [(1, 2048, 8192), (63, 1, 8192)]
    assert parts[2] == [(64, 33, 8192)]


def test_a_lone_sequence_of_a_packed_batch() -> None:
    """It has the batch's rows, whatever longer sequence the bound allows."""
    lone = replace(CALL_OF_MANY, batch=1, packed=True, ragged=True, rows_q=300, rows_k=300)
    lone = replace(lone, max_seqlen_q=4096, max_seqlen_k=4096)
    many = replace(lone, batch=100_000, rows_q=200_000, rows_k=200_000)
    assert all(
        sum(part.batch for part in parts) == many.batch
        for _, parts in packed_lengths.possible_lengths(many)
    )
    for _, parts in packed_lengths.possible_lengths(lone):
        assert [(part.batch, part.max_seqlen_q, part.max_seqlen_k) for part in parts] == [
            (1, 300, 300)
        ]


@pytest.mark.parametrize("seed", range(20))
def test_when_the_last_tile_ends(seed: int) -> None:
    """Each tile is taken by the worker that is free first. A limit that a call is beyond is all that its time is then."""
    draw = random.Random(seed)
    times = sorted((draw.choice((draw.uniform(1, 99), 7.0)) for _ in range(12)), reverse=True)
    tiles = [(time, draw.choice((1, 3, 20, 300))) for time in times]
    workers = draw.choice((1, 5, 132))
    ends = [0.0] * workers
    for time, number in tiles:
        for _ in range(number):
            heapq.heapreplace(ends, ends[0] + time)
    assert time_estimate._end(tiles, workers) == pytest.approx(max(ends))

    rows = draw.randint(100, 3000)
    q = np.broadcast_to(np.float16(0), (rows, 4, 64))
    seqs = SeqLayout.from_lengths([rows // 3, rows - rows // 3], [rows // 3, rows - rows // 3])
    problem, _ = describe(q, q, q, seqs=seqs, causal=True)
    fields = {"consumers": 2, "tile_k": 64}
    exact = time_estimate.duration(problem, 8, fields, 1)
    for enough in (0.1 * exact, 0.9 * exact, exact, 2 * exact):
        found = time_estimate.duration(problem, 8, fields, 1, enough=enough)
        assert found == exact or enough < found < exact


def test_key_tiles_that_begin_before_a_window() -> None:
    """A tile of 64 rows whose window begins inside a key tile meets that key tile too."""
    q = np.broadcast_to(np.zeros((), np.float16), (1, 640, 1, 64))
    fields = {"consumers": 1, "tile_k": 64}

    def longest(window: int) -> float:
        return time_estimate.duration(describe(q, q, q, window=(window, 0))[0], 132, fields, 1)

    assert longest(64) < longest(65) == longest(128)


def test_a_longer_call_takes_longer() -> None:
    """The estimate grows with the call, and a call that leaves SMs idle takes no less than its longest tile."""
    fields = {"consumers": 2, "tile_k": 128}
    q, k = (np.broadcast_to(np.zeros((), np.float16), (1, n, 2, 128)) for n in (256, 768))
    problem, _ = describe(q, k, k)

    def tiles(problem: Problem, multiprocessors: int) -> float:
        return time_estimate.duration(problem, multiprocessors, fields, 1) - time_estimate.CALL_KEYS

    alone = tiles(problem, 132)
    assert alone == tiles(problem, 4) == 768 + BEGIN_KEYS[128][2]
    assert tiles(problem, 2) == 2 * alone
    assert tiles(problem, 3) == 2 * alone
    causal, _ = describe(q, k, k, causal=True)
    assert alone < tiles(causal, 2) <= 2 * alone


def test_blocks_that_share_an_sm_in_the_last_round() -> None:
    """A last round of few tiles is shorter than others: fewer blocks share each SM."""
    fields = {"consumers": 1, "tile_k": 64}

    def tiles(heads: int) -> float:
        q = np.broadcast_to(np.zeros((), np.float16), (1, 64, heads, 128))
        found = time_estimate.duration(describe(q, q, q)[0], 10, fields, 1, blocks=2)
        return found - time_estimate.CALL_KEYS

    assert 1.5 * tiles(20) < tiles(22) < 1.9 * tiles(20)
    assert tiles(40) == pytest.approx(2 * tiles(20))
    assert tiles(10) < tiles(11) == tiles(20), "an SM with two blocks decides"


@pytest.mark.parametrize(("headdim", "slower"), [(40, True), (48, False), (104, True)])
def test_heads_that_begin_inside_a_sector(headdim: int, slower: bool) -> None:
    """Blocks of few rows that share an SM wait for their keys there. Blocks of more rows load them less often."""

    def duration(headdim: int, consumers: int, blocks: int) -> float:
        q = np.broadcast_to(np.zeros((), np.float16), (16, 1331, 10, headdim))
        k = np.broadcast_to(np.zeros((), np.float16), (16, 571, 10, headdim))
        fields = {"consumers": consumers, "tile_k": 64}
        return time_estimate.duration(describe(q, k, k)[0], 132, fields, 1, blocks=blocks)

    beside = -(-headdim // 16) * 16
    assert (duration(headdim, 1, 3) > 1.3 * duration(beside, 1, 3)) == slower
    assert duration(headdim, 3, 1) == duration(beside, 3, 1)


def few_rows(*shape: int) -> Problem:
    """Rows of sequences on many keys, not causal. shape: sequences, rows, keys, heads of queries and of keys, head dim."""
    batch, rows, keys, nheads_q, nheads_kv, headdim = shape
    q = np.broadcast_to(np.float16(0), (batch, rows, nheads_q, headdim))
    k = np.broadcast_to(np.float16(0), (batch, keys, nheads_kv, headdim))
    return describe(q, k, k)[0]


def test_products_beside_reads() -> None:
    """Products and reads from DRAM overlap, but not wholly. Short sequences were measured with their reads."""
    fields = {"consumers": 2, "tile_k": 128}

    def duration(keys: int, nheads_kv: int) -> float:
        problem = few_rows(8, 128, keys, 16, nheads_kv, 128)
        return time_estimate.duration(problem, 132, fields, 1) - time_estimate.CALL_KEYS

    begin = BEGIN_KEYS[128][2]
    products, read = 4096 + begin, 1.67 * 4096 * 8 * 16 / 132
    assert max(products, read) < duration(4096, 16) < products + read
    assert duration(4096, 1) == pytest.approx(products, rel=0.01)
    assert duration(768, 1) == duration(768, 8) == 768 + begin


@pytest.mark.parametrize(
    ("rows", "keys", "stages", "shared"),
    [
        (192 + 64, 2000, 3, True),
        (192 + 1, 448, 3, True),
        (192 + 65, 2000, 3, False),  # rows for two consumers
        (192 + 64, 447, 3, False),  # merging would take longer
        (192 + 64, 2000, 2, False),  # no slots for each consumer
    ],
)
def test_a_last_tile_whose_keys_consumers_share(
    rows: int, keys: int, stages: int, shared: bool
) -> None:
    """A tile with rows for one of three consumers is estimated to take less than half of another, if they share its keys."""

    def tile(rows: int) -> float:
        problem = few_rows(1, rows, keys, 2, 2, 128)
        fields = {"consumers": 3, "tile_k": 64, "stages": stages}
        times = time_estimate._tiles(problem, fields, 1, 1, 1)
        return min(time for time, _ in times)

    begin = BEGIN_KEYS[128][3]
    assert (tile(rows) - begin < 0.5 * (tile(192) - begin)) == shared


@pytest.mark.parametrize(("rows", "shared"), [(5, True), (6, False)])
def test_interleaved_rows_that_one_consumer_has(rows: int, shared: bool) -> None:
    """Five rows of twelve heads are 60 of one consumer's 64 rows; six are 72, so two consumers have some."""
    problem = few_rows(12, rows, 4770, 48, 4, 192)
    fields = {"consumers": 2, "tile_k": 96, "stages": 2}
    ((time, _),) = time_estimate._tiles(problem, fields, 12, 1, 1)
    assert (time < 0.6 * 4770) == shared


@pytest.mark.parametrize(
    ("shape", "consumers", "splits"),
    [
        # Tiles of more rows that are split took 0.82 to 0.87 of the time of whole ones.
        ((8, 32, 4096, 40, 8, 128), 3, True),
        ((8, 24, 5000, 56, 8, 128), 3, True),
        # Pieces of heads that share cache lines took 1.3 times as long where they begin at different keys as where they do not.
        ((8, 9, 37033, 32, 8, 96), 1, True),
        # They cannot begin at the same keys where tiles are more than half as many as SMs.
        ((12, 10, 12915, 32, 8, 96), 1, False),
        # So do pieces of two tiles of a head: 1.26 times as long.
        ((6, 238, 3219, 8, 8, 128), 2, False),
    ],
)
def test_few_rows_on_many_keys(shape: tuple[int, ...], consumers: int, splits: bool) -> None:
    config = sm90_forward.choose(few_rows(*shape), H200, Operands())
    assert (config.consumers, config.stream_k) == (consumers, splits)


def test_tiles_of_packed_batches() -> None:
    """A packed batch takes other tiles than usual if these are faster for the lengths that it may have, taken together."""

    def consumers(*lengths: int, nheads: int = 4, causal: bool = True) -> int:
        q = np.broadcast_to(np.float16(0), (sum(lengths), nheads, 128))
        seqs = SeqLayout.from_lengths(lengths, lengths)
        problem, _ = describe(q, q, q, seqs=seqs, causal=causal)
        return sm90_forward.choose(problem, H200, Operands()).consumers

    usual = consumers(*[4000] * 8)
    assert consumers(3000) < usual
    assert consumers(1300, 1300, 1300, 1300, nheads=16) == usual
    assert consumers(1517, 191, nheads=20, causal=False) == 2 < usual
