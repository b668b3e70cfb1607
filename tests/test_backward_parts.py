"""How many blocks share a key tile in the backward: several where there are few key tiles and many query tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.integers import LONGEST
from rawattn._call.options import ArrayForm
from rawattn._call.problem import Problem, describe
from rawattn._call.structure import structure
from rawattn._kernels import gathered
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward as portable_backward
from rawattn._kernels.portable import backward_parts
from rawattn._kernels.portable.backward_steps import steps
from tests.problems import H200


def count(problem: Problem) -> int:
    """Return the number of blocks that share a key tile."""
    config = portable_backward.choose(problem, H200, Operands())
    return backward_parts.parts(problem, H200, config)


def dense(
    batch: int,
    heads: tuple[int, int],
    rows: tuple[int, int],
    *,
    kept: int | None = None,
    mask: bool = False,
    **options: Any,
) -> Problem:
    """Return the problem of a dense batch.

    kept: the number of kept keys, in a list that all rows share.
    """
    q, k = (
        np.broadcast_to(np.float16(0), (batch, n, nheads, 64))
        for n, nheads in zip(rows, heads, strict=True)
    )
    problem, _ = describe(q, k, k, **options)
    if kept is not None:
        shape = (1, 1, 1, rows[1])
        problem = replace(problem, mask=ArrayForm("bits", shape, shape)._replace(kept=kept))
        return gathered.by_mask(problem, Operands()).problem
    shape = (1, 1, *rows)
    return replace(problem, mask=ArrayForm("bits", shape, shape)) if mask else problem


def ragged(
    heads: tuple[int, int], lens_q: list[int], lens_k: list[int], *, packed: bool = True, room: int = 0
) -> Problem:  # fmt: skip
    """Return the problem of a ragged batch, with bounds on the lengths as a call has.

    room: rows of keys of a padded array.
    """
    rows = [sum(lens_q), sum(lens_k)] if packed else [max(lens_q), max(*lens_k, room)]
    lead = () if packed else (len(lens_q),)
    q, k = (
        np.broadcast_to(np.float16(0), (*lead, n, nheads, 64))
        for n, nheads in zip(rows, heads, strict=True)
    )
    given = {"seqlen_q": lens_q, "seqlen_k": lens_k}
    seqs = SeqLayout.from_lengths(lens_q, lens_k) if packed else SeqLayout(**given)
    problem, lengths = describe(q, k, k, causal=lens_q == lens_k, seqs=seqs)
    form = structure(lengths)
    return replace(problem, max_seqlen_q=form.q.length_bound, max_seqlen_k=form.k.length_bound)


def test_few_key_tiles_are_shared() -> None:
    assert count(dense(1, (2, 1), (4096, 4096), causal=True)) > 4
    assert count(dense(1, (2, 1), (16384, 16384), causal=True)) > 1
    assert count(dense(1, (1, 1), (4096, 4096))) > 1
    # The heads of a GQA group add steps too: here all queries of a head are one tile.
    assert count(dense(2, (32, 2), (128, 500))) > 4


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "fastest"),
    [
        (2, (4, 2), 1024, 4),
        (1, (2, 2), 4096, 4),
        (1, (2, 1), 8192, 4),
        (1, (4, 1), 4096, 8),
        (1, (8, 2), 2048, 7),
        (1, (32, 8), 512, 4),
        (4, (2, 1), 1024, 4),
        (1, (2, 1), 16384, 2),
    ],
)
def test_causal_key_tiles_are_shared_by_the_fastest_number(
    batch: int, heads: tuple[int, int], seqlen: int, fastest: int
) -> None:
    """Of those that were timed on an H200 (docs/notes/portable-backward.md)."""
    assert count(dense(batch, heads, (seqlen, seqlen), causal=True)) == fastest


def test_many_key_tiles_are_not() -> None:
    assert count(dense(4, (32, 32), (4096, 4096), causal=True)) == 1
    assert count(dense(1, (1, 1), (128 * 132, 128 * 132))) == 1
    # There is too little work to share.
    assert count(dense(1, (1, 1), (256, 256), causal=True)) == 1


def test_a_mask_counts_for_nothing() -> None:
    assert count(dense(1, (2, 1), (4096, 4096), mask=True, causal=True)) > 4
    assert count(dense(4, (16, 16), (4096, 4096), mask=True)) == 1


def test_blocks_share_only_turns_that_fit_a_word() -> None:
    """A head of the group in 8 bits and a query tile in 24, where the end of each fits too."""
    for options in ({"causal": True}, {"window": (512, 0), "sink": 4}):
        config = portable_backward.choose(dense(1, (2, 1), (1, 1), **options), H200, Operands())
        last = ((1 << 24) - 1) * config.tile_q
        for heads, rows, fit in (
            (255, 8192, True),
            (256, 8192, False),
            (1, last, True),
            (1, last + 1, False),
        ):
            problem = replace(
                dense(1, (heads, 1), (8192, 512), **options), rows_q=rows, max_seqlen_q=rows
            )
            found = [
                f(problem, H200, config)
                for f in (backward_parts.parts, backward_parts.parts_of_sinks)
            ]
            assert (max(found) > 1) == fit, (options, heads, rows)
    assert count(dense(1, (256, 1), (4096, 500), mask=True)) > 1  # lists have no words


@pytest.mark.parametrize("seqlen", [8192, 32768])
def test_gathered_keys_are_shared_by_as_many_blocks_as_there_are(seqlen: int) -> None:
    """8 key tiles on 132 SMs are shared by 16 blocks each."""
    assert count(dense(1, (2, 1), (seqlen, seqlen), kept=1024, causal=True)) == 16


def test_few_key_tiles_of_ragged_batches_are_shared() -> None:
    assert count(ragged((2, 1), [4096, 4096], [4096, 4096])) > 2
    assert count(ragged((8, 8), [4096] * 4, [77] * 4)) > 2
    assert count(ragged((2, 1), [4096, 1000], [4096, 1000], packed=False)) > 2
    # One of the sequences is long.
    assert count(ragged((2, 1), [4096, *[64] * 9], [4096, *[64] * 9])) > 2


@pytest.mark.parametrize(
    ("heads", "lengths", "fastest"),
    [
        ((4, 1), [2048, 1500, 1000, 500], 6),
        ((2, 2), [4096, *[256] * 8], 3),
        ((2, 1), [4096, *[64] * 200], 4),
        ((2, 1), [8192, *[1000] * 4], 4),
        ((8, 2), [3000, 200, 100], 5),
    ],
)
def test_packed_sequences_of_other_lengths(
    heads: tuple[int, int], lengths: list[int], fastest: int
) -> None:
    """The longest sequence decides, and the mean of the others: the numbers are the fastest on an H200."""
    problem = replace(ragged(heads, lengths, lengths), shared_lengths=True)
    assert count(problem) == fastest


def test_many_key_tiles_of_ragged_batches_are_not() -> None:
    assert count(ragged((8, 8), [20] * 600, [20] * 600)) == 1
    assert count(ragged((16, 16), [2048] * 8, [2048] * 8)) == 1
    assert count(ragged((2, 1), [4096] * 32, [4096] * 32, packed=False)) == 1
    # Short sequences take small tiles: there are few steps, and these are short.
    assert count(ragged((1, 1), [500] * 4, [500] * 4)) == 1
    # The sums over blocks cover the rows of padding too, so a large padded array is not shared.
    assert count(ragged((8, 8), [16384], [77], packed=False)) > 4
    assert count(ragged((8, 8), [16384], [77], packed=False, room=1 << 17)) == 1


def of_sinks(problem: Problem) -> int:
    """Return the number of blocks that share a key tile with sink tokens."""
    config = portable_backward.choose(problem, H200, Operands())
    return backward_parts.parts_of_sinks(problem, H200, config)


def test_key_tiles_with_sink_tokens_are_shared() -> None:
    """Key tiles with sink tokens are shared if the window is much shorter than the sequence."""
    window: dict[str, Any] = {"causal": True, "window": (255, 0)}
    assert of_sinks(dense(1, (8, 8), (8192, 8192), **window, sink=4)) >= 4
    assert of_sinks(dense(1, (32, 4), (4096, 4096), **window, sink=4)) >= 4
    assert of_sinks(dense(1, (8, 8), (8192, 8192), **window)) == 1
    assert of_sinks(dense(1, (8, 8), (300, 300), **window, sink=4)) == 1
    assert of_sinks(dense(1, (8, 8), (8192, 8192), causal=True, sink=4)) == 1
    # With so many sequences, every SM has other work.
    assert of_sinks(dense(64, (32, 32), (1024, 1024), **window, sink=4)) == 1


@pytest.mark.parametrize("rows", [(0, 500), (500, 0), (0, 0)])
@pytest.mark.parametrize("window", [(5, None), (5, 0)])
def test_nothing_to_share_beside_sink_tokens(
    rows: tuple[int, int], window: tuple[int, int | None]
) -> None:
    assert of_sinks(dense(1, (2, 1), rows, window=window, sink=4)) == 1


def test_sink_tokens_of_as_many_keys_as_there_may_be() -> None:
    """A call with as many keys as there may be, and more sink tokens must have launches.

    Its key tiles with sink tokens have about as many rows as an int holds.
    """
    q, k = (np.broadcast_to(np.float16(0), (1, rows, 1, 64)) for rows in (1, LONGEST))
    problem, lengths = describe(q, k, k, window=(5, None), sink=2**40)
    operands = Operands(
        dict.fromkeys(("q", "k", "v", "dout", "out", "dq", "dk", "dv"), (0, 128, 128, 2))
    )
    assert steps(problem, structure(lengths), operands, H200, deterministic=False).launches


def test_few_key_tiles_beside_a_window() -> None:
    """With a window, a key tile has steps only for the query tiles that see it."""
    assert count(dense(1, (8, 1), (4096, 4096), causal=True, window=(127, 0))) <= 4
    assert count(dense(1, (8, 1), (4096, 4096), causal=True)) > 4


@pytest.mark.parametrize(("rows_q", "rows_k"), [(0, 500), (500, 0), (0, 0)])
def test_nothing_to_share(rows_q: int, rows_k: int) -> None:
    assert count(ragged((1, 1), [rows_q], [rows_k])) == 1
