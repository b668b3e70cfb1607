"""Time attention of a few query rows over many keys, on random shapes: is the faster kernel chosen, and how fast is cuDNN?

    python bench/random_shapes.py --shapes 200 --seed 1 --keys bias --json shapes.json

Each call is timed in CUDA graphs three times: with the kernel that the library chooses, with the decode kernels forced, and
with Hopper's forward forced. Unpaged calls of one query row are also timed with torch's cuDNN attention. Calls of several rows
are causal, and cuDNN gets no causal mask here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rawattn
from rawattn._bench import graph_peers, graphs, machine
from rawattn._bench.grids import CUDNN
from rawattn._bench.timing import Call, Entrant, race
from rawattn._call import outputs
from rawattn._cli import arguments
from rawattn._kernels.selection import only
from rawattn._runtime.devices import why_no_gpu

KEYS = ("rows", "bias", "mask", "pages")
_DTYPE, _ITEMSIZE = "bfloat16", 2
_PAGE_SIZE = 16
_HEADDIMS = (64, 64, 80, 96, 128, 128, 192, 256)
_LEAST_BYTES, _MOST_BYTES = 2e5, 3e8
_MOST_ROWS = 64  # bound on rows x GQA group
_SIDES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "chosen": contextlib.nullcontext,
    "decode": lambda: only("decode"),
    "forward": lambda: only("sm90"),
}


class Shape(NamedTuple):
    """One call.

    keys: an entry of KEYS: the keys lie in pages, or in rows, and with rows there may be a bias or a mask.
    """

    keys: str
    batch: int
    rows: int
    seqlen_k: int
    nheads_q: int
    nheads_kv: int
    headdim: int

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return 2 * _ITEMSIZE * self.batch * self.seqlen_k * self.nheads_kv * self.headdim


def draw(source: random.Random, keys: str) -> Shape:
    """Draw a random shape; batch and seqlen_k are log-uniform."""
    while True:
        group = source.choice((1, 1, 2, 4, 4, 7, 8, 16))
        nheads_kv = source.choice((1, 2, 4, 8, 8, 16, 32))
        shape = Shape(
            keys,
            batch=_between(source, 1, 200),
            rows=source.choice((1, 1, 1, 2, 3, 4, 8, 16)),
            seqlen_k=_between(source, 100, 16384),
            nheads_q=group * nheads_kv,
            nheads_kv=nheads_kv,
            headdim=source.choice(_HEADDIMS),
        )
        few = shape.rows * group <= _MOST_ROWS and shape.nheads_q <= 128
        if few and _LEAST_BYTES <= shape.nbytes <= _MOST_BYTES:
            return shape


def _between(source: random.Random, least: int, most: int) -> int:
    return round(math.exp(source.uniform(math.log(least), math.log(most))))


class Inputs(NamedTuple):
    """CuPy arrays and options of one call.

    arrays: those of `attention` or `paged_attention`; the block table follows keys and values.
    """

    arrays: tuple[Any, ...]
    options: dict[str, Any]


def make(shape: Shape) -> Inputs:
    """Make random inputs. Pages are scattered over the pool; a mask hides the last eighth of the last sequence's keys."""
    import cupy

    batch, keys, heads = shape.batch, shape.seqlen_k, (shape.nheads_kv, shape.headdim)
    q = machine.random_array((batch, shape.rows, shape.nheads_q, shape.headdim), _DTYPE)
    options: dict[str, Any] = {"causal": shape.rows > 1}
    if shape.keys == "pages":
        pages = -(-keys // _PAGE_SIZE)
        k, v = (machine.random_array((batch * pages, _PAGE_SIZE, *heads), _DTYPE) for _ in "kv")
        ids = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
        options["seqlen_k"] = cupy.full(batch, keys, np.int32)
        return Inputs((q, k, v, cupy.asarray(ids.reshape(batch, pages))), options)
    k, v = (machine.random_array((batch, keys, *heads), _DTYPE) for _ in "kv")
    if shape.keys == "bias":
        options["bias"] = machine.random_array((batch, shape.nheads_q, shape.rows, keys), _DTYPE)
    if shape.keys == "mask":
        seen = np.linspace(keys, keys - keys // 8, batch)
        options["mask"] = cupy.asarray(np.arange(keys) < seen[:, None, None, None])
    return Inputs((q, k, v), options)


def call(inputs: Inputs, scope: Callable[[], AbstractContextManager[Any]]) -> Call:
    """Return a function that calls the library within this scope."""
    verb = rawattn.paged_attention if len(inputs.arrays) > 3 else rawattn.attention

    def made() -> Any:
        with scope():
            return verb(*inputs.arrays, **inputs.options)

    return made


def measure(shape: Shape) -> dict[str, float]:
    """Return the microseconds of a call by entrant; an entrant that cannot make the call is left out."""
    sets = [make(shape) for _ in range(graphs.sets(shape.nbytes))]
    entrants: dict[str, Entrant] = {
        side: graphs.entrant(graphs.of_cupy, [call(x, scope) for x in sets], shape.nbytes)
        for side, scope in _SIDES.items()
    }
    if shape.keys != "pages" and shape.rows == 1:
        theirs = []
        for x in sets:
            q, k, v = x.arrays
            hidden = x.options.get("bias", x.options.get("mask"))
            theirs.append(graph_peers.sdpa("CUDNN_ATTENTION", q, k, v, False, hidden))
        with contextlib.suppress(Exception):  # torch raises many kinds of errors
            entrants[CUDNN] = graphs.entrant(graphs.of_torch, theirs, shape.nbytes)
    found = race(entrants, repeats=3)
    return {
        side: 1e6 * timing.seconds
        for side, timing in found.items()
        if not isinstance(timing, Exception)
    }


def summary(results: Sequence[tuple[Shape, dict[str, float]]]) -> list[str]:
    """Compare the chosen kernel with the fastest one and with cuDNN; list the ten worst shapes of each comparison."""
    lines = []
    for title, others in (("the quicker kernel", ("decode", "forward")), (CUDNN, (CUDNN,))):
        over = [
            (times["chosen"] / min(times[side] for side in others), shape, times)
            for shape, times in results
            if all(side in times for side in ("chosen", *others))
        ]
        if not over:
            continue
        mean = statistics.geometric_mean(ratio for ratio, _, _ in over)
        slower = sum(ratio > 1.02 for ratio, _, _ in over)
        lines.append(f"over {title}: {mean:.3f} in the mean of {len(over)}, {slower} above 1.02")
        over.sort(key=lambda each: -each[0])
        for ratio, shape, times in over[:10]:
            shown = ", ".join(f"{side} {time:.1f}" for side, time in times.items())
            lines.append(f"  {ratio:.2f} {tuple(shape)}: {shown} us")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python bench/random_shapes.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shapes", type=arguments.count, metavar="N", default=200, help="how many (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--keys", choices=KEYS, default="rows", help="(%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="a file for the times of each shape"
    )
    given = parser.parse_args(argv)
    try:
        if given.json:
            outputs.check("--json", given.json)
        if (why := why_no_gpu()) is not None:
            raise RuntimeError(f"GPU kernels are timed, and there is no usable GPU: {why}")
    except (OSError, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    source = random.Random(given.seed)
    results = []
    for n in range(given.shapes):
        shape = draw(source, given.keys)
        results.append((shape, measure(shape)))
        print(f"[{n + 1}/{given.shapes}] {tuple(shape)}", file=sys.stderr)
    if given.json:
        rows = [{**shape._asdict(), **times} for shape, times in results]
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print("\n".join(summary(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
