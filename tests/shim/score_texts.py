"""Score functions compiled for the simulator and evaluated at positions that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn._compile.compiler import Source
from rawattn._kernels import params
from rawattn._scores.cuda_text import device_text, predicate_text
from rawattn._scores.expression import POSITION
from rawattn._scores.score_mod import Predicate, ScoreMod
from tests.shim.shim import Build, Builder, Memory

# The most partial derivatives of a score function. An input row has the score and its position; an output row has the value,
# the derivative, then each partial with the index of its array element.
MAX_PARTIALS = 4
_COLUMNS = 1 + len(POSITION)
_RESULTS = 2 + 2 * MAX_PARTIALS
_PROBE = np.dtype(
    [
        ("captured", params.CAPTURED_ARRAYS.dtype),
        ("scores", np.uint64),
        ("results", np.uint64),
        ("count", np.int32),
        ("which", np.int32),
    ],
    align=True,
)


def kernel_text(mods: Sequence[ScoreMod | Predicate], exact: bool) -> str:
    """A kernel that evaluates one of several functions, each in a namespace of its own."""
    texts, calls = [], []
    for n, mod in enumerate(mods):
        is_predicate = isinstance(mod, Predicate)
        text = predicate_text(mod.text) if is_predicate else device_text(mod.text, exact=exact)
        texts.append(text.replace("namespace config", f"namespace config{n}"))
        kind = "Holds" if is_predicate else "Values"
        name = "Predicate" if is_predicate else "ScoreMod"
        calls.append(f"if (p.which == {n}) {kind}<config{n}::{name}>::run(p);")
    return f"""\
#include "attn/params.cuh"
#include "attn/score_position.cuh"
struct Probe {{
  CapturedArrays captured;
  const double* scores;
  double* results;
  int count, which;
}};
DEVICE ScorePosition position(const double* x) {{
  // Of positions any part may be the one that compilers know.
  return {{int(x[1]), int(x[2]), int(x[3]), int(x[4]), int(x[5]), int(x[6]), int(x[7]), 3, 5}};
}}
// What a function is made for before it is known which score it is called for.
DEVICE ScorePosition head_of(ScorePosition at) {{
  at.q_idx = at.kv_idx = 0;
  return at;
}}
template <class Mod, int n>
DEVICE void partials(const Probe& p, const double* x, double* y) {{
  if constexpr (n < Mod::kPartials) {{
    const Mod mod(head_of(position(x)), p);
    y[2 + 2 * n] = mod.template partial<n>(float(x[0]), position(x), p);
    y[3 + 2 * n] = double(mod.template partial_index<n>(float(x[0]), position(x), p));
    partials<Mod, n + 1>(p, x, y);
  }}
}}
template <class Mod>
struct Values {{
  DEVICE static void run(const Probe& p) {{
    for (int i = 0; i < p.count; i++) {{
      const double* const x = p.scores + i * {_COLUMNS};
      double* const y = p.results + i * {_RESULTS};
      const Mod mod(head_of(position(x)), p);
      y[0] = mod.value(float(x[0]), position(x), p);
      y[1] = Mod::kAdditive ? 1.0 : double(mod.derivative(float(x[0]), position(x), p));
      partials<Mod, 0>(p, x, y);
    }}
  }}
}};
template <class Mod>
struct Holds {{
  DEVICE static void run(const Probe& p) {{
    for (int i = 0; i < p.count; i++) {{
      p.results[i * {_RESULTS}] = Mod::holds(position(p.scores + i * {_COLUMNS}), p);
    }}
  }}
}};
{"".join(texts)}
KERNEL LAUNCH_BOUNDS(32, 1) void probe(PARAMETER Probe p) {{
  if (target::thread_index() != 0) return;
  {" ".join(calls)}
}}
"""


def source(mods: Sequence[ScoreMod | Predicate], *, exact: bool = True) -> Source:
    return Source("probe", kernel_text(mods, exact), f"{len(mods)} score texts")


class Device:
    """Score functions compiled together, evaluated with the arrays that they captured or others of the same form."""

    def __init__(
        self, builder: Builder, mods: Sequence[ScoreMod | Predicate], *, exact: bool = True
    ) -> None:
        self._mods = list(mods)
        self._kernel = builder.kernel(Build(source(mods, exact=exact), checked=True))

    def run(
        self, mod: ScoreMod | Predicate, scores: np.ndarray, positions: np.ndarray
    ) -> np.ndarray:
        """Returns a row per score: value, derivative, partials with their elements. positions: (rows, 7)."""
        rows = len(scores)
        given = np.concatenate([np.float64(scores)[:, None], np.float64(positions)], axis=1)
        memory = [
            Memory("scores", given),
            Memory("results", np.full((rows, _RESULTS), np.nan), readonly=False),
        ]
        record = np.zeros(1, _PROBE)
        for n, (name, array) in enumerate(mod.arrays.items()):
            memory.append(Memory(name, array.T if array.flags.f_contiguous else array))
            put_captured(record[0]["captured"][f"array{n}"], array, memory[-1].address)
        record["captured"]["scalars"][0, : len(mod.scalars)] = mod.scalars
        record["scores"], record["results"] = memory[0].address, memory[1].address
        record["count"], record["which"] = rows, self._mods.index(mod)
        self._kernel.run(record[0], grid=1, threads=32, memory=memory)
        return memory[1].array().reshape(rows, _RESULTS)


def put_captured(record: Any, array: np.ndarray, address: int) -> None:
    """Sets the record of a captured array whose first element is at `address`."""
    record["data"] = address
    record["strides"][: array.ndim] = np.array(array.strides) // array.itemsize
    record["extents"][: array.ndim] = array.shape
