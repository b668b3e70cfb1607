"""A gate on a stream: work enqueued behind a closed gate cannot run before the gate opens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_HOLD = r"""
extern "C" __global__ void hold(const volatile int* open, long long limit) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (!*open && now - start < limit);
}
"""
# In nanoseconds. The gate opens by itself after this time, so that a call that waits for it does not hang; still_closed
# tells.
_LIMIT_NS = 5_000_000_000


@contextlib.contextmanager
def closed(stream: Any) -> Iterator[None]:
    """Blocks a CuPy stream until the end of the `with` block, which then waits until the stream is empty."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(memory, np.int32, 1)
    flag[0] = 0
    hold = cupy.RawKernel(_HOLD, "hold")
    hold.kernel  # noqa: B018  (compiled and loaded here, where no gate is closed yet)
    with stream:
        hold((1,), (1,), (np.uint64(memory.ptr), np.int64(_LIMIT_NS)))
    try:
        yield
    finally:
        flag[0] = 1
        stream.synchronize()


def still_closed(stream: Any) -> bool:
    """Whether the gate is still closed, called inside `closed`: False if something has waited for the stream."""
    return not stream.done


class _Torch:
    def __init__(self, stream: Any) -> None:
        self._handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def of_torch(stream: Any) -> Any:
    """torch's stream as a CuPy stream."""
    import cupy

    return cupy.cuda.Stream.from_external(_Torch(stream))
