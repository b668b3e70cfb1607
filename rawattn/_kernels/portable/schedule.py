"""Host twin of kernels_cu/portable/schedule.cu: the order of the sequences of a ragged batch."""

from __future__ import annotations

from rawattn._compile.compiler import Source

THREADS = 128
SHARED_BYTES = 8 * THREADS


def source() -> Source:
    return Source(
        entry="rawattn_schedule",
        text='#include "portable/schedule.cu"\n',
        summary="portable schedule",
    )


def blocks(batch: int) -> int:
    return -(-batch // THREADS)
