"""TMA stores in the simulator: elements inside the tensor are written, others are not, and each mistake is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.shim.shim import Builder, Kernel
from tests.shim.warp_group import BYTES, SEEDS, check_found, finds_mistakes, finds_races
from tests.shim.warp_group import probe as probe_one
from tests.shim.warp_group import run as run_one

# One warp writes a box of 16 rows and 64 columns, with the number 64 row + column in each element. Eight rows of the box are
# 1024 bytes; the index of a 16-byte piece in a row is XORed with the row's number modulo 8.
WRITE = """
  const auto write = [&](int first) {
    for (int d = 0; d < 4; d++) {
      unsigned pairs[4];
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i % 2 * 8, column = 16 * d + lane % 4 * 2 + i / 2 * 8;
        pairs[i] = target::Mma<float16>::to_pair(first + 64 * row + column, first + 64 * row + column + 1);
      }
      const int row = lane % 16, piece = (2 * d + lane / 16) ^ row % 8;
      target::stmatrix(s.a + row * 128 + piece * 16, pairs);
    }
  };
  const auto store = [&](int column, int row) { ptx::store_tensor_5d(&map, s.a, column, row, 0, 0, 0); };
  const auto finish = [&] {
    ptx::commit_stores();
    ptx::wait_stores_read();
  };
"""
READY = "write(0); ptx::fence_async_proxy(); target::wave_sync();"


def probe(builder: Builder, body: str) -> Kernel:
    return probe_one(
        builder, f"{WRITE} if (warp == 4) {{ {body} }} (void)write, (void)store, (void)finish;"
    )


def run(kernel: Kernel, *, seed: int = 1, **knobs: Any) -> Any:
    x = np.full((40, 72), -1, np.float16)
    shape = {"dims": (72, 40, 1, 1, 1), "strides": (144, 16, 16, 16), "box": (64, 16, 1, 1, 1)}
    return run_one(kernel, seed=seed, x=x, stores=True, **{**shape, **knobs}).reshape(40, 72)


@pytest.mark.parametrize(
    ("column", "row"), [(0, 0), (8, 24), (16, 30), (56, -7), (-24, 39), (71, -15)]
)
def test_what_is_inside_is_stored(column: int, row: int, builder: Builder) -> None:
    kernel = probe(builder, f"{READY} if (lane == 0) {{ store({column}, {row}); finish(); }}")
    expected = np.full((40, 72), -1.0)
    for (r, c), value in np.ndenumerate(np.arange(1024).reshape(16, 64)):
        if 0 <= row + r < 40 and 0 <= column + c < 72:
            expected[row + r, column + c] = value
    for seed in SEEDS:
        np.testing.assert_array_equal(run(kernel, seed=seed), expected)


def test_a_sequence_ends_where_its_box_is_clipped(builder: Builder) -> None:
    """A map of a ragged batch clips a box at the sequence's end: its first row axis ends there, the second one adds the
    sequence's offset."""
    body = (
        f"{READY} if (lane == 0) {{ ptx::store_tensor_5d(&map, s.a, 0, 59, 0, 30, 0); finish(); }}"
    )
    row = 144
    shape = {
        "dims": (72, 64, 1, 41, 1),
        "strides": (row, 16, row, 16),
        "origin": -64 * row,
    }
    y = run(probe(builder, body), **shape)
    # Box rows 59 to 63 on the first axis, at 30 on the second.
    np.testing.assert_array_equal(y[25:30, :64], np.arange(320).reshape(5, 64))
    y[25:30, :64] = -1
    np.testing.assert_array_equal(y, -1.0)


def test_a_store_after_another(builder: Builder) -> None:
    body = f"""
      {READY}
      if (lane == 0) {{ store(0, 0); finish(); }}
      target::wave_sync();
      write(1000);
      ptx::fence_async_proxy();
      target::wave_sync();
      if (lane == 0) {{ store(0, 16); finish(); }}
    """
    kernel = probe(builder, body)
    first = np.arange(1024).reshape(16, 64)
    for seed in SEEDS:
        y = run(kernel, seed=seed)
        np.testing.assert_array_equal(y[:16, :64], first)
        np.testing.assert_array_equal(y[16:32, :64], (first + 1000).astype(np.float16))


# Mistakes that fail in every order of execution.
MISTAKES = {
    "no fence": (
        "write(0); target::wave_sync(); if (lane == 0) { store(0, 0); finish(); }",
        r"store_tensor: no fence_async_proxy since thread 128 wrote byte",
    ),
    "one thread's fence": (
        "write(0); if (lane == 0) ptx::fence_async_proxy(); target::wave_sync();"
        "if (lane == 0) { store(0, 0); finish(); }",
        r"store_tensor: no fence_async_proxy since thread 129 wrote byte",
    ),
    "never committed": (
        f"{READY} if (lane == 0) {{ store(0, 0); ptx::wait_stores_read(); }}",
        "thread 128: exits while a store was never committed",
    ),
    "never waited for": (
        f"{READY} if (lane == 0) {{ store(0, 0); ptx::commit_stores(); }}",
        "thread 128: exits while a store was never waited for",
    ),
    "another thread waits": (
        f"{READY} if (lane == 0) store(0, 0); target::wave_sync(); if (lane == 1) finish();",
        "thread 128: exits while a store was never committed",
    ),
    "box not aligned": (
        f"{READY} if (lane == 0) {{ ptx::store_tensor_5d(&map, s.a + 128, 0, 0, 0, 0, 0); finish(); }}",
        "store_tensor: .* multiples of 1024",
    ),
    "pairs not aligned": ("unsigned pairs[4] = {}; target::stmatrix(s.a + 8, pairs);", "multiples of 16"),
    "a copy on its way there": (
        f"if (lane == 0) {{ ptx::mbarrier_arrive_expect(&s.full, {BYTES // 4}); "
        "ptx::copy_tensor_5d(s.a, &map, &s.full, 0, 0, 0, 0, 0); store(0, 0); finish(); }",
        "store_tensor: a copy to bytes 0 to 2048 of shared memory is under way",
    ),
}  # fmt: skip

test_mistakes_are_found = finds_mistakes(MISTAKES, probe, run)


@pytest.mark.parametrize("corner", [(0, 40), (0, -16), (72, 0)])
def test_a_box_wholly_outside(corner: tuple[int, int], builder: Builder) -> None:
    kernel = probe(
        builder, f"{READY} if (lane == 0) {{ store({corner[0]}, {corner[1]}); finish(); }}"
    )
    np.testing.assert_array_equal(run(kernel), -1.0)
    check_found(
        lambda seed: run(kernel, seed=seed, origin=-144), "store_tensor: for a box wholly outside"
    )


# Races that show in some orders of execution, with the only messages that they may have.
RACES = {
    "written before it was read": (
        f"{READY} if (lane == 0) {{ store(0, 0); ptx::commit_stores(); }} target::wave_sync(); write(7);"
        "if (lane == 0) ptx::wait_stores_read(); ptx::fence_async_proxy();",
        "of shared memory was written while a store still reads it",
    ),
    "stored before all have fenced": (
        "write(0); ptx::fence_async_proxy(); if (lane == 31) { store(0, 0); finish(); }",
        "store_tensor: no fence_async_proxy since thread",
    ),
    "loaded before it was read": (
        f"{READY} if (lane == 0) {{ store(0, 0); ptx::commit_stores();"
        f"ptx::mbarrier_arrive_expect(&s.full, {BYTES // 4});"
        "ptx::copy_tensor_5d(s.a, &map, &s.full, 0, 0, 0, 0, 0); ptx::mbarrier_wait(&s.full, 0); finish(); }",
        "copy_tensor: a store still reads bytes 0 to 2048",
    ),
}  # fmt: skip

test_races_are_found = finds_races(RACES, probe, run)
