"""How many waves share a row in the backward's kernels that visit rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.problem import Problem, describe
from rawattn._kernels.portable import backward
from rawattn._kernels.target import without_device

H200 = replace(without_device("sm_90a"), multiprocessors=132)


def _problem(batch: int, rows: int, heads: tuple[int, int]) -> Problem:
    q, k = (np.broadcast_to(np.float16(0), (batch, rows, each, 128)) for each in heads)
    return describe(q, k, k)[0]


def _waves(problem: Problem) -> tuple[int, int]:
    return backward.row_waves(problem, H200, "q"), backward.row_waves(problem, H200, "k")


def test_few_rows_of_many_heads_are_shared() -> None:
    queries, keys = _waves(_problem(1, 313, (84, 12)))
    assert queries == 16
    assert keys == 4


@pytest.mark.parametrize(("batch", "rows", "heads"), [(4, 4096, (32, 32)), (1, 16384, (160, 20))])
def test_many_rows_are_shared_by_few_waves(batch: int, rows: int, heads: tuple[int, int]) -> None:
    assert _waves(_problem(batch, rows, heads)) == (4, 4)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6)])
def test_rows_of_few_columns_are_not(heads: tuple[int, int]) -> None:
    assert _waves(_problem(1, 20, heads)) == (1, 1)


def test_no_rows() -> None:
    assert _waves(_problem(0, 20, (64, 64))) == (32, 32)


def test_rows_of_packed_sequences_count_once() -> None:
    q = np.broadcast_to(np.float16(0), (300, 64, 128))
    problem, _ = describe(q, q, q, seqs=SeqLayout.from_lengths([10] * 30))
    assert _waves(problem) == (16, 16)
