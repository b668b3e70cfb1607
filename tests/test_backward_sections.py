"""Which kv heads the backward processes together (a section): `portable/backward_sections.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.problem import describe
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import backward, backward_parts, backward_sections
from rawattn._kernels.target import without_device

H200 = replace(without_device("sm_90a"), multiprocessors=132)


def _heads(
    batch: int, heads: tuple[int, int], seqlen: int, headdim: int = 128, *, causal: bool = True
) -> tuple[int, int]:
    """Return the kv heads of a section: as many as fit the L2 cache, and as many as are chosen.

    The counts follow kernels_cu/attn/schedule/order.cuh.
    """
    q, k = (np.broadcast_to(np.float16(0), (batch, seqlen, each, headdim)) for each in heads)
    problem, _ = describe(q, k, k, causal=causal)
    config = backward.choose(problem, H200, Operands())
    parts = backward_parts.parts(problem, H200, config)
    nheads_q, nheads_kv = heads
    fitting = (32 << 20) // (8 * headdim * nheads_q // nheads_kv)
    found = backward_sections.section_queries(problem, H200, config, fitting, parts)

    def counted(section: int) -> int:
        sections = min(nheads_kv * seqlen // section, nheads_kv - 1) + 1
        return -(-nheads_kv // sections)

    return counted(fitting), counted(found)


# Measured on one H200 (docs/notes/portable-backward.md): each call takes 0.67 to 0.96 of its time with sections that fit the L2
# cache.
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "headdim", "together"),
    [
        (2, (16, 4), 4096, 128, 4),
        (1, (32, 8), 4096, 128, 4),
        (1, (32, 8), 8192, 128, 2),
        (4, (32, 8), 2048, 128, 8),
        (2, (32, 8), 4096, 64, 4),
    ],
)
def test_sections_that_leave_multiprocessors_idle_are_larger(
    batch: int, heads: tuple[int, int], seqlen: int, headdim: int, together: int
) -> None:
    fitting, chosen = _heads(batch, heads, seqlen, headdim)
    assert fitting < chosen == together


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "causal"),
    [
        (1, (16, 16), 16384, True),  # enough blocks
        (2, (16, 4), 4096, False),  # all key tiles have the same number of steps
        (1, (8, 1), 4096, True),  # a single section in any case
        (64, (32, 32), 16384, True),
    ],
)
def test_others_are_as_the_cache_wants_them(
    batch: int, heads: tuple[int, int], seqlen: int, causal: bool
) -> None:
    fitting, chosen = _heads(batch, heads, seqlen, causal=causal)
    assert fitting == chosen


def test_blocks_end_when_they_do() -> None:
    # Two blocks run at once. Each head has a long and a short block; every block takes 3 steps of overhead.
    turns = ((7,), (1,))
    assert backward_sections.end(1, 2, (turns,) * 1, 2, 3) == 14
    assert backward_sections.end(2, 2, (turns,) * 1, 2, 3) == 14
    assert backward_sections.end(1, 3, (turns,) * 1, 2, 3) == 24
    assert backward_sections.end(3, 3, (turns,) * 1, 2, 3) == 22
    assert backward_sections.end(1, 2, (((3, 4), (1,)),) * 1, 3, 3) == 13


def test_ragged_batches_are_judged_by_their_mean() -> None:
    q, k = (np.broadcast_to(np.float16(0), (2 * 4096, each, 128)) for each in (16, 4))
    seqs = SeqLayout.from_lengths([4096, 4096])
    problem, _ = describe(q, k, k, causal=True, seqs=seqs)
    config = backward.choose(problem, H200, Operands())
    fitting = (32 << 20) // (8 * 128 * 4)
    found = backward_sections.section_queries(problem, H200, config, fitting, 1)
    assert 4 * 4096 // fitting > 0 == 4 * 4096 // found


@pytest.mark.parametrize(("batch", "rows_q", "rows_k"), [(0, 128, 128), (2, 0, 128), (2, 4096, 0)])
def test_nothing_to_walk(batch: int, rows_q: int, rows_k: int) -> None:
    q, k = (np.broadcast_to(np.float16(0), (batch, rows, 16, 64)) for rows in (rows_q, rows_k))
    seqs = SeqLayout.from_lengths([])
    packed = np.zeros((0, 16, 64), np.float16)
    for problem, _ in (
        describe(q, k, k, causal=True),
        describe(packed, packed, packed, causal=True, seqs=seqs),
    ):
        config = backward.choose(problem, H200, Operands())
        assert backward_sections.section_queries(problem, H200, config, 3000, 1) == 3000
