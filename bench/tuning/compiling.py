"""Compile candidates and decide which of them are worth running."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.tuning import gate
from rawattn._compile import compiler
from rawattn._kernels.sm90 import forward_config as sm90_forward_config

SPILLS, SERIALISED, NOT_COMPILED = "spills", "serialised", "does not compile"
_TRAITS = {"packed", "ragged", "left", "right", "top-left", "scale-first", "without-dq"}


@dataclass(frozen=True, slots=True)
class Job:
    """One candidate, in all the variants that it must serve.

    allowed: the most bytes that each variant may spill; None for no limit.
    """

    label: str
    sources: tuple[compiler.Source, ...]
    arch: str
    allowed: tuple[int | None, ...]


@dataclass(slots=True)
class Verdict:
    """The result of compiling a candidate.

    registers and spills are the largest of any variant; by_variant has the spills of each. kind and reason say why the
    candidate is refused, empty if it is not.
    """

    registers: int = 0
    spills: int = 0
    by_variant: list[int] = field(default_factory=list)
    kind: str = ""
    reason: str = ""


def judge(job: Job) -> Verdict:
    """Compile one variant after the other until one is refused."""
    verdict = Verdict()
    tool = gate.disassembler()
    for source, allowed in zip(job.sources, job.allowed, strict=True):
        try:
            cubin = compiler.compile_source(source, job.arch)
        except compiler.CompileError as error:
            told = re.search(r"error: (.*)", str(error))
            verdict.kind = NOT_COMPILED
            verdict.reason = f"{NOT_COMPILED}: {told[1] if told else str(error).splitlines()[-1]}"
            return verdict
        spills = cubin.meta.get("spills", 0)
        verdict.registers = max(verdict.registers, cubin.meta.get("registers", 0))
        verdict.spills = max(verdict.spills, spills)
        verdict.by_variant.append(spills)
        if allowed is not None and spills > allowed:
            verdict.kind, verdict.reason = SPILLS, f"{SPILLS} {spills} bytes, {_variant(source)}"
        elif source.entry == sm90_forward_config.ENTRY and (fault := _fault(cubin, source, tool)):
            verdict.kind, verdict.reason = SERIALISED, f"{SERIALISED}: {fault}, {_variant(source)}"
        if verdict.kind:
            return verdict
    return verdict


def _variant(source: compiler.Source) -> str:
    """The words of the variant's summary that the candidate's label does not say."""
    return " ".join(word for word in source.summary.split() if word in _TRAITS) or "full"


def judge_all(
    jobs: Sequence[Job], processes: int, step: Callable[[str], None]
) -> dict[str, Verdict]:
    """Return verdicts by label; calls `step` with a line about each."""
    verdicts: dict[str, Verdict] = {}

    def note(job: Job, verdict: Verdict) -> None:
        verdicts[job.label] = verdict
        step(f"{job.label}: {verdict.reason or f'{verdict.registers} registers'}")

    if processes == 1 or len(jobs) < 2:
        for job in jobs:
            note(job, judge(job))
        return verdicts
    with _pool(min(processes, len(jobs))) as pool:
        futures = {pool.submit(judge, job): job for job in jobs}
        for future in as_completed(futures):
            note(futures[future], future.result())
    return verdicts


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    # spawn, because a fork of a process that uses CUDA or runs threads is not safe.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fault(cubin: compiler.Cubin, source: compiler.Source, tool: str | None) -> str:
    if codes := gate.serialised(cubin.log):
        return f"ptxas says {', '.join(codes)}"
    if tool is None:
        return ""
    tile_k = re.search(r"kTileK = (\d+)", source.text)
    assert tile_k is not None
    return gate.schedule_fault(cubin.image, int(tile_k[1]), tool)
