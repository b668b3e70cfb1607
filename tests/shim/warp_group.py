"""A probe kernel for the Hopper features of the simulator: one warpgroup loads, the other multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rawattn._compile.compiler import Source
from rawattn._kernels.steps import Geometry
from tests import exhaustive
from tests.shim.shim import Build, Builder, Fault, Kernel, Memory
from tests.shim.tensor_map import encode

THREADS = 256  # group 0 loads, group 1 multiplies
ROWS, COLUMNS = 64, 64
BYTES = ROWS * COLUMNS * 2
POINTERS = np.dtype([("x", np.uint64), ("y", np.uint64)])
SEEDS = range(1, 41)  # each gives another order in which threads run and copies arrive


def probe(builder: Builder, body: str, *, sync: str = "target::block_sync()") -> Kernel:
    """Builds a kernel with `body` that reads `x` (a tensor map of float16, boxes of 64 x 64) and writes `y` (float32).

    sync: the statement after the initialisation of the mbarriers.
    """
    text = f"""\
#include "ptx/ptx.cuh"
#include "target/target.cuh"
struct Params {{
  const float16* x;
  float* y;
}};
struct Shared {{
  alignas(1024) unsigned char a[{BYTES}];
  unsigned char b[{BYTES}];
  ptx::Mbarrier full, empty, none;
  unsigned number;
}};
using C = target::Accumulator;
using A = target::Mma<float16>::A;
using W = ptx::Wgmma<float16, 16>;
constexpr ptx::Major K = ptx::Major::K, MN = ptx::Major::MN;
KERNEL LAUNCH_BOUNDS({THREADS}, 1) void probe(PARAMETER Params p, PARAMETER ptx::TensorMap map) {{
  SHARED_MEMORY_ALIGNED(bytes, sizeof(Shared), 1024);
  Shared& s = *reinterpret_cast<Shared*>(bytes);
  const int thread = target::thread_index();
  const int group = thread / 128, warp = thread / 32, lane = thread % 32;
  const auto load = [&](void* to, int expected) {{
    ptx::mbarrier_arrive_expect(&s.full, expected);
    ptx::copy_tensor_5d(to, &map, &s.full, 0, 0, 0, 0, 0);
  }};
  const auto release = [&] {{
    if (lane == 0) ptx::mbarrier_arrive(&s.empty);
  }};
  const unsigned long long a = ptx::wgmma_descriptor(s.a, 0);
  const auto multiply = [&](C (&c)[1]) {{
    ptx::wgmma_fence();
    W::ss<K, K>(c, a, a, 0);
    ptx::wgmma_commit();
  }};
  C c[1];
  A registers{{}};
  if (thread == 0) {{
    ptx::mbarrier_init(&s.full, 1);
    ptx::mbarrier_init(&s.empty, 4);
    ptx::fence_mbarrier_init();
  }}
  {sync};
  {body}
  (void)p, (void)group, (void)warp, (void)load, (void)release, (void)multiply, (void)c, (void)registers;
}}
"""
    return builder.kernel(Build(Source("probe", text, "a probe")))


def run(
    kernel: Kernel,
    *,
    seed: int = 1,
    grid: int = 1,
    cluster: int = 1,
    x: np.ndarray | None = None,
    stores: bool = False,
    **geometry: Any,
) -> Any:
    """Returns `y` after the run, NaN before it; with `stores`, `x`, to which the kernel stores through the map."""
    values = np.ones((ROWS, COLUMNS), np.float16) if x is None else x
    given = Memory("x", values, readonly=not stores)
    result = Memory("y", np.full(64 * 256, np.nan, np.float32), readonly=False)
    params = np.array([(given.address, result.address)], POINTERS)[0]
    shape = {
        "dtype": "float16",
        "dims": (values.shape[1], values.shape[0], 1, 1, 1),
        "strides": (2 * values.shape[1], 16, 16, 16),
        "box": (64, 64, 1, 1, 1),
        "origin": 0,
    }
    tensor = encode(Geometry(**{**shape, **geometry}), given.address)
    kernel.run(
        params,
        tensor,
        grid=grid,
        cluster=cluster,
        threads=THREADS,
        shared_bytes=2 * BYTES + 1024,
        seed=seed,
        memory=[given, result],
    )
    return given.array() if stores else result.array()


# A producer that loads two tiles, and a consumer that multiplies each. %s is the consumer's sequence of operations.
PIPELINE = f"""
  if (thread == 0) {{
    load(s.a, {BYTES});
    ptx::mbarrier_wait(&s.empty, 0);
    load(s.a, {BYTES});
  }}
  if (group == 1) for (unsigned n = 0; n < 2; n++) {{
    %s
    for (int e = 0; e < 8; e++) p.y[(thread - 128) * 8 + e] = c[0].x[e];
  }}
"""
WAIT = "ptx::mbarrier_wait(&s.full, n);"
LOADED = f"if (thread == 0) load(s.a, {BYTES}); ptx::mbarrier_wait(&s.full, 0); if (group == 1)"
ALONE = "for (int i = thread; i < 4096; i += 256) s.a[i] = 0; target::block_sync(); if (group == 1)"


def check_found(order: Callable[[int], Any], message: str) -> None:
    """Checks that a mistake is found in every order of execution. order: runs the kernel with a seed."""
    for seed in SEEDS[:3]:
        with pytest.raises(Fault, match=message):
            order(seed)


def count_found(
    order: Callable[[int], Any], message: str, wrong: Callable[[Any], bool] = lambda y: False
) -> int:
    """The number of SEEDS with which a mistake is found: by a fault with this message, and no other, or by a wrong result."""
    found = 0
    for seed in SEEDS:
        try:
            y = order(seed)
        except Fault as fault:
            found += 1
            with pytest.raises(Fault, match=message):
                raise fault
        else:
            found += wrong(y)
    return found


Probe, Run = Callable[[Builder, str], Kernel], Callable[..., Any]


def finds_mistakes(mistakes: Mapping[str, tuple[str, str]], probe: Probe, run: Run) -> Any:
    """A test that each mistake is found in every order of execution. mistakes: (body of a kernel, message of the fault)."""

    @pytest.mark.parametrize("mistake", exhaustive.thin(mistakes, 4))
    def test(mistake: str, builder: Builder) -> None:
        body, message = mistakes[mistake]
        kernel = probe(builder, body)
        check_found(lambda seed: run(kernel, seed=seed), message)

    return test


def finds_races(
    races: Mapping[str, tuple[str, str]],
    probe: Probe,
    run: Run,
    wrong: Callable[[Any], bool] = lambda y: False,
) -> Any:
    """A test that each race is found in some orders of execution. Any fault must have the race's message."""

    @pytest.mark.parametrize("race", races)
    def test(race: str, builder: Builder) -> None:
        body, message = races[race]
        kernel = probe(builder, body)
        found = count_found(lambda seed: run(kernel, seed=seed), message, wrong)
        assert found > 2, f"{found} of {len(SEEDS)} orders"

    return test
