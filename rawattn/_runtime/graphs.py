"""Memory that captured CUDA graphs use in their replays. It is held for as long as the process lives.

There is no notice when a graph is destroyed, so the memory is never freed. Memory from torch's allocator is not held here:
torch keeps it with the graph. Nor is that of a `Plan`, which owns it.
"""

from __future__ import annotations

import threading
from typing import Any

from rawattn._runtime import driver

_held: list[Any] = []

_CHUNK_BYTES = 64 << 10  # least size of an allocation, from which `zeros` takes pieces
_ALIGNMENT = 256  # bytes, of every piece
_lock = threading.Lock()
# By device: address and size in bytes of the unused rest of the last allocation.
_chunks: dict[int, tuple[int, int]] = {}


def keep_forever(*owners: Any) -> None:
    """Keeps owners of memory alive until the process ends."""
    _held.append(owners)


def zeros(nbytes: int, device: int) -> int:
    """The address of memory that is cleared at once, during a capture and not by the graph.

    Each replay leaves the memory zero, so none has to clear it: a memset node would add some 2 us to each replay. The memory
    does not come from a pool, whose free blocks may still be in use by work that is enqueued. `device` must be current.
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
    keep_forever(memory)
    return int(memory.ptr)
