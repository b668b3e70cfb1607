"""Figures of the suite `scores` beside its cases: the time of the first use of a new score function, and of making masks."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence

from rawattn._bench import child, measure, score_cases
from rawattn._bench.cases import Case
from rawattn._bench.report import Figure
from rawattn._bench.score_features import Documents, Tiles, TopK
from rawattn._bench.timing import time_call

# The process has called attention before, so that what a process does once is not counted.
_FIRST_USE = """
import json, time, cupy, rawattn
def seconds(call):
    cupy.cuda.runtime.deviceSynchronize()
    started = time.perf_counter()
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    return time.perf_counter() - started, result
q = cupy.zeros((1, 1024, 16, 128), cupy.float16)
slope = cupy.ones(16, cupy.float32)
def uses(**options):
    forward, (out, lse) = seconds(lambda: rawattn.attention(q, q, q, return_lse=True, **options))
    backward, _ = seconds(lambda: rawattn.attention_backward(q, q, q, q, out, lse, **options))
    return forward, backward
uses(causal=True)
mod = rawattn.ScoreMod("score + 0.5 * slope[head] * (kv_idx - q_idx)", slope=slope)
print(json.dumps(uses(causal=True, score_mod=mod)))
"""
_MOST_SECONDS = 1.5


def first_use(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Seconds of the first forward and the first backward with a new text, with an empty kernel cache."""
    names = ("first forward with a new ScoreMod", "first backward with it")
    try:
        with tempfile.TemporaryDirectory(prefix="rawattn-bench-") as folder:
            found = child.run(_FIRST_USE, RAWATTN_CACHE_DIR=folder)
    except Exception as error:  # its figures are shown without values
        return [
            Figure(name, None, "s", _MOST_SECONDS, True, measure.describe(error)) for name in names
        ]
    return [
        Figure(name, seconds, "s", _MOST_SECONDS, True, "kernel cache empty")
        for name, seconds in zip(names, found, strict=True)
    ]


def masks(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Milliseconds of making the masks of the suite, which is done once for many calls."""
    return [
        _made(case, dtype)
        for case in score_cases.cases()
        if not case.backward and isinstance(case.feature, (Tiles, Documents, TopK))
    ]


def _made(case: Case, dtype: str) -> Figure:
    name = f"making the mask of {case.name}"
    try:
        arrays = case.feature.arrays(case, dtype)
        make = functools.partial(case.feature.options, case, arrays)
        return Figure(name, 1e3 * time_call(make).seconds, "ms")
    except Exception as error:  # the other figures are still shown
        return Figure(name, None, "ms", of=measure.describe(error))
