"""portable/exact_sum.cuh on the simulator: sums of numbers of any size are exact in any order."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rawattn._compile.compiler import Source
from tests.shim.shim import Build, Builder, Memory

_WORDS = 10
_TEXT = """\
#include "portable/exact_sum.cuh"
struct Params {
  float* x;
  ExactSum* sum;
  float* y;
  long long count;
};
KERNEL LAUNCH_BOUNDS(64, 1) void probe(PARAMETER Params p) {
  const int thread = target::thread_index();
  for (int64 n = thread; n < p.count; n += 64) p.sum->add(p.x[n]);
  target::block_sync();
  if (thread == 0) p.y[0] = p.sum->read_and_clear();
}
"""
_PARAMS = np.dtype([("x", np.uint64), ("sum", np.uint64), ("y", np.uint64), ("count", np.int64)])
RNG = np.random.default_rng(0)


def summed(builder: Builder, x: Any) -> np.float32:
    """The sum of x; asserts that the accumulator is 0 again afterwards."""
    kernel = builder.kernel(Build(Source("probe", _TEXT, "a probe")))
    memory = [
        Memory("x", np.asarray(x, np.float32)),
        Memory("sum", np.zeros(_WORDS, np.uint64), readonly=False),
        Memory("y", np.full(1, np.nan, np.float32), readonly=False),
    ]
    params = np.array([(*(each.address for each in memory), len(x))], _PARAMS)[0]
    kernel.run(params, grid=1, threads=64, shared_bytes=0, seed=1, memory=memory)
    assert not memory[1].array().any()
    return memory[2].array()[0]


def bits(*shape: int) -> np.ndarray:
    """Random finite floats of every exponent, subnormal ones included."""
    x = RNG.integers(0, 2**32, shape, np.uint32).view(np.float32)
    return np.where(np.isfinite(x), x, np.float32(1))


NUMBERS = {
    "normal": RNG.standard_normal(5000),
    "small": bits(300) * np.float32(1e-30),
    "any": bits(4000) / 2**13,
    "nothing": [],
    "subnormal": np.arange(1, 900, dtype=np.uint32).view(np.float32),
    "negative": -np.abs(RNG.standard_normal(77)),
    "least": [-1e-45],
    "largest": [3.4e38, -3.4e38, 3.4e38, -1.0],
    "cancelling": [3e38, 1.0, 1e-40, -3e38, -1.0],
    "ones": [-1.0] * 5000 + [4999.5],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sums(builder: Builder, name: str) -> None:
    x = np.asarray(NUMBERS[name], np.float32)
    exact = sum(map(Fraction, map(float, x)), Fraction())
    for order in (x, x[::-1], RNG.permutation(x)):
        assert summed(builder, order) == np.float32(float(exact))


@pytest.mark.parametrize(
    ("more", "found"),
    [([np.inf], np.inf), ([-np.inf] * 2, -np.inf), ([np.inf, -np.inf], np.nan), ([np.nan], np.nan)],
    ids=str,
)
def test_what_is_no_number(builder: Builder, more: list[float], found: float) -> None:
    got = summed(builder, [1.0, *more, 2.0])
    assert got == found or (math.isnan(got) and math.isnan(found))
    assert summed(builder, [1.0, 2.0]) == 3
