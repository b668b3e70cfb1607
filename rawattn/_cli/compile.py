"""`rawattn compile`: fill the kernel cache ahead of time, for a GPU that need not be here."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rawattn._cli.progress import Progress
from rawattn._compile import cache, compiler


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "compile",
        description="Compile the common kernel variants into the cache. It needs no GPU. Variants "
        "that are not among them compile at their first call, as always.",
        epilog=f"${cache.VARIABLE} names another cache directory, of a container image for one.",
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        metavar="sm_XY",
        help="architectures, such as sm_80 (A100), sm_89 (RTX 4090), sm_90a (H100, H200); "
        "the default is that of each GPU here",
    )
    parser.add_argument(
        "--all-variants",
        action="store_true",
        help="every code path of every tile shape (for tests), not the common ones alone",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        metavar="N",
        default=os.cpu_count() or 1,
        help="processes that compile at once (default: one for each CPU, %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Compile what is missing; status 1 when something did not compile or could not be kept."""
    try:
        wanted = [
            (source, arch)
            for arch in args.arch or _archs_here()
            for source in _variants(arch, args.all_variants)
        ]
        missing = [job for job in wanted if compiler.find(*job) is None]
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"rawattn compile: {error}", file=sys.stderr)
        return 1
    started = time.perf_counter()
    errors = _compile_all(missing, args.jobs) if missing else []
    for failure in errors:
        print(f"rawattn compile: {failure}", file=sys.stderr)
    print(
        f"{len(missing) - len(errors)} compiled in {time.perf_counter() - started:.1f} s, "
        f"{len(wanted) - len(missing)} were there, {len(errors)} failed: {cache.directory()}"
    )
    return 1 if errors else 0


def _variants(arch: str, every: bool) -> list[compiler.Source]:
    from rawattn._kernels.target import SHARED_LIMIT
    from rawattn._kernels.variants import common_variants

    if arch not in SHARED_LIMIT:
        raise ValueError(f"--arch: got {arch}, expected one of {', '.join(SHARED_LIMIT)}")
    return common_variants(arch, every=every)


def _compile_all(jobs: list[tuple[compiler.Source, str]], processes: int) -> list[Exception]:
    errors: list[Exception] = []
    # spawn: a fork of a process that has used CUDA, or runs threads, is not safe.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool,
        Progress(len(jobs)) as progress,
    ):
        futures = {pool.submit(_compile_one, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                source, arch = futures[future]
                label = f"{arch} {source.summary}"
                try:
                    progress.step(f"{label}: {future.result()}")
                except (RuntimeError, OSError) as error:
                    errors.append(error)
                    progress.step(f"{label}: failed")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


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
        raise RuntimeError(f"no GPU here, so name one: --arch sm_90a ({error})") from error
    return sorted({compiler.device_arch(device) for device in range(count)})


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value
