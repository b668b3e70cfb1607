"""The suites of `rawattn bench --suite`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rawattn._bench import (
    accuracy,
    before,
    compile_time,
    dtypes,
    grids,
    host_time,
    memory,
    model_cases,
    models,
    ours,
    paged_peers,
    peers,
    score_cases,
    score_figures,
    score_peers,
    serving,
    serving_cases,
)
from rawattn._bench.cases import Case
from rawattn._bench.contender import Contender
from rawattn._bench.report import Figure


@dataclass(frozen=True, slots=True)
class Suite:
    """cases: a function of `quick`. figures: functions of (dtype, peers) for further figures, by their names in --filter.

    alone: names of figures that are measured before the cases, while this process has neither work nor memory on the GPU.

    listed: for a suite of figures alone the names of what they measure. It is measured as a whole, as some compare two cases.
    Its function takes `step` too, and calls it with each of the names.
    """

    summary: str
    cases: Callable[[bool], list[Case]]
    figures: Mapping[str, Callable[..., list[Figure]]]
    note: str = ""  # below the table
    alone: frozenset[str] = frozenset()
    listed: tuple[str, ...] = ()
    host: bool = False  # measured by `host_suite`, with neither cases nor further figures


_IN_GRAPHS = (
    "CUDA graphs of calls on several sets of inputs, which the L2 cache does not hold together, 16 calls or more of "
    "less than 64 MB, 4 or more of others; the time is that of one call"
)

SUITES = {
    "forward": Suite(
        "dense, ragged and windowed batches; host time a call; float16 over bfloat16; compile time",
        grids.forward,
        {
            "host": functools.partial(host_time.figures, "forward"),
            "dtypes": functools.partial(dtypes.figures, "forward"),
            "compile": compile_time.figures,
        },
    ),
    "backward": Suite(
        "dense, ragged and grouped batches, deterministic beside default; host time a call; "
        "float16 over bfloat16; memory",
        grids.backward,
        {
            "host": functools.partial(host_time.figures, "backward"),
            "dtypes": functools.partial(dtypes.figures, "backward"),
            "memory": memory.figures,
        },
        note="the backward alone, after a forward that is not timed; its operations are 2.5 times the forward's",
    ),
    "scores": Suite(
        "biases, masks, score functions, dropout and sinks, forward and backward, each with its bound; "
        "accuracy; compile time; every kernel without them, before and after",
        score_cases.cases,
        {
            "accuracy": accuracy.figures,
            "compile": score_figures.first_use,
            "masks": score_figures.masks,
            "before": before.figures,
        },
        note="a backward alone is timed, after a forward that is not; efficient and flash-sparse-attn return dbias "
        "as rawattn does, cuDNN does not",
        alone=frozenset({"before"}),
    ),
    "decode": Suite(
        "one new row on cached keys: share of the read bandwidth, time over the fastest peer, each with its bound",
        lambda quick: [],
        {"figures": serving.decode},
        listed=serving_cases.DECODE_NAMES,
        note=f"{_IN_GRAPHS}; cuDNN, FA2 and FA4 read keys in rows, others in pages where the line says so",
    ),
    "prefill": Suite(
        "chunks of new rows on cached keys: time over the fastest peer, pages over rows, each with its bound",
        lambda quick: [],
        {"figures": serving.prefill},
        listed=serving_cases.PREFILL_NAMES,
        note=f"{_IN_GRAPHS}; pages are compared with libraries that read pages",
    ),
    "models": Suite(
        "shapes of encoders, vision, diffusion, cross-attention, MLA and prompts: time over the fastest peer, and the median "
        "of that, each with its bound",
        lambda quick: [],
        {"figures": models.figures},
        listed=tuple(case.name for case in model_cases.CASES),
        note=_IN_GRAPHS,
    ),
    "host": Suite(
        "host time of cached calls from CuPy, PyTorch and JAX over that of torch's SDPA, each with its bound",
        lambda quick: [],
        {},
        host=True,
    ),
}


def contenders(suite: str) -> list[Contender]:
    """All contenders of a suite: ours first, and among ours the default kernels first."""
    if suite == "scores":
        return [ours.Ours("rawattn"), *score_peers.peers()]
    # Cases of other suites are not in pages, so these have no call but that of the figures.
    in_pages = map(Contender, paged_peers.PEERS) if suite in {"decode", "prefill"} else ()
    return [*ours.ours(suite), *peers.peers(suite), *in_pages]
