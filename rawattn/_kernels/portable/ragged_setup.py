"""Host twin of kernels_cu/portable/ragged_setup.cuh: what a ragged call does before all else, in one launch.

A launch takes its parameters with it, and with them integers of the host: nothing waits, no memory of the host must stay as
it is, and a captured graph holds the values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.portable import fill_padding
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Part, Step

THREADS = 256
SHARED_BYTES = 8 * THREADS
MOST = 4 * helper_params.WORDS_A_LAUNCH  # bytes that a launch carries

# Where a launch that carries integers has their address, their count and themselves.
TO, COUNT, WORDS = (
    structs.offset(helper_params.CARRYING_SETUP, name) for name in ("to", "count", "words")
)
assert TO % 8 == COUNT % 8 == WORDS % 8 == 0, "words of 8 bytes are copied as one"


@functools.cache
def source() -> Source:
    """Of lengths that are all in memory."""
    entry, file = "rawattn_ragged_setup", "portable/ragged_setup.cu"
    return _source(entry, file, "portable ragged_setup", helper_params.SETUP)


@functools.cache
def carrying_source() -> Source:
    """Of a launch that brings lengths."""
    entry, file = "rawattn_carrying_setup", "portable/carrying_setup.cu"
    return _source(entry, file, "portable carrying_setup", helper_params.CARRYING_SETUP)


def schedule_blocks(batch: int) -> int:
    """That order the sequences once."""
    return -(-batch // THREADS)


def step(
    batch: int, schedules: Sequence[Part], paddings: Sequence[Part], *, carrying: bool = False
) -> Step:
    """carrying: it brings integers as well, for whose address, count and words there is room in its parameters."""
    struct = helper_params.CARRYING_SETUP if carrying else helper_params.SETUP
    prefix = "setup." if carrying else ""
    of_order, of_padding = schedule_blocks(batch), fill_padding.blocks(batch)
    values = {
        f"{prefix}schedules": len(schedules),
        f"{prefix}schedule_blocks": of_order,
        f"{prefix}paddings": len(paddings),
        f"{prefix}padding_blocks": of_padding,
    }
    patches = []
    named = [(f"schedule{n}", part) for n, part in enumerate(schedules)]
    named += [(f"padding{n}", part) for n, part in enumerate(paddings)]
    for name, part in named:
        values |= {f"{prefix}{name}.{path}": value for path, value in part.fields.items()}
        patches += [
            (structs.offset(struct, f"{prefix}{name}.{path}"), address)
            for path, address in part.addresses.items()
        ]
    blocks = len(schedules) * of_order + len(paddings) * of_padding
    return Step(
        source=carrying_source() if carrying else source(),
        blocks=max(blocks, 1) if carrying else blocks,
        threads=THREADS,
        params=structs.fill(struct, values),
        patches=tuple(patches),
        shared_bytes=SHARED_BYTES,
    )
