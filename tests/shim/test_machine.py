"""The simulator itself: its arithmetic is right, and it finds each mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn._compile.compiler import Source
from tests import exhaustive
from tests.memory import DTYPES
from tests.shim.shim import Build, Builder, Fault, Kernel, Memory

THREADS = 64
POINTERS = np.dtype([("x", np.uint64), ("y", np.uint64)])


def probe(builder: Builder, body: str, *, wave: int = 32, checked: bool = False) -> Kernel:
    """Builds a kernel with `body` that has two float32 arrays, `x` and `y`."""
    text = f"""\
#include "target/target.cuh"
struct Params {{
  float* x;
  float* y;
}};
KERNEL LAUNCH_BOUNDS({THREADS}, 1) void probe(PARAMETER Params p) {{
  SHARED_MEMORY(shared, 1024);
  float* const tile = reinterpret_cast<float*>(shared);
  const int thread = target::thread_index();
  {body}
  (void)tile, (void)thread, (void)p;
}}
"""
    return builder.kernel(Build(Source("probe", text, "a probe"), wave, checked))


def run(
    kernel: Kernel, x: Any = 0.0, *, grid: int = 1, seed: int = 1, shared_bytes: int = 1024
) -> Any:
    """Returns `y` after the run, 64 NaNs before it."""
    given = Memory("x", np.broadcast_to(np.float32(x), THREADS))
    result = Memory("y", np.full(THREADS, np.nan, np.float32), readonly=False)
    params = np.array([(given.address, result.address)], POINTERS)[0]
    kernel.run(
        params,
        grid=grid,
        threads=THREADS,
        shared_bytes=shared_bytes,
        seed=seed,
        memory=[given, result],
    )
    return result.array()


MISTAKES = {
    "exit": (
        "if (thread != 3) target::wave_sync();",
        "thread 0 waits in wave_sync.*thread 3 has exited",
    ),
    "primitive": (
        "if (thread == 37) target::wave_any(true); else target::wave_sync();",
        "thread 32 waits in wave_sync.*thread 37 waits in wave_any",
    ),
    "mask": (
        "target::shuffle_xor(1.0f, thread == 5 ? 2 : 1);",
        r"shuffle_xor\(1\).*shuffle_xor\(2\)",
    ),
    "lane": ("target::shuffle_xor(1.0f, 32);", "leaves a wave of 32"),
    "barrier": (
        "if (thread < 32) target::block_sync();",
        "threads of one block diverged: thread 0 waits in block_sync.*thread 32 has exited",
    ),
    "not committed": (
        "target::copy_async<4>(tile + thread, p.x + thread, true); target::copy_async_wait();",
        "never waited for",
    ),
    "not waited for": (
        "target::copy_async<4>(tile + thread, p.x + thread, true); target::copy_async_commit();",
        "never waited for",
    ),
    "copy past the end": ("target::copy_async<16>(tile + 256, p.x, true);", "to byte 1024 of 1024"),
    "copy not aligned": ("target::copy_async<16>(tile, p.x + 1, true);", "not aligned"),
    "shared memory, just after": ("tile[256] = 1.0f;", "byte 1024 of shared memory was written"),
    "shared memory, before": ("tile[-1] = 1.0f;", "byte -4 of shared memory was touched"),
    "shared memory, beyond": ("tile[1024] = 1.0f;", "byte 4096 of shared memory was touched"),
    "past an array": ("p.y[thread] = p.x[thread + 4];", r"byte 2[56]. of x \(256 bytes\) was"),
    "before an array": ("p.y[thread] = p.x[thread - 1024];", "byte -[0-9]+ of x .* was touched"),
    "an input": ("p.x[thread] = 1.0f;", "byte [0-9]+ of x .* was touched"),
    "nothing": ("*reinterpret_cast<volatile float*>(16ull) = 1.0f;", "address 0x10, of no array"),
    "stack": (
        "volatile char deep[300 << 10]; for (int i = 300 << 10; i > 0; i -= 512) deep[i - 1] = 0;",
        "bytes of stack",
    ),
    "fragment": (
        "target::Mma<float>::load_a(tile + 1, 16, thread % target::kWave);",
        "not all on 16 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", exhaustive.thin(MISTAKES, 3))
def test_mistakes_are_found(mistake: str, builder: Builder) -> None:
    body, message = MISTAKES[mistake]
    kernel = probe(builder, body)
    with pytest.raises(Fault, match=message):
        run(kernel)


def test_shared_memory_must_be_asked_for(builder: Builder) -> None:
    kernel = probe(builder, "")
    with pytest.raises(Fault, match="uses 1024 bytes of shared memory, launched with 512"):
        run(kernel, shared_bytes=512)


UNDEFINED = {
    "overflow": ("p.y[0] = 4 * thread + int(p.x[0]);", 2.0**31 - 128, "signed integer overflow"),
    "alignment": ("p.y[0] = *reinterpret_cast<const double*>(p.x + 1);", 0.0, "load of misaligned"),
    "index": ("float few[4] = {}; few[int(p.x[0])] = 1.0f; p.y[0] = few[1];", 4.0, "out of bounds"),
}


@pytest.mark.parametrize("kind", UNDEFINED)
def test_undefined_behaviour_is_found(kind: str, builder: Builder) -> None:
    body, x, message = UNDEFINED[kind]
    kernel = probe(builder, f"{body} for (int i = 0; i < 200; i++) tile[0] = i;", checked=True)
    with pytest.raises(Fault, match=message):
        run(kernel, x)


def test_a_copy_arrives_when_it_is_waited_for(builder: Builder) -> None:
    body = """
      tile[thread] = 5.0f;
      target::copy_async<4>(tile + thread, thread < 48 ? p.x + thread : nullptr, thread < 48);
      target::copy_async_commit();
      if (thread % 2 == 0) p.y[thread] = tile[thread];
      target::copy_async_wait();
      if (thread % 2 == 1) p.y[thread] = tile[thread];
    """
    y = run(probe(builder, body), 7.0)
    assert np.all(np.isnan(y[::2]))
    np.testing.assert_array_equal(y[1::2], [7.0] * 24 + [0.0] * 8)


def test_shared_memory_starts_as_nan_in_every_block(builder: Builder) -> None:
    body = """
      p.y[thread] = tile[thread];
      target::block_sync();
      tile[thread] = 1.0f;
    """
    assert np.all(np.isnan(run(probe(builder, body), grid=3)))


def test_waves_overtake_each_other(builder: Builder) -> None:
    """A missing barrier is found: with some seeds the other wave's writes have not happened yet."""
    body = """
      tile[thread] = 1.0f;
      target::wave_sync();
      p.y[thread] = tile[63 - thread];
    """
    kernel = probe(builder, body)
    seen = {tuple(np.isnan(run(kernel, seed=seed))[[0, 63]]) for seed in range(60)}
    assert seen == {(True, False), (False, True), (False, False)}


def test_lanes_run_apart_between_meetings(builder: Builder) -> None:
    body = "tile[thread] = 1.0f; p.y[thread] = tile[thread ^ 1];"
    assert np.isnan(run(probe(builder, body))).sum() == THREADS // 2


@pytest.mark.parametrize("wave", [32, 64])
def test_exchange(wave: int, builder: Builder) -> None:
    body = """
      const bool any = target::wave_any(thread == 40);
      p.y[thread] = target::shuffle_xor(float(thread), 5) + (any ? 1000.0f : 0.0f);
    """
    threads = np.arange(THREADS)
    expected = (threads ^ 5) + 1000 * (threads // wave == 40 // wave)
    np.testing.assert_array_equal(run(probe(builder, body, wave=wave)), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions(dtype: str, builder: Builder) -> None:
    text = f"""\
#include "target/target.cuh"
struct Params {{
  const {dtype}* narrow;
  const float* wide;
  float* widened;
  {dtype}* narrowed;
  long long count;
}};
KERNEL LAUNCH_BOUNDS(32, 1) void convert(PARAMETER Params p) {{
  for (long long i = target::thread_index(); i < p.count; i += 32) {{
    if (i < 65536) p.widened[i] = target::to_float(p.narrow[i]);
    p.narrowed[i] = target::from_float<{dtype}>(p.wide[i]);
  }}
}}
"""
    kernel = builder.kernel(Build(Source("convert", text, "conversions")))
    everything = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    wide = everything.astype(np.float32)
    # Every 16-bit value, the midpoints between neighbours, and the float32 numbers next to those.
    bits = wide.view(np.uint32)
    half = np.uint32(0x1000 if dtype == "float16" else 0x8000)
    wide = np.concatenate([bits, bits + half, bits + half - 1, bits + half + 1]).view(np.float32)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    usual = rng.standard_normal(200_000) * 2.0 ** rng.integers(-30, 20, 200_000)
    wide = np.concatenate([wide, some, usual.astype(np.float32)])

    arrays = {
        "narrow": Memory("narrow", everything.view(np.uint16)),
        "wide": Memory("wide", wide),
        "widened": Memory("widened", np.zeros(65536, np.float32), readonly=False),
        "narrowed": Memory("narrowed", np.zeros(wide.size, np.uint16), readonly=False),
    }
    fields = np.dtype([*((name, np.uint64) for name in arrays), ("count", np.int64)])
    params = np.array([(*(array.address for array in arrays.values()), wide.size)], fields)[0]
    kernel.run(params, grid=1, threads=32, memory=arrays.values())

    with np.errstate(over="ignore", invalid="ignore"):
        narrowed = wide.astype(DTYPES[dtype])
    _same(arrays["widened"].array(), everything.astype(np.float32))
    _same(arrays["narrowed"].array().view(DTYPES[dtype]), narrowed)


def _same(got: np.ndarray, expected: np.ndarray) -> None:
    """Whether both are equal bit for bit, any NaN being equal to any other."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_product(dtype: str, wave: int, builder: Builder) -> None:
    """C + A B is right for each way to load B, and with A from an accumulator if the target supports that."""
    element = "float" if dtype == "float32" else dtype
    text = f"""\
#include "target/target.cuh"
using M = target::Mma<{element}>;
using C = M::C;
struct Params {{
  const {element}* a;
  const {element}* b;
  const {element}* b_transposed;
  float* c;
}};
template <class M>
void store(const Params& p, int n, const typename M::A& a, const typename M::B& b, int lane) {{
  C c;
  for (int e = 0; e < C::kElements; e++) {{
    c.x[e] = 100.0f * C::row(lane, C::slot(e)) + C::column(lane, e);
  }}
  M::multiply_add(c, a, b);
  for (int e = 0; e < C::kElements; e++) {{
    p.c[256 * n + 16 * C::row(lane, C::slot(e)) + C::column(lane, e)] = c.x[e];
  }}
}}
template <class M>
void products(const Params& p, int lane) {{
  const auto b = M::load_b_columns(p.b, 16, lane);
  store<M>(p, 0, M::load_a(p.a, 16, lane), b, lane);
  store<M>(p, 1, M::load_a(p.a, 16, lane), M::load_b_rows(p.b_transposed, 16, lane), lane);
  if constexpr (M::kAccumulatorFeedsA) {{
    C c;
    for (int e = 0; e < C::kElements; e++) {{
      c.x[e] = target::to_float(p.a[16 * C::row(lane, C::slot(e)) + C::column(lane, e)]);
    }}
    store<M>(p, 2, M::from_accumulator(c), b, lane);
  }}
}}
KERNEL LAUNCH_BOUNDS(RAWATTN_WAVE, 1) void product(PARAMETER Params p) {{
  products<M>(p, target::thread_index());
}}
"""
    kernel = builder.kernel(Build(Source("product", text, "products"), wave))
    rng = np.random.default_rng(0)
    depth = 4 if dtype == "float32" else 16
    a, b = rng.integers(-8, 9, (2, 16, 16)).astype(DTYPES[dtype])
    memory = [Memory(name, x) for name, x in (("a", a), ("b", b), ("b_transposed", b.T))]
    c = Memory("c", np.zeros((3, 16, 16), np.float32), readonly=False)
    fields = np.dtype([(name, np.uint64) for name in ("a", "b", "b_transposed", "c")])
    params = np.array([tuple(array.address for array in (*memory, c))], fields)[0]
    kernel.run(params, grid=1, threads=wave, memory=[*memory, c])

    wide_a, wide_b = a.astype(np.float32)[:, :depth], b.astype(np.float32)[:depth]
    expected = 100 * np.arange(16)[:, None] + np.arange(16) + wide_a @ wide_b
    got = c.array().reshape(3, 16, 16)
    np.testing.assert_array_equal(got[0], expected)
    np.testing.assert_array_equal(got[1], expected)
    if wave == 32 and dtype != "float32":
        np.testing.assert_array_equal(got[2], expected)
