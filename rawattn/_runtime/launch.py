"""What launches of every verb share: the streams they ran on, what graphs hold, how large a grid may be."""

from __future__ import annotations

from typing import Any

from rawattn._runtime.pack import Strides

_MAX_BLOCKS = 2**31 - 1

# What a CUDA graph replays must outlive the graph, and nobody tells us when a graph dies.
_held_by_graphs: list[Any] = []


class Launch:
    """A call with everything decided but the addresses. It remembers the streams on which its memory is in use."""

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}

    def streams(self) -> list[Any]:
        """Streams that may still be reading memory of this object."""
        return list(self._streams.values())

    def _use(self, stream: Any) -> bool:
        """Remembers `stream`; whether it is capturing a graph."""
        self._streams[stream.ptr] = stream
        return stream.ptr not in (0, 1) and bool(stream.is_capturing())  # the legacy stream cannot

    def _hold(self, *memory: Any) -> None:
        """Keeps this object and memory of one run for good: a graph under capture will replay it."""
        _held_by_graphs.append((self, *memory))


def grid(argument: str, blocks: int, tile: int) -> int:
    """`blocks`, when one launch holds as many."""
    if blocks > _MAX_BLOCKS:
        raise ValueError(
            f"{argument}: {blocks} tiles of {tile} rows over all heads and sequences, but one launch holds "
            f"{_MAX_BLOCKS}; split the batch"
        )
    return blocks


def all_strides(strides: Strides) -> int:
    """Of all arrays but on their last axis, OR-ed together."""
    together = 0
    for each in strides.values():
        for stride in each[:-1]:
            together |= stride
    return together
