"""The GPU that kernels are chosen and compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Bytes of shared memory that one block may use, by architecture (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"). Used where there is no device to ask.
SHARED_LIMIT = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_87": 166912,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_90a": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
}


# Bytes of an SM's shared memory that the system reserves for each block (the same guide, "Shared Memory").
_BLOCK_BYTES = 1024


def shared_limit_of(blocks: int, limit: int) -> int:
    """Bytes of shared memory that each of `blocks` blocks of an SM may use, where one block alone may use `limit`."""
    return (limit + _BLOCK_BYTES) // blocks - _BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU, or an architecture to compile for.

    arch: as the compiler names it, such as "sm_90a".
    shared_limit: bytes of shared memory that one block may use.
    multiprocessors: SMs of the device; 1 where kernels are only compiled.
    wave: threads of a warp, or wave.
    memory: bytes of the device's memory; None where kernels are only compiled.
    """

    arch: str
    shared_limit: int
    multiprocessors: int = 1
    wave: int = 32
    memory: int | None = None

    @property
    def early_launches(self) -> bool:
        """Whether a kernel may start before earlier ones of its stream are done (`Step.early`)."""
        number = re.fullmatch(r"sm_(\d+)[a-z]?", self.arch)
        return number is not None and int(number[1]) >= 90


def without_device(arch: str) -> Target:
    """The target for compiling kernels of an architecture without a GPU."""
    return Target(arch, SHARED_LIMIT[arch])
