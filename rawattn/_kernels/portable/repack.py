"""Host twin of kernels_cu/portable/repack.cu: copies of arrays with rows that begin at multiples of 16 bytes."""

from __future__ import annotations

from rawattn._compile.compiler import Source
from rawattn._kernels import source as _source
from rawattn._kernels.source import round_up

ENTRY = "rawattn_repack"
THREADS = 256


def source(headdim: int, copy_bytes: int) -> Source:
    """copy_bytes: the widest access that the array's rows allow."""
    constants = {"kHeadDim": headdim, "kCopyBytes": copy_bytes, "kThreads": THREADS}
    return Source(
        entry=ENTRY,
        text=_source.text("float16", constants, "portable/repack.cu"),
        summary=f"portable repack 16bit D={headdim} {copy_bytes}B",
    )


def strides(batch: int, rows: int, nheads: int, headdim: int) -> tuple[int, int, int, int]:
    """Of a copy, in bytes: (batch, row, head, column)."""
    head = 2 * round_up(headdim, 8)
    return (head * nheads * rows, head * nheads, head, 2)


def blocks(rows: int, wave: int = 32) -> int:
    """rows: of all sequences."""
    return -(-rows // (THREADS // wave))
