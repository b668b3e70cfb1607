"""Compiles each kernel for each architecture, and each path through a kernel for one of them, without a GPU.

    python -m tests.every_kernel

What is compiled: few of the variants that `rawattn compile --all-variants` knows. Together they show each kernel
on each architecture, and each type of its elements and each word of the variants' summaries (option, width of accesses)
but tiles and head dims once. The rest of them is .ci/nightly's.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing

from rawattn._cli.workers import outcomes
from rawattn._compile import compiler
from rawattn._compile.compiler import Source
from rawattn._console.progress import Progress
from rawattn._kernels.variants import common_variants
from tests import exhaustive

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
_TYPES = {"float", "float16", "bfloat16", "float32", "to"}
# Not a path of its own: tiles, among how many one is shared out, and head dims.
_COUNT = re.compile(r"(waves|stages)=|D=|Dv=|\d+x\d+$")

Job = tuple[Source, str]


def traits(job: Job) -> Iterator[Hashable]:
    """What a variant shows on an architecture."""
    source, arch = job
    words = source.summary.split()
    kernel = words[0], source.entry
    yield kernel, arch
    yield kernel, *(word for word in words if word in _TYPES)
    yield from ((kernel, word) for word in words if word not in _TYPES and not _COUNT.match(word))


def few() -> list[Job]:
    """The variants that are compiled, each with its architecture."""
    every = [
        (source, arch) for arch in ARCHITECTURES for source in common_variants(arch, every=True)
    ]
    # Of several that show as much, the first one is taken.
    every.sort(key=_effort)
    marked = exhaustive.mark(every, traits)
    return [job for job, chosen in zip(every, marked, strict=True) if chosen is job]


def _effort(job: Job) -> tuple[int, int]:
    """What it takes to compile a variant, roughly: its options, and how much it unrolls."""
    words = job[0].summary.split()
    headdims = [int(x) for word in words if word.startswith("D=") for x in word[2:].split(",")]
    return len(words), max(headdims, default=0)


def compile_one(source: Source, arch: str) -> str:
    """What becomes of it, in words."""
    meta = compiler.compile_source(source, arch).meta
    return f"{meta['registers']} registers, {meta['spills']} bytes spilled, {meta['seconds']:.1f} s"


def main() -> int:
    """1 when one did not compile."""
    return 1 if compile_all(few()) else 0


def compile_all(jobs: Sequence[Job]) -> int:
    """How many did not compile."""
    failed = 0
    started = time.perf_counter()
    with (
        Progress(len(jobs)) as progress,
        closing(outcomes(compile_one, jobs, os.cpu_count() or 1)) as ended,
    ):
        for outcome in ended:
            source, arch = outcome.job
            failed += outcome.failed
            progress.step(f"{arch} {source.summary}: {outcome.text}")
    print(f"{len(jobs)} compiled in {time.perf_counter() - started:.1f} s, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
