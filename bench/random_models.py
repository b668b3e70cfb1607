"""Time attention in shapes of models that are drawn at random, beside cuDNN, FlashAttention-2 and FlashAttention-4.

    python bench/random_models.py --shapes 60 --seed 2 --json shapes.json

Encoders, diffusion, cross-attention, language models, chunks of rows on cached keys, MLA, and lengths at random. Each call is
timed in CUDA graphs, in turns with those peers that are installed and whose results agree.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.shapes import Times, between, command_line, run, worst
from rawattn._bench import counters, graph_peers, models
from rawattn._bench.graph_peers import OURS
from rawattn._bench.grids import CUDNN, FA2, FA4
from rawattn._bench.model_cases import Model

_KINDS = ("encoder", "LLM", "diffusion", "cross", "chunk", "MLA", "odd")
_LEAST_OPERATIONS, _MOST_OPERATIONS, _MOST_BYTES = 2e8, 1e12, 1.2e9
_REPEATS = 5


def draw(source: random.Random) -> Model:
    """Draw a random shape of a random kind; lengths and batches are log-uniform."""
    while True:
        drawn = _of_kind(source, source.choice(_KINDS))
        seen = counters.visible(drawn.rows, drawn.keys, causal=drawn.causal)
        width = drawn.headdim + drawn.headdim_v
        operations = 2 * drawn.batch * drawn.nheads_q * seen.pairs * width
        if not _LEAST_OPERATIONS < operations < _MOST_OPERATIONS:
            continue
        if drawn.nbytes < _MOST_BYTES:
            return drawn


def _of_kind(source: random.Random, kind: str) -> Model:
    batch, causal, group = between(source, 1, 16), False, 1
    nheads_kv = source.choice((8, 10, 16, 20, 24))
    headdim = source.choice((40, 64, 64, 72, 80, 96, 128, 128))
    if kind == "encoder":
        batch, rows = between(source, 1, 128), between(source, 60, 1200)
        keys = rows
        nheads_kv = source.choice((6, 8, 12, 16, 24))
        headdim = source.choice((32, 64, 64, 64, 72, 80, 88, 96, 104, 128))
    elif kind in ("LLM", "chunk"):
        causal, group = True, source.choice((1, 1, 2, 3, 4, 5, 7, 8))
        nheads_kv = source.choice((2, 4, 8, 8, 8, 16))
        headdim = source.choice((64, 96, 128, 128, 128, 256))
        rows = between(source, 16, 1500) if kind == "chunk" else between(source, 128, 6000)
        keys = rows + (between(source, 500, 30000) if kind == "chunk" else 0)
    elif kind == "diffusion":
        batch, rows = source.choice((1, 2, 2, 4, 8)), between(source, 1000, 10000)
        keys = rows
        headdim = source.choice((headdim, 160))
    elif kind == "cross":
        rows, keys = between(source, 200, 10000), between(source, 20, 600)
    elif kind == "MLA":
        batch, rows = between(source, 1, 8), between(source, 200, 5000)
        keys, causal = rows, source.choice((True, True, False))
        return Model(kind, batch, rows, keys, 16, 16, 192, 128, causal)
    else:
        rows, keys = between(source, 50, 3000), between(source, 50, 3000)
        nheads_kv = source.choice((4, 7, 9, 12, 20))
        headdim = source.choice((64, 96, 128, 128, 256))
    nheads_q = nheads_kv * group
    return Model(kind, batch, rows, keys, nheads_q, nheads_kv, headdim, headdim, causal)


def measure(drawn: Model) -> Times:
    """The microseconds of a call by the name of the side; empty if no peer can make the call."""
    sides, peers = models.sides(drawn, "bfloat16"), (CUDNN, FA2, FA4)
    times, _ = graph_peers.seconds(sides, drawn.nbytes, peers, _REPEATS)
    if OURS not in times or len(times) == 1:
        return {}
    return {side: 1e6 * time for side, time in times.items()}


def summary(results: Sequence[tuple[Model, Times]]) -> list[str]:
    """Our time over that of the fastest peer, and the ten worst shapes."""
    over = []
    for drawn, times in results:
        theirs = min(time for side, time in times.items() if side != OURS)
        over.append((times[OURS] / theirs, drawn, times))
    if not over:
        return ["no peer makes these calls"]
    median = statistics.median(ratio for ratio, _, _ in over)
    slower = sum(ratio > 1 for ratio, _, _ in over)
    lines = [f"over the fastest peer: {median:.2f} in the median of {len(over)}, {slower} above 1"]
    return [*lines, *worst(over, 10, lambda drawn: drawn.name)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("python bench/random_models.py", __doc__, (), shapes=100)
    return run(parser.prog, parser.parse_args(argv), draw, measure, summary)


if __name__ == "__main__":
    sys.exit(main())
