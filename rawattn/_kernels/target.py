"""The machine that kernels are chosen and compiled for."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Shared memory one block may use, by architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability"); used where there is no device to ask.
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


# What a block takes of a multiprocessor's shared memory beside its own, bytes (the same, "Shared Memory").
_BLOCK_BYTES = 1024


def shared_limit_of(blocks: int, limit: int) -> int:
    """Bytes that each of so many blocks of a multiprocessor may use, where one alone may use `limit`."""
    return (limit + _BLOCK_BYTES) // blocks - _BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Target:
    """arch: as the compiler names it, such as "sm_90a".

    shared_limit: bytes of shared memory that one block may use.
    multiprocessors: of the device; 1 where kernels are only compiled.
    wave: threads that run in step.
    memory: bytes of the device; None where kernels are only compiled.
    """

    arch: str
    shared_limit: int
    multiprocessors: int = 1
    wave: int = 32
    memory: int | None = None

    @property
    def early_launches(self) -> bool:
        """Whether kernels may come before those before them in the stream are done (`Step.early`)."""
        number = re.fullmatch(r"sm_(\d+)[a-z]?", self.arch)
        return number is not None and int(number[1]) >= 90


def without_device(arch: str) -> Target:
    """To compile for, on a machine that need not have one."""
    return Target(arch, SHARED_LIMIT[arch])
