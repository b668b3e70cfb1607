"""Kernels stay inside their arrays whatever the lengths and starts on the device hold, since nothing checks them there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rawattn._call.layout import Lengths, Side, host_lengths
from rawattn._call.problem import Problem
from rawattn._kernels.operands import Operands
from rawattn._kernels.portable import forward as portable_forward
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.sm90 import forward_fit
from rawattn._kernels.target import Target, without_device
from tests import exhaustive
from tests.memory import CANARY, DTYPES, Strided, strided
from tests.shim.cells import dense_out
from tests.shim.launch import Forward, Machine
from tests.shim.shim import Builder

BATCH, ROWS_Q, ROWS_K, HEADS, HEADDIM = 9, 70, 90, 2, 16


def garbage(rng: np.random.Generator, size: int, dtype: str, rows: int) -> np.ndarray:
    """Random integers, most of them invalid and some plausible."""
    limits = np.iinfo(dtype)
    extremes = [limits.min, limits.min + 1, -1, 0, 1, rows, rows + 1, limits.max - 1, limits.max]
    values = [int(rng.choice(extremes)), int(rng.integers(-rows, 2 * rows))]
    return np.array([rng.choice([rng.choice(extremes), *values]) for _ in range(size)], dtype)


def side(rng: np.random.Generator, rows: int, *, packed: bool, dtype: str) -> Side:
    cumulative = bool(rng.integers(2))
    start = garbage(rng, BATCH + 1, dtype, rows) if packed else None
    length = garbage(rng, BATCH + cumulative, dtype, rows)
    if packed and rng.random() < 0.2:
        cumulative, length = False, None
    return Side(start, length, cumulative, rows, rows, True)


@pytest.mark.parametrize(
    "seeds",
    [range(4), pytest.param(range(4, 14), marks=pytest.mark.exhaustive)],
    ids=["few", "more"],
)
@pytest.mark.parametrize("checked", exhaustive.thin([True, False], 2), ids=["checked", ""])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "group"])
@pytest.mark.parametrize("family", ["portable", "sm90", "cluster", "stores"])
def test_garbage_stays_in_bounds(
    family: str, packed: bool, dtype: str, checked: bool, seeds: range, builder: Builder
) -> None:
    problem = Problem(
        dtype="bfloat16",
        batch=BATCH,
        nheads_q=HEADS,
        nheads_kv=1,
        headdim=HEADDIM,
        headdim_v=HEADDIM,
        packed=packed,
        rows_q=ROWS_Q,
        rows_k=ROWS_K,
        max_seqlen_q=ROWS_Q,
        max_seqlen_k=ROWS_K,
        ragged=True,
        window_left=20,
        window_right=0,
        sink=3,
        top_left=False,
        scale=0.25,
    )
    config = portable_forward.choose(problem, Target("sm_80", 1 << 17), Operands())
    config = replace(config, tile_q=32, tile_k=16, waves=2)
    persistent = sm90_forward.choose(problem, without_device(sm90_forward.ARCH), Operands())
    persistent = replace(
        persistent,
        tile_k=16,
        consumers=2,
        cluster=2 if family == "cluster" else 1,
        consumer_registers=232,
        tensor_stores=family == "stores",
    )
    persistent = forward_fit.with_heads(persistent, problem)
    for seed in seeds:
        rng = np.random.default_rng([seed, packed, dtype == "int64"])
        lengths = Lengths(
            batch=BATCH,
            packed=packed,
            q=side(rng, ROWS_Q, packed=packed, dtype=dtype),
            k=side(rng, ROWS_K, packed=packed, dtype=dtype),
            on_host=False,
        )
        forward = Forward(
            problem,
            lengths,
            arrays(ROWS_Q, HEADS, packed),
            arrays(ROWS_K, 1, packed),
            arrays(ROWS_K, 1, packed),
            dense_out((ROWS_Q,) if packed else (BATCH, ROWS_Q), problem, DTYPES["bfloat16"]),
        )
        machine = Machine(builder, checked=checked, seed=seed)
        every_tile = bool(seed % 2)
        if family == "portable":
            _, lse = forward.run(machine, config, exact_grid=every_tile)
        else:
            _, lse = forward.run_sm90(
                machine, persistent, blocks=3, exact_grid=every_tile, own_order=seed % 4 < 2
            )
        assert lse is not None
        written = ~np.all(lse.view(np.uint8).reshape(*lse.shape, 4) == CANARY, axis=-1)
        rows = np.broadcast_to(logical(lengths, packed), written.shape)
        assert not np.any(written & ~rows), f"seed {seed}: rows of no sequence were written"
        assert np.all(written == rows) or not every_tile, f"seed {seed}: rows were left out"
        # Sequences may overlap, and one's padding may be another's row: this checks only that accesses stay inside.
        forward.fill_padding(machine)
        forward.out.buffer()


def arrays(rows: int, heads: int, packed: bool) -> Strided:
    shape = (rows, heads, HEADDIM) if packed else (BATCH, rows, heads, HEADDIM)
    array = strided(shape, DTYPES["bfloat16"], "dense")
    array.view()[...] = 1
    return array


def logical(lengths: Lengths, packed: bool) -> np.ndarray:
    """Rows of q in a sequence, as they broadcast to lse: (1, total) or (batch, 1, rows)."""
    host = host_lengths(lengths)
    rows = np.zeros((1 if packed else BATCH, ROWS_Q), bool)
    for n, (start, length) in enumerate(zip(host.start_q, host.len_q, strict=True)):
        rows[0 if packed else n, start : start + length] = True
    return rows if packed else rows[:, None]
