"""Into how many pieces keys are split: this depends on the bounds of a call and on the GPU alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn._call.problem import describe
from rawattn._call.seq_layout import SeqLayout
from rawattn._call.structure import structure
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import decode, decode_tiles, forward, splits
from rawattn._kernels.steps import Tiles
from rawattn._kernels.target import Target
from rawattn._strides import contiguous
from tests.memory import DTYPES

H200 = Target("sm_90a", 232448, multiprocessors=132)


class Like:
    """An array's shape and dtype."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, DTYPES["bfloat16"]


def split_of(
    batch: int, rows: int, keys: int, heads: int = 8, target: Target = H200, **options: Any
) -> tuple[splits.Splits, forward.Config]:
    q, k = Like(batch, rows, heads, 128), Like(batch, keys, heads, 128)
    problem, lengths = describe(q, k, k, **options)
    config = forward.choose(problem, target, Operands())
    tiles = Tiles("q", config.tile_q, heads)
    return splits.split(problem, structure(lengths), config, target, tiles), config


def test_one_never_splits() -> None:
    assert split_of(1, 1, 1 << 17, num_splits=1)[0] == splits.WHOLE


@pytest.mark.parametrize("count", [2, 7, 256])
def test_a_number_is_exact(count: int) -> None:
    """A given number of pieces is used exactly if there are as many key tiles. Else each key tile is a piece."""
    found, config = split_of(64, 5000, 1 << 17, num_splits=count)
    assert (found.count, found.least) == (count, 1)
    short, _ = split_of(64, 5000, 3 * config.tile_k - 1, num_splits=count)
    assert short.count == min(count, 3)
    assert split_of(1, 1, config.tile_k, num_splits=count)[0] == splits.WHOLE


def test_few_queries_fill_the_machine() -> None:
    found, config = split_of(1, 1, 1 << 17)
    blocks = found.count * 8
    assert 0.9 * 132 * config.blocks_per_sm <= blocks <= 132 * config.blocks_per_sm
    assert found.count * found.least * config.tile_k >= 1 << 17


def test_equal_tiles_that_fill_the_machine_stay_whole() -> None:
    assert split_of(64, 1, 1 << 17)[0] == splits.WHOLE


def test_pieces_are_worth_their_merge() -> None:
    for keys in (1, 100, 700, 3000, 10000):
        found, config = split_of(1, 1, keys)
        assert found == splits.WHOLE or found.least * config.tile_k >= splits.LEAST_KEYS


def test_a_window_is_what_is_split() -> None:
    assert split_of(1, 1, 1 << 17, window=(300, 0))[0] == splits.WHOLE
    found, config = split_of(1, 1, 1 << 17, window=(8000, 0), sink=4)
    assert 8000 < found.count * found.least * config.tile_k < 8000 + 5 * found.count * config.tile_k


def test_a_long_sequence_among_short_ones_has_more_pieces() -> None:
    """Pieces have a common length, not a common number: a long sequence is split though the sequences alone fill the GPU."""
    lengths = [1 << 17] + [2048] * 63
    found, config = split_of(64, 1, 1 << 17, seqs=SeqLayout(seqlen_k=lengths))
    pieces = [-(-length // (found.least * config.tile_k)) for length in lengths]
    assert pieces[0] == found.count > 16
    assert pieces[1:] == [1] * 63


def test_tiles_of_many_queries_stay_whole() -> None:
    assert (
        split_of(8, 4096, 4096, seqs=SeqLayout(seqlen_k=[4096] * 8), causal=True)[0] == splits.WHOLE
    )


def test_nothing_is_split_for_nobody() -> None:
    assert split_of(0, 1, 1 << 17, num_splits=4)[0] == splits.WHOLE
    compiled_only = replace(H200, multiprocessors=1)
    assert split_of(1, 1, 1 << 17, target=compiled_only)[0] == splits.WHOLE


def test_memory_is_that_of_all_pieces() -> None:
    found, config = split_of(2, 300, 5000, num_splits=5)
    tiles = 2 * 8 * -(-300 // config.tile_q)
    assert found.tiles == tiles
    block = config.waves * config.partial_bytes
    # The output and, for each row, two numbers in each of the four lanes that hold elements of it.
    assert block == config.tile_q * (128 + 8) * 4
    assert found.scratch(block) == {"split_partials": tiles * 5 * block}
    assert found.counters() == {"split_arrived": 4 * tiles}


@pytest.mark.parametrize("family", [forward, decode])
def test_more_pieces_than_the_gpu_has_memory_for_are_refused(family: Any) -> None:
    """The error names num_splits and the bytes that it would take. A given number of pieces is not reduced
    to fit in memory."""
    rows = 1 if family is decode else 8192
    q, k = Like(64, rows, 8, 128), Like(64, 1 << 17, 8, 128)
    shapes = {"q": q.shape, "out": q.shape, "k": k.shape, "v": k.shape}
    operands = Operands({name: contiguous(shape, 2) for name, shape in shapes.items()})

    def scratch(memory: int | None, num_splits: int | None) -> int:
        problem, lengths = describe(q, k, k, num_splits=num_splits)
        target = replace(H200, memory=memory)
        found = family.steps(problem, structure(lengths), operands, target)
        return found.scratch.get("split_partials", 0)

    nbytes = scratch(None, 256)
    assert nbytes > 256 * 64 * rows * 8 * 128 * 4  # the outputs of all pieces alone
    assert scratch(nbytes, 256) == nbytes
    with pytest.raises(ValueError, match=rf"^num_splits: got 256, .* {nbytes} bytes"):
        scratch(nbytes - 1, 256)
    assert scratch(1 << 40, None) < nbytes


def line_of(batch: int, keys: int, heads: int, **options: Any) -> splits.Line:
    q, k = Like(batch, 1, 4 * heads, 128), Like(batch, keys, heads, 128)
    problem, lengths = describe(q, k, k, **options)
    config = replace(decode.choose(problem, H200, Operands()), waves=8, blocks_per_sm=1)
    tiles = Tiles("q", config.tile_q, decode_tiles.of_heads(problem, config.heads))
    return splits.line(problem, structure(lengths), config, H200, tiles, config.waves)


@pytest.mark.parametrize(
    ("batch", "keys", "heads", "parts"),
    [
        (64, 4096, 4, 32),  # there is room for 33 parts, of which 31 would end within a sequence
        (32, 4096, 1, 128),
        (16, 64, 1, 16),  # a part for each sequence, though it has few keys
        (1, 4096, 8, 16),
        (1, 1 << 20, 1, 131),
        (1, 384, 8, 1),  # to merge three parts would take longer than they save
        (1, 1000, 8, 8),
        (1, 2500, 1, 20),
        (3, 1000, 8, 12),  # with 15 the longest would still have two units, and more are merged
        (12, 1500, 8, 12),  # with four more, parts would end within sequences
        (12, 20000, 8, 16),
        (25, 100, 8, 16),  # one unit a sequence: no part ends within one
    ],
)
def test_parts_of_a_line(batch: int, keys: int, heads: int, parts: int) -> None:
    line = line_of(batch, keys, heads)
    assert line.blocks == parts * line.abreast
    assert line.fields(heads)["splits.blocks"] == parts


def test_parts_of_lengths() -> None:
    """With lengths the launch has as many parts as there may be: the kernel decides whether fewer take less time."""
    seqs = SeqLayout(seqlen_k=np.full(12, 1500))
    assert line_of(12, 1500, 8, seqs=seqs).blocks == 16 * 8


@pytest.mark.parametrize(
    ("heads", "abreast"),
    [(1, 1), (8, 8), (11, 11), (28, 14), (32, 32), (40, 40), (48, 24), (71, 1), (128, 64)],
)
def test_heads_abreast(heads: int, abreast: int) -> None:
    """Heads abreast are neighbours in memory. There are as many as leave few blocks idle."""
    assert line_of(64, 4096, heads).abreast == abreast
