"""Numbers that are no rate of a case: host time a call, compile and load time."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rawattn._bench import machine
from rawattn._bench.cases import CUDNN, FA2
from rawattn._bench.report import Figure
from rawattn._bench.timing import Call

# First calls of two kernel variants: the first also pays for what a process does once.
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
_CALLS = 100  # few enough to fit the launch queue, so that the host never waits for the GPU
_REPEATS = 20


def host_times(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Host microseconds of a small cached call, ours and that of torch when it is a peer."""
    import cupy

    import rawattn

    q, k, v = (machine.random_array((1, 128, 16, 128), dtype) for _ in range(3))
    calls: dict[str, Call] = {"rawattn": lambda: rawattn.attention(q, k, v)}
    if {CUDNN, FA2} & set(peers) and importlib.util.find_spec("torch"):
        import torch

        tensors = [torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v)]
        calls["torch SDPA"] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors)
    return [
        Figure(
            f"{name}: host time a call, B1 S128 H16 D128",
            1e6 * host_time(call, cupy.cuda.runtime.deviceSynchronize),
            "us",
        )
        for name, call in calls.items()
    ]


def host_time(call: Call, synchronize: Call) -> float:
    """Median host seconds to enqueue a call, the GPU idle when each series begins."""
    samples = []
    for _ in range(_REPEATS + 1):
        synchronize()
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        samples.append((time.perf_counter() - started) / _CALLS)
    synchronize()
    return statistics.median(samples[1:])  # the first warmed up


def compile_times(dtype: str, peers: Sequence[str]) -> list[Figure]:
    """First calls in a process with an empty kernel cache, and in the next process."""
    with tempfile.TemporaryDirectory(prefix="rawattn-bench-") as folder:
        cold = _first_calls(folder)
        written = _cubins(folder)
        loaded = _first_calls(folder)
        rebuilt = _cubins(folder) - written
    return [
        Figure("cold compile: first call, first variant of a process", cold[0], "s"),
        Figure("cold compile: first call, another variant", cold[1], "s"),
        Figure("disk cache: first call, first variant of the next process", 1e3 * loaded[0], "ms"),
        Figure("disk cache: first call, another variant", 1e3 * loaded[1], "ms"),
        Figure("kernels that the next process compiled again", len(rebuilt), ""),
    ]


def _first_calls(cache: str) -> list[float]:
    # From source without an installation, the child must find the package that is running here.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    child = subprocess.run(
        [sys.executable, "-c", _FIRST_CALLS],
        env={**os.environ, "RAWATTN_CACHE_DIR": cache, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if child.returncode:
        reason = child.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"a first call in a new process failed: {reason}")
    seconds: list[float] = json.loads(child.stdout)
    return seconds


def _cubins(folder: str) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*.cubin")}
