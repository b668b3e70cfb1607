"""What a bias must be as long as: the longest sequence, as far as the host knows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call import scores
from rawattn._call.layout import Lengths
from rawattn._call.pages import PagedLayout
from tests.layout.on_device import OnDevice, group

SHAPES = scores.Shapes(np.dtype(np.float16), 2, 4, 4, 2, 160, True)


def paged(seqlen_k: Any, indptr: Any = None, **seqs: Any) -> Lengths:
    """Two sequences of 5 pages of 16 keys each, with a row of the table or as slots of a pair."""
    layout = PagedLayout(SeqLayout(**seqs), seqlen_k, indptr)
    return layout.bind((2, 1, 4, 8), (10, 16), (2, 5) if indptr is None else (10,))


def check(lengths: Lengths, keys: int) -> None:
    shape = scores.four_axes("bias", (1, keys), SHAPES, lengths)
    assert shape == (1, 1, 1, keys)


def test_lengths_on_a_gpu_demand_nothing() -> None:
    lengths = OnDevice([70, 70])
    check(paged(lengths), 70)
    check(paged(lengths, [0, 5, 10]), 70)
    check(paged(lengths, OnDevice([0, 5, 10])), 70)
    slots = SeqLayout(seqstart_q=[0, 80, 160], seqlen_q=lengths, seqlen_k=lengths)
    check(group(slots, 160, 160), 70)


def test_a_given_maximum_and_lengths_of_the_host_do() -> None:
    for indptr in (None, [0, 5, 10]):
        for lengths, more in (([70, 70], {}), (OnDevice([70, 70]), {"max_seqlen_k": 70})):
            check(paged(lengths, indptr, **more), 70)
            with pytest.raises(ValueError, match=r"^bias: got shape \(1, 69\).*>= 70"):
                check(paged(lengths, indptr, **more), 69)
