"""Every kernel variant under compute-sanitizer, without pytest around it.

    python -m tests.sanitize                          # memcheck, racecheck, synccheck
    python -m tests.sanitize --tool memcheck

A first run without the tool compiles the kernels and checks their results. Findings are printed;
the counts are entered in reports/gpu.json when that is a record of the source at hand, so run
pytest first. Exit status 1 when there is a finding or a run did not reach its end.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests import gpu_report
from tests.frameworks import TightCuPy
from tests.gpu.test_api import BAD_INTEGERS, check_bad_integers
from tests.gpu.test_combine import test_cupy as check_combine
from tests.partials import FORMS, Form
from tests.sanitized_calls import (
    Step,
    append_calls,
    decoded_calls,
    gathered_calls,
    matrix,
    nan_calls,
    page_calls,
)

TOOLS = ("memcheck", "racecheck", "synccheck")
_OPTIONS = {
    # Pads allocations, so that an access just past the end of one does not land in the next.
    "memcheck": ["--padding", "256", "--report-api-errors", "no"],
    "racecheck": [],
    "synccheck": [],
}
_PARTS_OF_A_JOB = 4  # processes under a tool, one after the other: of few calls the one with a finding is soon found
_SUMMARY = r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)"
_DONE = "calls ran to their end"


def every_call() -> list[Callable[[], object]]:
    """Return all calls that run under the tools."""
    junk = [bad for bad in BAD_INTEGERS if bad.dtype == "int64" and bad.what == "everything"]
    ours = [*page_calls(), *append_calls(), *gathered_calls(), *decoded_calls(), *nan_calls()]

    def callable_of(call: Any) -> Callable[[], object]:
        if isinstance(call, Step):
            return call.run
        if isinstance(call, Form):
            return partial(check_combine, call)
        return call if isinstance(call, partial) else partial(check_bad_integers, call, TightCuPy())

    return [callable_of(call) for call in (*matrix(), *FORMS, *ours, *junk)]


def run_calls(part: int, parts: int) -> int:
    """Run every `parts`-th call, from number `part`; return how many ran."""
    import cupy

    # In a memory pool, an access outside an array would still hit allocated memory.
    cupy.cuda.set_allocator(None)
    mine = every_call()[part::parts]
    for call in mine:
        call()
    return len(mine)


def run_tool(tool: str | None, jobs: int) -> dict[str, int] | None:
    """Run all calls in `jobs` processes at once; return the counts of calls and findings.

    None if a process did not reach its end. Other output of the processes is printed.
    """
    started = time.perf_counter()
    parts = jobs if tool is None else _PARTS_OF_A_JOB * jobs
    with ThreadPoolExecutor(jobs) as pool:
        counts = list(pool.map(lambda part: _run_part(tool, part, parts), range(parts)))
    for part, count in enumerate(counts):
        if count is not None and count[1] > 0:
            print(f"{tool}: {count[1]} findings in --part {part}/{parts}", flush=True)
    seconds = time.perf_counter() - started
    ended = [count for count in counts if count is not None]
    calls, findings = (sum(column) for column in zip(*ended, strict=True)) if ended else (0, 0)
    broken = f", {parts - len(ended)} of {parts} processes BROKE OFF" if len(ended) < parts else ""
    name = tool or "without a tool"
    print(f"{name}: {calls} calls, {findings} findings, {seconds:.0f} s{broken}", flush=True)
    return None if broken else {"runs": calls, "findings": findings}


def _run_part(tool: str | None, part: int, parts: int) -> tuple[int, int] | None:
    command = [sys.executable, "-m", "tests.sanitize", "--part", f"{part}/{parts}"]
    if tool is not None:
        command = [_sanitizer(), "--tool", tool, *_OPTIONS[tool], *command]
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=gpu_report.ROOT,
        check=False,
    )
    findings = re.findall(_SUMMARY, process.stdout)
    calls = re.findall(rf"(\d+) {_DONE}", process.stdout)
    expected = re.compile(rf"{_SUMMARY}|{_DONE}|^=+ COMPUTE-SANITIZER$")
    for line in process.stdout.splitlines():
        if line.strip() and not expected.search(line):
            print(line, flush=True)
    if len(calls) != 1 or (tool is not None and len(findings) != 1):
        return None
    return int(calls[0]), sum(map(int, findings))


def _sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if found is None:
        raise SystemExit("compute-sanitizer: not found; it is part of the CUDA toolkit")
    return found


def enter(results: dict[str, dict[str, int]]) -> None:
    path = gpu_report.ROOT / gpu_report.REPORT
    record = gpu_report.read(path)
    if record.get("source") != gpu_report.source_hash():
        print(f"not entered: {gpu_report.REPORT} is no record of this source; run pytest first")
        return
    record["sanitizer"] = {**(record.get("sanitizer") or {}), **results}
    path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(f"entered in {gpu_report.REPORT}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all of them")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once (%(default)s)")
    parser.add_argument(
        "--part", help="i/n: make every n-th call in this process, from the i-th on"
    )
    args = parser.parse_args(arguments)
    if args.part:
        part, parts = map(int, args.part.split("/"))
        print(f"{run_calls(part, parts)} {_DONE}")
        return 0
    if reason := gpu_report.why_no_gpu():
        print(reason, file=sys.stderr)
        return 1
    if run_tool(None, args.jobs) is None:
        return 1
    clean = True
    for tool in args.tool or TOOLS:
        result = run_tool(tool, args.jobs)
        if result is not None:
            enter({tool: result})  # at once, since a later tool may be cut off
        clean = clean and result is not None and result["findings"] == 0
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
