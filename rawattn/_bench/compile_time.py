"""Compile and load time: the first calls of a process."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rawattn._bench import child
from rawattn._bench.report import Figure

_PROCESSES = 5  # that find compiled kernels

# First calls of two kernel variants. The first one includes what a process does once.
_FIRST_CALLS = """
import json, time, cupy, rawattn
seconds = []
for headdim in (64, 128):
    q = cupy.zeros((1, 1024, 16, headdim), cupy.float16)
    cupy.cuda.runtime.deviceSynchronize()
    started = time.perf_counter()
    rawattn.attention(q, q, q, causal=True)
    cupy.cuda.runtime.deviceSynchronize()
    seconds.append(time.perf_counter() - started)
print(json.dumps(seconds))
"""


def figures(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Times of first calls, in a process with an empty kernel cache and, as medians, in the next processes."""
    with tempfile.TemporaryDirectory(prefix="rawattn-bench-") as folder:
        # Python's bytecode is cached too, wherever the package lies, since an installed package has its bytecode.
        environment = {
            "RAWATTN_CACHE_DIR": folder,
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        cold = child.run(_FIRST_CALLS, **environment)
        written = _cubins(folder)
        loaded = [
            statistics.median(seconds)
            for seconds in zip(
                *(child.run(_FIRST_CALLS, **environment) for _ in range(_PROCESSES)), strict=True
            )
        ]
        rebuilt = _cubins(folder) - written
    return [
        Figure("cold compile: first call, first variant of a process", cold[0], "s"),
        Figure("cold compile: first call, another variant", cold[1], "s"),
        Figure("disk cache: first call, first variant of a later process", 1e3 * loaded[0], "ms"),
        Figure("disk cache: first call, another variant", 1e3 * loaded[1], "ms"),
        Figure("kernels that later processes compiled again", len(rebuilt), ""),
    ]


def _cubins(folder: str) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*.cubin")}
