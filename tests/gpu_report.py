"""reports/gpu.json: the record of the last full test run on a GPU.

CI has no GPU. Whoever changes a kernel, or a module of `rawattn/` that a kernel or an array passes
through, runs `.ci/gpu` once on a machine that has one and commits the record that this plugin writes.
CI then checks that it is a record of the source at hand, and that nothing failed:

    python -m tests.gpu_report --check
    python -m tests.gpu_report --pending "why there is no run yet"    # CI passes, loudly

A run is recorded when it is full: `pytest --exhaustive -m gpu`, or without the marker, all of `tests/`,
nothing else selected, left out or stopped. What is not marked `gpu` needs no GPU: CI and `.ci/nightly` run it.
The file:

    date, source               when it began; `source_hash()` at that moment
    device, driver, versions   what it ran on: driver, CUDA runtime and NVRTC, Python and packages
    tests, total               outcomes by file, and their sum
    failures, skips            node ids; {reason: how many}
    sanitizer                  {tool: {"runs": n, "findings": n}} of compute-sanitizer, null until
                               tests/sanitize.py enters it; kept while the source is the same
    pending                    only in a record that is known to be stale: the reason
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests import exhaustive

ROOT = Path(__file__).resolve().parents[1]
REPORT = Path("reports/gpu.json")
SOURCES = ("rawattn", "kernels_cu")
# Parts of SOURCES that no kernel and no array of a call passes through: the command line and the benchmarks.
UNCOVERED = (
    "rawattn/_cli/",
    "rawattn/_console/",
    "rawattn/_bench/",
    "rawattn/cli.py",
    "rawattn/__main__.py",
    "rawattn/py.typed",
)
COMPILED = {".pyc", ".pyo", ".so", ".o", ".pyd"}
PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax")
# The marker of tests that need a GPU. A run of `-m gpu` counts as full.
MARKER = "gpu"
# Options that select a subset of the tests.
SELECTING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")
# From best to worst. The outcome of a test is the worst outcome of its phases.
OUTCOMES = ("passed", "xfailed", "skipped", "failed")


def sources(root: Path = ROOT) -> list[str]:
    """Return the files of the kernels, and of the code that an array passes through on its way to a kernel."""
    names = (
        path.relative_to(root).as_posix()
        for top in SOURCES
        for path in (root / top).rglob("*")
        if path.is_file() and path.suffix not in COMPILED
    )
    return sorted(
        name
        for name in names
        if not name.startswith(UNCOVERED)
        and not any(part == "__pycache__" or part.startswith(".") for part in Path(name).parts)
    )


def source_hash(root: Path = ROOT) -> str:
    """sha256 over the paths and contents of `sources`."""
    digest = hashlib.sha256()
    for name in sources(root):
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def why_no_gpu() -> str | None:
    """Return None where CuPy can use a GPU, else the reason in one line."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() > 0:
            return None
        return "no GPU: CUDA sees no device"
    except Exception as error:  # without a GPU, CuPy and the driver raise many different exceptions
        return f"no GPU: {str(error).splitlines()[0]}"


class GpuReport:
    """pytest plugin: collects outcomes, writes the record when the session ends."""

    def __init__(self, config: pytest.Config, path: Path | None = None) -> None:
        self.config = config
        self.path = path or config.rootpath / REPORT
        self.began = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.source = source_hash(config.rootpath)
        self.outcomes: dict[str, str] = {}
        self.skips: Counter[str] = Counter()
        self.note = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        previous = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(previous, outcome, key=OUTCOMES.index)
        if outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.skips[str(reason).removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(self.config, "workerinput") or why_no_gpu():
            return
        if reason := self.why_partial(session, exitstatus):
            self.note = f"{REPORT} not written: {reason}"
            return
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.record(), indent=2) + "\n", "utf-8")
        self.note = f"{REPORT} written: commit it with the change"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.note:
            terminalreporter.section("GPU report")
            terminalreporter.line(self.note)

    def why_partial(self, session: pytest.Session, exitstatus: int) -> str | None:
        """Return None if the run included every test and reached its end, whether tests passed or not; else the reason."""
        config = self.config
        directory = config.invocation_params.dir
        named = {(directory / argument.split("::")[0]).resolve() for argument in config.args}
        if not named & {config.rootpath, config.rootpath / "tests"}:
            return "only a part of tests/ was named"
        wanted = [
            name for name in SELECTING if name != "markexpr" or config.option.markexpr != MARKER
        ]
        if used := [name for name in wanted if config.getoption(name, None)]:
            return f"tests were selected ({', '.join(used)})"
        if not config.getoption(exhaustive.OPTION):
            return f"the exhaustive cases were left out ({exhaustive.OPTION} runs them)"
        if session.shouldfail or session.shouldstop:
            return "the run was stopped early"
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return f"the run did not reach its end (exit status {int(exitstatus)})"
        return None

    def record(self) -> dict[str, Any]:
        by_file: dict[str, Counter[str]] = defaultdict(Counter)
        for nodeid, outcome in sorted(self.outcomes.items()):
            by_file[nodeid.split("::")[0]][outcome] += 1
        previous = read(self.path)
        return {
            "date": self.began,
            "source": self.source,
            **machine(),
            "tests": {name: count(counter) for name, counter in by_file.items()},
            "total": count(sum(by_file.values(), Counter())),
            "failures": sorted(n for n, outcome in self.outcomes.items() if outcome == "failed"),
            "skips": dict(self.skips.most_common()),
            "sanitizer": previous.get("sanitizer")
            if previous.get("source") == self.source
            else None,
        }


def machine() -> dict[str, Any]:
    """Return the GPU that the tests run on, and the versions of the driver, the CUDA libraries, Python and packages."""
    import cupy

    runtime = cupy.cuda.runtime
    device = runtime.getDeviceProperties(runtime.getDevice())
    try:
        module = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        module = ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", module)
    installed = {
        dist.name: dist.version for dist in metadata.distributions() if dist.name in PACKAGES
    }
    return {
        "device": {
            "name": device["name"].decode(),
            "compute_capability": f"{device['major']}.{device['minor']}",
            "memory_gib": round(device["totalGlobalMem"] / 2**30, 1),
            "count": runtime.getDeviceCount(),
        },
        "driver": {
            "version": version[0] if version else "unknown",
            "cuda": dotted(runtime.driverGetVersion()),
        },
        "versions": {
            "cuda_runtime": dotted(runtime.runtimeGetVersion()),
            "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
            "python": ".".join(map(str, sys.version_info[:3])),
            **dict(sorted(installed.items())),
        },
    }


def dotted(version: int) -> str:
    """Convert CUDA's version number to text: 13020 -> "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def count(outcomes: Counter[str]) -> dict[str, int]:
    """Count outcomes: passed, failed and skipped always, others only where there were any."""
    return {name: outcomes[name] for name in ("passed", "failed", "skipped")} | {
        name: n for name, n in outcomes.items() if name == "xfailed"
    }


def read(path: Path) -> dict[str, Any]:
    """Return the record, or an empty one if the file does not exist."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return record if isinstance(record, dict) else {}


def problem(root: Path) -> str | None:
    """Say what is wrong with the record for the source in `root`; None if nothing is."""
    record = read(root / REPORT)
    how = (
        "run `.ci/gpu` on a machine with a GPU and commit the file; if that has to wait: "
        'python -m tests.gpu_report --pending "reason"'
    )
    if "source" not in record:
        return f"{REPORT} is missing or damaged; {how}"
    if record["source"] != source_hash(root):
        return (
            f"{REPORT} is stale: {' or '.join(SOURCES)} (without command line and benches) changed "
            f"since the run of {record.get('date')}; {how}"
        )
    total = record.get("total", {})
    if total.get("failed", 1):
        return f"{REPORT} records failures: {', '.join(record.get('failures', []))}; {how}"
    if not total.get("passed"):
        return f"{REPORT} records no test that passed; {how}"
    for tool, runs in (record.get("sanitizer") or {}).items():
        if runs["findings"]:
            return f"{REPORT} records {runs['findings']} findings of compute-sanitizer {tool}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Check the record, or mark it as known to be stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report", description=main.__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="exit 1 unless the record is current")
    action.add_argument("--pending", metavar="REASON", help="let --check pass until the next run")
    args = parser.parse_args(arguments)
    path = ROOT / REPORT
    if args.pending is not None:
        if not args.pending.strip():
            parser.error("--pending: got an empty reason")
        path.parent.mkdir(exist_ok=True)
        record = {**read(path), "pending": args.pending}
        path.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        return 0
    if reason := read(path).get("pending"):
        print(
            f"WARNING: {REPORT} IS PENDING, NO GPU HAS RUN THIS SOURCE: {reason}", file=sys.stderr
        )
        return 0
    if fault := problem(ROOT):
        print(fault, file=sys.stderr)
        return 1
    record = read(path)
    print(f"{REPORT}: {record['total']} on {record['device']['name']}, {record['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
