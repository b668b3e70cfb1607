"""`rawattn compile`: fills the kernel cache ahead of time, also for a GPU that this machine does not have."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from rawattn._cli import arguments
from rawattn._cli.workers import outcomes
from rawattn._compile import cache, compiler
from rawattn._console import table
from rawattn._console.progress import Progress
from rawattn._runtime.devices import why_no_gpu

_PURPOSES = ("inference", "training", "all")
# Architectures that a user may name, and those whose kernels calls load instead.
_LOADED_ARCH = {"sm_90": "sm_90a"}
_NOT_COMPILED = {
    "inference": "gradients (--for training), float32 (--for all), ",
    "training": "float32 (--for all), ",
    "all": "",
}
_NEVER_COMPILED = (
    "options that change scores (bias, mask, ALiBi, softcap, score functions, dropout, learned sinks), windows, top-left "
    "alignment, scales that are not positive, positions, padded batches, pages of float8, combine, most numbers of query heads "
    "for each key head, head dims other than 64, 96, 128, 192 and 256, and tiles that unusual batches and lengths take"
)


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "compile",
        description="Compile the common kernel variants into the cache. It needs no GPU. Variants "
        "that are not among them compile at their first call, as always.",
        epilog="A variant takes one to twenty seconds of one CPU; the progress says how many there are. "
        "Ctrl-C ends it at once, and keeps what is compiled. "
        f"${cache.VARIABLE} names another cache directory, of a container image for one.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        metavar="sm_XY",
        help="architectures, such as sm_80 (A100), sm_89 (RTX 4090), sm_90a (H100, H200; sm_90 "
        "means the same); the default is that of each GPU here",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--for",
        dest="purpose",
        choices=_PURPOSES,
        default="inference",
        help="inference (the default): forward kernels of float16 and bfloat16; training: those of "
        "the gradients too; all: float32 as well",
    )
    which.add_argument(
        "--all-variants",
        action="store_true",
        help="every code path of every tile shape (for tests), not the common ones alone",
    )
    parser.add_argument(
        "--jobs",
        type=arguments.count,
        metavar="N",
        default=os.cpu_count() or 1,
        help="processes that compile at once (default: one for each CPU, %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile what is missing; status 1 if something did not compile or could not be cached."""
    try:
        wanted = [
            (source, arch)
            for arch in _architectures(args.arch or _archs_here())
            for source in _variants(arch, args.purpose, args.all_variants)
        ]
        missing = [job for job in wanted if compiler.find(*job) is None]
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"rawattn compile: {error}", file=sys.stderr)
        return 1
    if missing and (why := cache.why_unwritable()) is not None:
        print(
            f"rawattn compile: the cache cannot be written ({why}); set {cache.VARIABLE} to a writable directory",
            file=sys.stderr,
        )
        return 1
    started = time.perf_counter()
    done: list[tuple[compiler.Source, str]] = []
    errors: list[str] = []
    try:
        _compile_all(missing, args.jobs, done, errors)
    except KeyboardInterrupt:
        print(
            f"rawattn compile: interrupted; {len(done)} of {len(missing)} are compiled and kept in "
            f"{cache.directory()}",
            file=sys.stderr,
        )
        raise
    for failure in errors:
        print(f"rawattn compile: {failure}", file=sys.stderr)
    lines = [
        f"{len(done)} compiled in {time.perf_counter() - started:.1f} s, "
        f"{len(wanted) - len(missing)} were there, {len(errors)} failed: {cache.directory()}"
    ]
    if not args.all_variants:
        lines.append(
            f"left out, so compiled at their first call: {_NOT_COMPILED[args.purpose]}{_NEVER_COMPILED}"
        )
    print(table.wrap("\n".join(lines)))
    return 1 if errors else 0


def _architectures(names: Sequence[str]) -> list[str]:
    """The architectures whose kernels calls load, each once."""
    for name in dict.fromkeys(names):
        if name in _LOADED_ARCH:
            print(
                f"rawattn compile: {name}: on such a GPU calls load kernels for {_LOADED_ARCH[name]}, which "
                "may use Hopper's matrix instructions, so those are compiled",
                file=sys.stderr,
            )
    return list(dict.fromkeys(_LOADED_ARCH.get(name, name) for name in names))


def _variants(arch: str, purpose: str, every: bool) -> list[compiler.Source]:
    from rawattn._kernels.target import SHARED_LIMIT
    from rawattn._kernels.variants import common_variants

    if arch not in SHARED_LIMIT:
        raise ValueError(f"--arch: got {arch}, expected one of {', '.join(SHARED_LIMIT)}")
    return common_variants(arch, every=every, purpose=purpose)


def _compile_all(
    jobs: Sequence[tuple[compiler.Source, str]],
    processes: int,
    done: list[tuple[compiler.Source, str]],
    errors: list[str],
) -> None:
    """Compiles the jobs. As each ends it is added to `done`, or its error to `errors`."""
    if not jobs:
        return
    with (
        Progress(len(jobs)) as progress,
        closing(outcomes(_compile_one, jobs, processes)) as ended,
    ):
        for outcome in ended:
            source, arch = outcome.job
            if outcome.said:
                progress.note(outcome.said)
            if outcome.failed:
                errors.append(outcome.text)
            else:
                done.append((source, arch))
            progress.step(
                f"{arch} {source.summary}: {'failed' if outcome.failed else outcome.text}"
            )


def _compile_one(source: compiler.Source, arch: str) -> str:
    cubin = compiler.compile_source(source, arch)
    if cubin.path is None:
        raise OSError(f"{source.summary} compiled, but the cache directory cannot be written")
    registers, spills = cubin.meta.get("registers", "?"), cubin.meta.get("spills", "?")
    return f"{registers} registers, {spills} bytes spilled, {cubin.meta['seconds']:.1f} s"


def _archs_here() -> list[str]:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:
        why = why_no_gpu() or error
        raise RuntimeError(f"no GPU here, so name one, as by --arch sm_90a: {why}") from error
    return sorted({compiler.device_arch(device) for device in range(count)})
