"""Time attention of a few query rows over many keys, on random shapes: is the faster kernel chosen, and how fast is cuDNN?

    python bench/random_shapes.py --shapes 200 --seed 1 --keys bias --json shapes.json

Each call is timed in CUDA graphs three times: with the kernel that the library chooses, with the decode kernels forced, and
with Hopper's forward forced. Unpaged calls of one query row are also timed with torch's cuDNN attention. Calls of several rows
are causal, and cuDNN gets no causal mask here.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.shapes import Shape, Times, between, call, command_line, make, run, worst
from rawattn._bench import graph_peers, graphs
from rawattn._bench.grids import CUDNN
from rawattn._bench.timing import Entrant, race
from rawattn._kernels.selection import only

KEYS = ("rows", "bias", "mask", "pages", "float8")
_HEADDIMS = (64, 64, 80, 96, 128, 128, 192, 256)
_LEAST_BYTES, _MOST_BYTES = 2e5, 3e8
_MOST_ROWS = 64  # bound on rows x GQA group
_SIDES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "chosen": contextlib.nullcontext,
    "decode": lambda: only("decode"),
    "forward": lambda: only("sm90"),
}


def draw(source: random.Random, keys: str) -> Shape:
    """Draw a random shape; batch and seqlen_k are log-uniform."""
    while True:
        group = source.choice((1, 1, 2, 4, 4, 7, 8, 16))
        nheads_kv = source.choice((1, 2, 4, 8, 8, 16, 32))
        shape = Shape(
            keys,
            batch=between(source, 1, 200),
            rows=source.choice((1, 1, 1, 2, 3, 4, 8, 16)),
            seqlen_k=between(source, 100, 16384),
            nheads_q=group * nheads_kv,
            nheads_kv=nheads_kv,
            headdim=source.choice(_HEADDIMS),
        )
        few = shape.rows * group <= _MOST_ROWS and shape.nheads_q <= 128
        if few and _LEAST_BYTES <= shape.nbytes <= _MOST_BYTES:
            return shape


def measure(shape: Shape) -> dict[str, float]:
    """Return the microseconds of a call by entrant; an entrant that cannot make the call is left out."""
    sets = [make(shape) for _ in range(graphs.sets(shape.nbytes))]
    entrants: dict[str, Entrant] = {
        side: graphs.entrant(graphs.of_cupy, [call(x, scope) for x in sets], shape.nbytes)
        for side, scope in _SIDES.items()
    }
    if not shape.paged and shape.rows == 1:
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


def summary(results: Sequence[tuple[Shape, Times]]) -> list[str]:
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
        lines += worst(over, 10)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("python bench/random_shapes.py", __doc__, KEYS, shapes=200)
    given = parser.parse_args(argv)
    return run(parser.prog, given, lambda source: draw(source, given.keys), measure, summary)


if __name__ == "__main__":
    sys.exit(main())
