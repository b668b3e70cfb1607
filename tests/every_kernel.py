"""Compile every kernel for every architecture, and every path through a kernel for one architecture, without a GPU.

    python -m tests.every_kernel

This compiles a small subset of the variants of `rawattn compile --all-variants`. Together with what tests/test_sm90_gate.py
compiles in the same run of CI, the subset covers each kernel on each architecture. It also covers, at least once, each element
type of a kernel and each word of the variants' summaries (options, access widths) except tile sizes and head dims. .ci/nightly
compiles the other variants.
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

HOPPER = "sm_90a"
ARCHITECTURES = ("sm_80", "sm_89", HOPPER, "sm_100", "sm_120")
_TYPES = {"float", "float16", "bfloat16", "float32", "to"}
# Summary words that only size a path: tile sizes, the number of waves or stages of a tile, and head dims.
_COUNT = re.compile(r"(waves|stages)=|D=|Dv=|\d+x\d+$")

Job = tuple[Source, str]


def traits(job: Job) -> Iterator[Hashable]:
    """Yield what a job covers: kernel and architecture, element types, and the words of the summary that are no sizes."""
    source, arch = job
    words = source.summary.split()
    kernel = words[0], source.entry
    yield kernel, arch
    yield kernel, *(word for word in words if word in _TYPES)
    yield from ((kernel, word) for word in words if word not in _TYPES and not _COUNT.match(word))


def few() -> list[Job]:
    """Return the jobs to compile."""
    # Late, since it makes all variants of Hopper's forward, which `compile_all` does not need.
    from tests import test_sm90_gate

    gated = {trait for source in test_sm90_gate.curated() for trait in traits((source, HOPPER))}
    every = [
        (source, arch) for arch in ARCHITECTURES for source in common_variants(arch, every=True)
    ]
    # Of several jobs that cover the same, `mark` takes the first: the cheapest one.
    every.sort(key=_effort)
    marked = exhaustive.mark(every, lambda job: set(traits(job)) - gated)
    return [job for job, chosen in zip(every, marked, strict=True) if chosen is job]


def _effort(job: Job) -> tuple[int, int]:
    """A rough cost of compiling a variant: the number of words of its summary, then its largest head dim."""
    words = job[0].summary.split()
    headdims = [int(x) for word in words if word.startswith("D=") for x in word[2:].split(",")]
    return len(words), max(headdims, default=0)


def compile_one(source: Source, arch: str) -> str:
    """Compile one variant; return a line about its registers, spills and compile time."""
    meta = compiler.compile_source(source, arch).meta
    return f"{meta['registers']} registers, {meta['spills']} bytes spilled, {meta['seconds']:.1f} s"


def main() -> int:
    """Return 1 if any variant did not compile."""
    return 1 if compile_all(few()) else 0


def compile_all(jobs: Sequence[Job]) -> int:
    """Compile all jobs; return how many failed."""
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
