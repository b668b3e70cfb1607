"""Folded calls, in which heads of a GQA group are rows of Hopper's forward, on the simulator
(rawattn/_kernels/sm90/folded.py)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._kernels.sm90 import folded
from rawattn._kernels.steps import Steps
from tests import exhaustive
from tests.paged import paged
from tests.shim.device import MakeDevice
from tests.shim.paged import LATE, WIDE, normal, verify_kernel, verify_sm90
from tests.shim.whole import small_tiles, verify_forward
from tests.tiles import splitting

# Exhaustive runs only: .ci/gpu tests these kernels on a GPU before a change of them lands.
pytestmark = pytest.mark.exhaustive

LENS = (70, 3, 0, 129)
F16 = np.dtype(np.float16)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Steps]:
    """Makes calls fold however few sequences they have; the list collects the steps of folded calls."""
    found: list[Steps] = []
    steps = folded.steps

    def kept(*given: Any) -> Steps:
        found.append(steps(*given))
        return found[-1]

    monkeypatch.setattr(folded, "_BUSY", 0)
    monkeypatch.setattr(folded, "steps", kept)
    return found


@pytest.mark.parametrize(
    ("heads", "shape"), exhaustive.thin(itertools.product(((71, 1), (74, 2), (200, 1)), (LATE, WIDE)), 3)
)  # fmt: skip
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 3.0}, {"scale": -0.2}], ids=str)
def test_pages(
    hopper: MakeDevice,
    made: list[Steps],
    heads: tuple[int, int],
    shape: Any,
    options: dict[str, Any],
) -> None:
    call = paged(LENS, 16, rows=1, heads=heads, dims=(32, 16))
    verify_sm90(hopper(), call, shape, **options)
    verify_sm90(hopper(2), call, shape, on_device=True, **options)
    assert len(made) == 2


@pytest.mark.parametrize("seqs", [None, SeqLayout(seqlen_k=[90, 7])], ids=("dense", "lengths"))
def test_keys_in_rows(hopper: MakeDevice, made: list[Steps], seqs: SeqLayout | None) -> None:
    q, k, v = (normal(2, n, heads, 16, dtype=F16) for n, heads in ((1, 80), (90, 2), (90, 2)))
    with small_tiles(sm90_forward=WIDE):
        verify_forward(hopper(), "sm90", q, k, v, causal=True, seqs=seqs)
    assert len(made) == 1


def test_tiles_split_by_keys(hopper: MakeDevice, made: list[Steps]) -> None:
    q, k, v = (normal(1, n, heads, 16, dtype=F16) for n, heads in ((1, 40), (700, 1), (700, 1)))
    device = hopper()
    with small_tiles(sm90_forward=WIDE), splitting():
        verify_forward(device, "sm90", q, k, v)
    assert len(made) == 1 and any("stream_k" in each for each in device.summaries)


def test_a_sequence_may_be_without_its_query(hopper: MakeDevice, made: list[Steps]) -> None:
    """A call with a sequence that has no query is not folded: its row is padding, which only the decode kernels handle."""
    call = paged(LENS, 16, rows=(1, 0, 1, 1), room_q=1, heads=(40, 1), dims=(32, 16))
    with small_tiles():
        verify_kernel(hopper(), call, family="sm90", causal=True)
        verify_kernel(hopper(), call, family="decode", causal=True)
    assert not made
