"""Host twin of kernels_cu/portable/fill_padding.cu: zeros (and -inf) in rows that belong to no sequence."""

from __future__ import annotations

from rawattn._compile.compiler import Source

THREADS = 256
_BLOCKS = 1024  # enough to fill any GPU


def source() -> Source:
    return Source(
        entry="rawattn_fill_padding",
        text='#include "portable/fill_padding.cu"\n',
        summary="portable fill_padding",
    )


def parts(batch: int) -> int:
    """Blocks that share one gap between sequences."""
    return max(1, _BLOCKS // (batch + 1))


def blocks(batch: int) -> int:
    return (batch + 1) * parts(batch)
