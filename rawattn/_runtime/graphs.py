"""What captured CUDA graphs need: memory that a replay uses, held for as long as the process lives.

Nobody tells when a graph dies. So this is for calls that are captured as they are: memory of torch's is torch's to keep, and
a `Plan` owns its own.
"""

from __future__ import annotations

import threading
from typing import Any

from rawattn._runtime import driver

_held: list[Any] = []

_CHUNK_BYTES = 64 << 10
_ALIGNMENT = 256
_lock = threading.Lock()
_chunks: dict[
    int, tuple[int, int]
] = {}  # by device: address and bytes of what is left of the last one


def hold(*owners: Any) -> None:
    """Keeps them for good."""
    _held.append(owners)


def zeros(nbytes: int, device: int) -> int:
    """The address of memory that is zero now, during a capture: no replay has to clear what each leaves as it found it.

    A node of the graph that clears it would take some 2 us of each replay. The memory is no pool's: what was given back to
    one may still be in use by what is enqueued. The current device must be `device`.
    """
    nbytes = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        address, left = _chunks.get(device, (0, 0))
        if left < nbytes:
            left = max(nbytes, _CHUNK_BYTES)
            address = _cleared(left)
        _chunks[device] = address + nbytes, left - nbytes
        return address


def _cleared(nbytes: int) -> int:
    import cupy

    with driver.outside_capture():
        memory = cupy.cuda.memory.Memory(nbytes)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.memsetAsync(memory.ptr, 0, nbytes, stream.ptr)
        stream.synchronize()
    hold(memory)
    return int(memory.ptr)
