"""Sequences whose keys fit one tile, for which the main backward kernel writes dq itself: whole calls on the simulator."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import SeqLayout
from rawattn._call.layout import Lengths
from rawattn._kernels.portable import backward as portable_backward
from tests import exhaustive
from tests.shim.device import ATTRIBUTES, MakeDevice
from tests.shim.score_calls import BFLOAT16, normal
from tests.shim.whole import run_backward, small_tiles, verify_backward

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
TILES = (32, 32, 2, 1, 2, 1, 1, False)
MAIN, FINISH = "rawattn_backward", "rawattn_backward_finish"
SETUP = "rawattn_backward_setup"

WIDTHS = pytest.mark.parametrize(
    ("wave", "dtype", "dims"),
    exhaustive.thin(
        list(
            itertools.product(
                (32, 64),
                (BFLOAT16, FLOAT16, FLOAT32),
                ((24, 40), (64, 64), (7, 33), (80, 24), (130, 16), (16, 200)),
            )
        ),
        5,
    ),
    ids=str,
)


def call(
    device: Any,
    rows: int,
    keys: int,
    dims: tuple[int, int] = (24, 40),
    dtype: Any = BFLOAT16,
    **options: Any,
) -> None:
    q, k, v = (
        normal(2, n, heads, dim, dtype=dtype)
        for n, heads, dim in ((rows, 4, dims[0]), (keys, 2, dims[0]), (keys, 2, dims[1]))
    )
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", q, k, v, **options)


@WIDTHS
def test_widths(machine: MakeDevice, wave: int, dtype: Any, dims: tuple[int, int]) -> None:
    device = machine(wave)
    call(device, 75, 31, dims, dtype)
    assert FINISH not in device.launched


@WIDTHS
@pytest.mark.parametrize("rows", [1, 130])
def test_one_launch(
    machine: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    wave: int,
    dtype: Any,
    dims: tuple[int, int],
    rows: int,
) -> None:
    """The main kernel makes row_delta itself, with dlse too."""
    monkeypatch.setattr(portable_backward, "delta_rows", lambda *_: 512)
    device = machine(wave)
    call(device, rows, 31, dims, dtype, dlse=normal(2, 4, rows))
    assert device.launched == [MAIN]


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_one_launch_of_packed_batches(
    machine: MakeDevice, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Lengths that the host knows, and no padding rows, leave nothing to prepare."""
    monkeypatch.setattr(portable_backward, "delta_rows", lambda *_: 512)
    starts = np.cumsum((0, 32, 0, 5, 20))
    q, k, v = (normal(int(starts[-1]), heads, 40, dtype=BFLOAT16) for heads in (4, 2, 2))
    device = machine()
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", q, k, v, seqs=SeqLayout(seqstart_q=starts), **options)
    assert device.launched == ["rawattn_carrying_setup", MAIN]  # the first is of a new layout


@pytest.mark.parametrize("row_waves", [1, 2])
@pytest.mark.parametrize("headdim", [40, 80])
@pytest.mark.parametrize("keys", [31, 45])
def test_waves_with_fewer_columns_of_dq(
    machine: MakeDevice, headdim: int, row_waves: int, keys: int
) -> None:
    """dq is right where its 3 or 5 blocks of 16 columns are divided unevenly among 2 or 4 waves, of which some have none."""
    tiles = (32, 32, 2, 1, 2, 1, row_waves, False)
    q, k, v = (normal(1, n, 2, headdim, dtype=BFLOAT16) for n in (45, keys, keys))
    device = machine()
    with small_tiles(portable_backward=tiles):
        verify_backward(device, "portable", q, k, v)
    assert (FINISH in device.launched) == (keys > 32)


@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (20, 32, {"causal": True}),
        (75, 20, {"causal": True, "align": "top-left"}),
        (33, 20, {"window": (None, 15)}),
        (75, 32, {"softcap": 3.0, "dropout_p": 0.3, "seed": 5}),
        (45, 30, {"bias": True}),
        (1, 1, {}),
    ],
    ids=str,
)
def test_options(machine: MakeDevice, rows: int, keys: int, options: dict[str, Any]) -> None:
    given = dict(options)
    if "bias" in given:
        given["bias"] = normal(1, 4, rows, keys, dtype=BFLOAT16)
    device = machine()
    call(device, rows, keys, **given)
    assert FINISH not in device.launched


@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (33, 20, {"causal": True}),  # the first rows see no key
        (20, 33, {}),
        (20, 30, {"window": (4, None)}),
        (20, 30, {"seqs": SeqLayout(seqlen_k=[0, 30])}),
        (20, 0, {}),
    ],
    ids=str,
)
def test_rows_without_keys_and_other_keys(
    machine: MakeDevice, rows: int, keys: int, options: dict[str, Any]
) -> None:
    device = machine()
    call(device, rows, keys, **options)
    assert FINISH in device.launched


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("lens", "lone", "options"),
    [
        ((32, 0, 5, 20), True, {}),
        ((32, 0, 5, 20), True, {"causal": True}),
        ((0, 32, 0, 0, 32, 0), True, {"causal": True, "align": "top-left"}),
        ((0, 0, 0), True, {}),
        ((3,) * 70, True, {"causal": True}),
        ((1, 17), True, {"window": (None, 3), "align": "top-left"}),
        ((32, 5, 33), False, {}),
        ((20, 30), False, {"window": (4, 0), "sink": 2}),
    ],
    ids=str,
)
def test_packed_batches(
    machine: MakeDevice, lens: tuple[int, ...], lone: bool, options: dict[str, Any], on_device: bool
) -> None:
    """dq is right in packed batches whose key lengths are the query lengths, so that no row is without keys."""
    starts, longest = np.cumsum((3, *lens)), max(1, *lens)
    rows = int(starts[-1]) + 4
    q, k, v = (normal(rows, heads, 40, dtype=BFLOAT16) for heads in (4, 2, 2))
    seqs = SeqLayout(seqstart_q=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    device = machine()
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", q, k, v, seqs=seqs, on_device=on_device, **options)
    assert (FINISH not in device.launched) == lone
    assert SETUP in device.launched


@pytest.mark.parametrize(
    ("dtype", "lens", "headdim", "multiprocessors"),
    exhaustive.thin(
        itertools.product(
            (BFLOAT16, FLOAT16, FLOAT32), ((128, 0, 5, 77), (64, 1, 33)), (64, 128), (3, 132)
        ),
        5,
    ),
    ids=str,
)
def test_packed_batches_by_usual_tiles(
    machine: MakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    lens: tuple[int, ...],
    headdim: int,
    multiprocessors: int,
) -> None:
    """With many SMs several blocks share a key tile, and each writes its own rows of dq."""
    monkeypatch.setitem(ATTRIBUTES, "multiprocessors", multiprocessors)
    starts, longest = np.cumsum((3, *lens)), max(lens)
    rows = int(starts[-1]) + 9
    q, k, v = (normal(rows, heads, headdim, dtype=dtype) for heads in (4, 2, 2))
    seqs = SeqLayout(seqstart_q=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    device = machine()
    causal = headdim == 64
    verify_backward(device, "portable", q, k, v, seqs=seqs, on_device=True, causal=causal)
    assert (FINISH not in device.launched) == (dtype != FLOAT32 or longest <= 64)


@pytest.mark.parametrize("seed", range(12))
def test_packed_batches_of_unchecked_lengths(machine: MakeDevice, seed: int) -> None:
    """No access leaves the arrays where sequences overlap, lie outside, or have more keys than max_seqlen_k."""
    rng, batch, rows = np.random.default_rng(seed), 9, 70
    limits = np.iinfo(np.int64)
    edges = [limits.min, -1, 0, 1, rows, rows + 1, limits.max]
    wild = np.where(
        rng.random(batch + 1) < 0.5,
        rng.choice(edges, batch + 1),
        rng.integers(-20, 2 * rows, batch + 1),
    )
    q, k, v = (normal(rows, heads, 40, dtype=BFLOAT16) for heads in (4, 2, 2))
    out, lse = normal(rows, 4, 40, dtype=BFLOAT16), np.zeros((4, rows), np.float32)
    longest = 7 if seed % 3 else 32
    seqs = SeqLayout(
        seqstart_q=np.arange(batch + 1) * 7, max_seqlen_q=longest, max_seqlen_k=longest
    )
    device = machine()
    good = device.lengths

    def lengths(given: Lengths) -> Lengths:
        side = replace(given.q, start=wild)
        return good(replace(given, q=side, k=side))

    device.lengths = lengths  # type: ignore[method-assign]
    with small_tiles(portable_backward=TILES):
        run_backward(device, "portable", out, q, k, v, out, lse, seqs=seqs, on_device=True)
    assert FINISH not in device.launched


def test_packed_batches_with_lengths_of_keys(machine: MakeDevice) -> None:
    """dq is right where a sequence has queries and no keys."""
    q, k, v = (normal(rows, 2, 40, dtype=BFLOAT16) for rows in (30, 25, 25))
    seqs = SeqLayout(seqstart_q=[0, 20, 30], seqstart_k=[0, 25, 25])
    device = machine()
    with small_tiles(portable_backward=TILES):
        verify_backward(device, "portable", q, k, v, seqs=seqs)
    assert FINISH in device.launched
