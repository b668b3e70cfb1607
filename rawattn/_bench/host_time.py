"""Host time of a call: how long it blocks the caller's thread, whatever the GPU does meanwhile.

It includes everything between a call and its return, for a call like an earlier one: reading the arguments, finding the
prepared launch, allocating results, launching, and freeing the results when the caller drops them.

It excludes compiling and loading (the first batches only warm up), the GPU's time, waiting for the GPU, and waiting for room in
the launch queue: the queue is drained before each batch, and a batch is a small fraction of its capacity.

The same call may take longer in a process that has done much else: the memory pool splits and joins old blocks for each
result, and threads and code of other libraries share the CPU. So each library is measured twice: in a new process that does
nothing else, like a bare loop, and in this process, after its cases.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence

from rawattn._bench import child
from rawattn._bench.grids import CUDNN, FA2
from rawattn._bench.report import Figure
from rawattn._bench.timing import Call

SHAPE = (1, 128, 16, 128)  # so small that the GPU finishes before the host has made the next call
BATCH = 20  # calls of a batch; the launch queue holds about a thousand launches
_BATCHES = 100
_WARM_UP = 10


def seconds_a_call(call: Call, synchronize: Call) -> float:
    """Host seconds a call, the median over batches. Each batch begins with an idle GPU and an empty launch queue."""
    samples = []
    for _ in range(_WARM_UP + _BATCHES):
        synchronize()
        started = time.perf_counter()
        for _ in range(BATCH):
            call()
        samples.append((time.perf_counter() - started) / BATCH)
    synchronize()
    return statistics.median(samples[_WARM_UP:])


def figures(verb: str, dtype: str, peers: Sequence[str]) -> list[Figure]:
    """Microseconds of a small cached call, of ours and, if torch is a peer, of torch's. verb: forward or backward."""
    libraries = ["rawattn"]
    if {CUDNN, FA2} & set(peers) and importlib.util.find_spec("torch"):
        libraries.append("torch SDPA")
    found = []
    for library in libraries:
        name = f"{library}: host time a call, B1 S128 H16 D128"
        alone = child.run(_CHILD, library, verb, dtype)
        found.append(Figure(f"{name}, in a new process", 1e6 * alone, "us"))
        here = seconds_a_call(*_CALLS[library](verb, dtype))
        found.append(Figure(f"{name}, in this one", 1e6 * here, "us"))
    return found


# The child prints JSON on its last line, since a framework may print something before.
_CHILD = "import sys; from rawattn._bench import host_time; host_time.report(*sys.argv[1:])"


def report(library: str, verb: str, dtype: str) -> None:
    """Print the seconds of a call in this process."""
    print(json.dumps(seconds_a_call(*_CALLS[library](verb, dtype))))


def _rawattn(verb: str, dtype: str) -> tuple[Call, Call]:
    """The call, and a function that waits for it."""
    import cupy

    import rawattn
    from rawattn._bench.machine import random_array

    q, k, v, dout = (random_array(SHAPE, dtype) for _ in range(4))
    call = functools.partial(rawattn.attention, q, k, v)
    if verb == "backward":
        out, lse = rawattn.attention(q, k, v, return_lse=True)
        call = functools.partial(rawattn.attention_backward, dout, q, k, v, out, lse)
    return call, cupy.cuda.runtime.deviceSynchronize


def _torch(verb: str, dtype: str) -> tuple[Call, Call]:
    import torch

    options = {"dtype": getattr(torch, dtype), "device": "cuda"}
    q, k, v, dout = (torch.randn(SHAPE, **options).transpose(1, 2) for _ in range(4))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    call: Call = functools.partial(sdpa, q, k, v)
    if verb == "backward":
        qkv = [x.requires_grad_() for x in (q, k, v)]
        call = functools.partial(torch.autograd.grad, sdpa(*qkv), qkv, dout, retain_graph=True)
    return call, torch.cuda.synchronize


_CALLS: dict[str, Callable[[str, str], tuple[Call, Call]]] = {
    "rawattn": _rawattn,
    "torch SDPA": _torch,
}
