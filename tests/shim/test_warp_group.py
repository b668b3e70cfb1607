"""The simulator's Hopper features: TMA copies, barriers and wgmma do what the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest

from rawattn._compile.compiler import Source
from tests import exhaustive
from tests.memory import DTYPES
from tests.shim.shim import Build, Builder, Memory
from tests.shim.warp_group import BYTES, LOADED, PIPELINE, SEEDS, THREADS, WAIT, probe, run


def test_no_order_breaks_a_correct_pipeline(builder: Builder) -> None:
    kernel = probe(builder, PIPELINE % (WAIT + "multiply(c); ptx::wgmma_wait<0>(); release();"))
    for seed in SEEDS:
        np.testing.assert_array_equal(run(kernel, seed=seed)[:1024], 16.0)


def test_accumulators_are_nan_until_the_wait(builder: Builder) -> None:
    body = f"""{LOADED} {{
      multiply(c);
      p.y[thread - 128] = c[0].x[0];
      ptx::wgmma_wait<1>();
      p.y[thread] = c[0].x[0];
      ptx::wgmma_wait<0>();
      p.y[thread + 128] = c[0].x[0];
    }}"""
    y = run(probe(builder, body)).reshape(-1, 128)
    assert np.isnan(y[:2]).all()
    np.testing.assert_array_equal(y[2], 16.0)


def test_a_copy_arrives_at_the_barrier(builder: Builder) -> None:
    """A copy has arrived once the mbarrier's phase completes. Before that its destination is NaN in some orders only."""
    body = f"""
      const float16* const half = reinterpret_cast<const float16*>(s.a);
      if (thread == 0) load(s.a, {BYTES});
      target::wave_sync();
      if (warp == 0) p.y[thread] = target::to_float(half[thread]);
      ptx::mbarrier_wait(&s.full, 0);
      if (warp == 0) p.y[thread + 32] = target::to_float(half[thread]);
    """
    kernel = probe(builder, body)
    early = set()
    for seed in SEEDS:
        y = run(kernel, seed=seed)
        early.add(bool(np.isnan(y[:32]).all()))
        np.testing.assert_array_equal(y[32:64], 1.0)
    assert early == {True, False}


@pytest.mark.parametrize(
    "corner",
    exhaustive.thin(zip([(0, 0), (0, -5), (0, 50), (-8, 3), (24, -64), (64, 0), (0, 70)]), 3),
)
def test_boxes_are_clipped_and_swizzled(corner: tuple[int, int], builder: Builder) -> None:
    """Boxes are clipped to the array and swizzled. Memory faults behind the array, so clipped elements are not read."""
    rows, columns = 70, 40
    body = f"""
      if (thread == 0) {{
        ptx::mbarrier_arrive_expect(&s.full, {BYTES});
        ptx::copy_tensor_5d(s.a, &map, &s.full, {corner[0]}, {corner[1]}, 0, 0, 0);
      }}
      ptx::mbarrier_wait(&s.full, 0);
      for (int i = thread; i < 4096; i += {THREADS}) {{
        p.y[i] = target::to_float(reinterpret_cast<const float16*>(s.a)[i]);
      }}
    """
    x = np.arange(1, 1 + rows * columns).reshape(rows, columns).astype(np.float16)
    # The array surrounded by zeros, from which the expected box is cut.
    plane = np.zeros((64 + rows + 80, 8 + columns + 100), np.float16)
    plane[64 : 64 + rows, 8 : 8 + columns] = x
    left, top = 8 + corner[0], 64 + corner[1]
    box = plane[top : top + 64, left : left + 64]
    # Pieces of eight elements stay whole; their index in the row is XORed with the row's number modulo 8.
    pieces = np.arange(8) ^ (np.arange(64)[:, None] % 8)
    expected = np.take_along_axis(box.reshape(64, 8, 8), pieces[:, :, None], axis=1)
    y = run(probe(builder, body), x=x)
    np.testing.assert_array_equal(y[:4096].reshape(64, 8, 8), expected)


def test_five_axes(builder: Builder) -> None:
    """Maps with axes for heads, a second row axis and a batch, and an origin before the array's start, are right."""
    body = f"""
      if (thread == 0) {{
        ptx::mbarrier_arrive_expect(&s.full, {BYTES});
        ptx::copy_tensor_5d(s.a, &map, &s.full, 0, 61, 1, 30, 1);
      }}
      ptx::mbarrier_wait(&s.full, 0);
      for (int i = thread; i < 64; i += {THREADS}) {{
        p.y[i] = target::to_float(reinterpret_cast<const float16*>(s.a)[64 * i]);
      }}
    """
    x = np.arange(2 * 40 * 3).astype(np.float16)  # (batch, row, head)
    x = np.repeat(x, 64).reshape(-1, 64)
    row = 3 * 128
    shape = {
        "dims": (64, 64, 3, 41, 2),
        "strides": (row, 128, row, 40 * row),
        "origin": -64 * row,
    }
    y = run(probe(builder, body), x=x, **shape)
    # Row 61 of the first axis and 30 of the second: rows 27, 28 and 29, then the axis ends.
    of_row = 3 * (40 + np.arange(27, 30)) + 1
    # The first eight elements of row r are at piece r % 8.
    np.testing.assert_array_equal(y[:3], of_row)
    np.testing.assert_array_equal(y[3:64], 0.0)


# Majors of (A of `ss`, B of `ss`, B of `rs`): those of the forward's products first, then others.
MAJORS = (("K", "K", "MN"), ("MN", "MN", "K"), ("K", "MN", "MN"), ("MN", "K", "K"))


@pytest.mark.parametrize(
    ("dtype", "majors", "columns"),
    exhaustive.thin(
        (
            (*each, columns)
            for each in zip(("float16", "bfloat16") * 2, MAJORS, strict=True)
            for columns in (16, 48, 80, 256)
        ),
        3,
    ),
)
def test_product(dtype: str, majors: tuple[str, str, str], columns: int, builder: Builder) -> None:
    """Products are right with A in shared memory and then, added, with A in registers, in the layouts of the PTX ISA."""
    depth, blocks = 32, -(-columns // 64)
    a_major, b_major, v_major = (f"ptx::Major::{major}" for major in majors)
    text = f"""\
#include "ptx/ptx.cuh"
#include "target/target.cuh"
using T = {dtype};
struct Params {{
  const T* a;  // 64 x {depth}
  const T* b;  // {columns} x {depth}
  const T* v;  // {columns} x {depth}
  float* c;    // 64 x {columns}
}};
// Row r of 64 elements: pieces of eight are exchanged by r.
void put(T* tile, int r, int column, T x) {{
  tile[r * 64 + ((column / 8) ^ (r % 8)) * 8 + column % 8] = x;
}}
// The depth in rows, or across them, in blocks of 64 columns.
void put_all(T* tile, ptx::Major major, const T* x, int outer, int thread) {{
  for (int i = thread; i < outer * {depth}; i += 128) {{
    const int n = i / {depth}, k = i % {depth};
    if (major == ptx::Major::K) put(tile, n, k, x[i]);
    else put(tile + n / 64 * {depth} * 64, k, n % 64, x[i]);
  }}
}}
unsigned long long operand(const T* tile, ptx::Major major, int step) {{
  if (major == ptx::Major::K) return ptx::wgmma_descriptor(tile, 0) + 2 * step;
  return ptx::wgmma_descriptor(tile, {depth} * 128) + 128 * step;
}}
KERNEL LAUNCH_BOUNDS(128, 1) void product(PARAMETER Params p) {{
  SHARED_MEMORY_ALIGNED(shared, {(1 + 2 * blocks) * 8192}, 1024);
  T* const a = reinterpret_cast<T*>(shared);
  T* const b = a + 64 * 64;
  T* const v = b + {blocks} * 64 * 64;
  const int thread = target::thread_index();
  const int lane = thread % 32, warp = thread / 32;
  put_all(a, {a_major}, p.a, 64, thread);
  put_all(b, {b_major}, p.b, {columns}, thread);
  put_all(v, {v_major}, p.v, {columns}, thread);
  target::block_sync();
  using W = ptx::Wgmma<T, {columns}>;
  target::Accumulator c[{columns // 16}];
  target::Mma<T>::A registers[{depth // 16}];
  for (int step = 0; step < {depth // 16}; step++) {{
    for (int e = 0; e < 8; e++) {{
      const int row = warp * 16 + lane / 4 + (e / 2 % 2) * 8;
      const int k = step * 16 + lane % 4 * 2 + e % 2 + e / 4 * 8;
      registers[step].x[e] = p.a[row * {depth} + k];
    }}
  }}
  ptx::wgmma_fence();
  for (int step = 0; step < {depth // 16}; step++) {{
    W::ss<{a_major}, {b_major}>(c, operand(a, {a_major}, step), operand(b, {b_major}, step), step);
  }}
  ptx::wgmma_commit();
  for (int step = 0; step < {depth // 16}; step++) {{
    W::rs<{v_major}>(c, registers[step], operand(v, {v_major}, step));
  }}
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  const float* const mine = c[0].x;
  for (int i = 0; i < {columns // 2}; i++) {{
    const int row = warp * 16 + lane / 4 + (i / 2 % 2) * 8;
    p.c[row * {columns} + i / 4 * 8 + lane % 4 * 2 + i % 2] = mine[i];
  }}
}}
"""
    kernel = builder.kernel(Build(Source("product", text, "products of a warp group")))
    rng = np.random.default_rng(columns)
    a, b, v = (
        rng.integers(-8, 9, shape).astype(DTYPES[dtype])
        for shape in ((64, depth), (columns, depth), (columns, depth))
    )
    memory = [Memory(name, x) for name, x in (("a", a), ("b", b), ("v", v))]
    c = Memory("c", np.zeros((64, columns), np.float32), readonly=False)
    fields = np.dtype([(name, np.uint64) for name in ("a", "b", "v", "c")])
    params = np.array([tuple(array.address for array in (*memory, c))], fields)[0]
    shared_bytes = (1 + 2 * blocks) * 8192
    expected = a.astype(np.float32) @ (b.astype(np.float32) + v.astype(np.float32)).T
    for seed in (1, 2, 3, 4):
        kernel.run(
            params,
            grid=1,
            threads=128,
            shared_bytes=shared_bytes,
            seed=seed,
            memory=[*memory, c],
        )
        np.testing.assert_array_equal(c.array().reshape(64, columns), expected)


@pytest.mark.parametrize("columns", [16, 80])
def test_product_of_tf32(columns: int, builder: Builder) -> None:
    """tf32 products are right where both halves of the depth are the same bytes; the 13 lowest bits of a number are ignored."""
    # The simulator refuses an operand at the end of shared memory, since memcheck takes each to have twice its bytes.
    shared_bytes = 64 * 16 + max(2 * columns, 64) * 16
    text = f"""\
#include "ptx/ptx.cuh"
#include "target/target.cuh"
struct Params {{
  const float* a;  // 64 x 4
  const float* b;  // {columns} x 4
  float* c;        // 64 x {columns}
}};
KERNEL LAUNCH_BOUNDS(128, 1) void product(PARAMETER Params p) {{
  SHARED_MEMORY_ALIGNED(shared, {shared_bytes}, 1024);
  float* const a = reinterpret_cast<float*>(shared);
  float* const b = a + 64 * 4;
  const int thread = target::thread_index();
  for (int i = thread; i < 64 * 4; i += 128) a[i] = p.a[i];
  for (int i = thread; i < {columns} * 4; i += 128) b[i] = p.b[i];
  target::block_sync();
  const int lane = thread % 32, warp = thread / 32;
  target::Accumulator c[{columns // 16}];
  for (int n = 0; n < {columns // 16}; n++) {{
    for (int e = 0; e < 8; e++) c[n].x[e] = 1.0f;
  }}
  ptx::wgmma_fence();
  ptx::WgmmaTf32<{columns}>::ss(c, ptx::repeated_descriptor(a), ptx::repeated_descriptor(b));
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  for (int i = 0; i < {columns // 2}; i++) {{
    const int row = warp * 16 + lane / 4 + (i / 2 % 2) * 8;
    p.c[row * {columns} + i / 4 * 8 + lane % 4 * 2 + i % 2] = c[0].x[i];
  }}
}}
"""
    kernel = builder.kernel(Build(Source("product", text, "a product of tf32")))
    rng = np.random.default_rng(columns)
    a, b = (rng.integers(-8, 9, (n, 4)).astype(np.float32) for n in (64, columns))
    memory = [Memory("a", a * np.float32(1 + 2.0**-11)), Memory("b", b)]
    c = Memory("c", np.zeros((64, columns), np.float32), readonly=False)
    fields = np.dtype([(name, np.uint64) for name in ("a", "b", "c")])
    params = np.array([tuple(array.address for array in (*memory, c))], fields)[0]
    for seed in (1, 2):
        kernel.run(
            params, grid=1, threads=128, shared_bytes=shared_bytes, seed=seed, memory=[*memory, c]
        )
        np.testing.assert_array_equal(c.array().reshape(64, columns), 1 + 2 * (a @ b.T))
