"""Host twin of kernels_cu/portable/ragged_setup.cuh: the setup of a ragged call, in one launch before all others.

Lengths on the host travel in the launch's parameters. So nothing waits for a copy, no host memory must stay as it is, and a
captured CUDA graph holds the values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rawattn._compile.compiler import Source
from rawattn._kernels import helper_params, structs
from rawattn._kernels.portable import fill_padding
from rawattn._kernels.source import source as _source
from rawattn._kernels.steps import Step, SubTask
from rawattn._kernels.structs import Struct

THREADS = 256
SHARED_BYTES = 8 * THREADS
MOST = 4 * helper_params.WORDS_A_LAUNCH  # bytes of integers that a launch carries

# Offsets in the parameters of a launch that carries integers: the address to write them to, their count, and the integers.
TO, COUNT, WORDS = (
    structs.offset(helper_params.CARRYING_SETUP, name) for name in ("to", "count", "words")
)
assert TO % 8 == COUNT % 8 == WORDS % 8 == 0, "words of 8 bytes are copied as one"


@functools.cache
def source() -> Source:
    """The kernel for lengths that are all in the GPU's memory."""
    entry, file = "rawattn_ragged_setup", "portable/ragged_setup.cu"
    return _source(entry, file, "portable ragged_setup", helper_params.SETUP)


@functools.cache
def carrying_source() -> Source:
    """The kernel whose parameters carry lengths of the host."""
    entry, file = "rawattn_carrying_setup", "portable/carrying_setup.cu"
    return _source(entry, file, "portable carrying_setup", helper_params.CARRYING_SETUP)


def schedule_blocks(batch: int) -> int:
    """Blocks that write one order of the sequences."""
    return -(-batch // THREADS)


class Fields(NamedTuple):
    """A `helper_params.SETUP` in a struct: its fields by path, and how many blocks it is for."""

    values: dict[str, Any]
    patches: tuple[tuple[int, str], ...]
    fills: tuple[tuple[int, str], ...]
    blocks: int


def fields(
    struct: Struct, path: str, batch: int, schedules: Sequence[SubTask], paddings: Sequence[SubTask]
) -> Fields:
    """The setup of these tasks. path: of the SETUP in `struct`, with a dot behind it; "" where it is the whole struct."""
    of_order = schedule_blocks(batch)
    of_padding = max(map(fill_padding.blocks, paddings), default=0)
    values: dict[str, Any] = {
        f"{path}schedules": len(schedules),
        f"{path}schedule_blocks": of_order,
        f"{path}paddings": len(paddings),
        f"{path}padding_blocks": of_padding,
    }
    tasks = [(f"{path}schedule{n}", task) for n, task in enumerate(schedules)]
    tasks += [(f"{path}padding{n}", task) for n, task in enumerate(paddings)]
    patches: list[tuple[int, str]] = []
    fills: list[tuple[int, str]] = []
    for at, task in tasks:
        values |= task.prefixed(at)
        patches += task.patches(struct, at)
        fills += task.filled(struct, at)
    blocks = len(schedules) * of_order + len(paddings) * of_padding
    return Fields(values, tuple(patches), tuple(fills), blocks)


def step(
    batch: int, schedules: Sequence[SubTask], paddings: Sequence[SubTask], *, carrying: bool = False
) -> Step:
    """The setup launch. carrying: its parameters have room for integers of the host (`TO`, `COUNT`, `WORDS`), too."""
    struct = helper_params.CARRYING_SETUP if carrying else helper_params.SETUP
    found = fields(struct, "setup." if carrying else "", batch, schedules, paddings)
    return Step(
        source=carrying_source() if carrying else source(),
        blocks=max(found.blocks, 1) if carrying else found.blocks,
        threads=THREADS,
        params=structs.fill(struct, found.values),
        patches=found.patches,
        fills=found.fills,
        shared_bytes=SHARED_BYTES,
    )
