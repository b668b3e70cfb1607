"""`rawattn bench`: measures speed on this GPU, beside the peers that are installed."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rawattn._bench import cases, grids, host_calls, host_suite, measure, render, suites
from rawattn._bench.report import Figure, Report
from rawattn._bench.timing import BURST_SECONDS, REPEATS
from rawattn._call import outputs
from rawattn._cli import arguments
from rawattn._console.progress import Progress
from rawattn._runtime.devices import why_no_gpu

_QUICK_REPEATS = 5
_QUICK_TURNS = 4
_BUDGET = 120.0
# Suites that are measured as a whole, and what they do not take; nor does the suite of host times.
_WHOLE = tuple(name for name, suite in suites.SUITES.items() if suite.listed)
_NOT_OF_WHOLE = ("repeats", "burst")
_NOT_OF_HOST = ("peers", "burst")
_NO_PLOT = "--plot: the suite host has no plot; --markdown and --json write its table"
_NO_MATPLOTLIB = 'a plot needs matplotlib: pip install "rawattn[bench]"'


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "bench",
        description="Measure rawattn on this GPU beside the peers that are installed: "
        + ", ".join(f"{name} (from {module})" for name, module in grids.MODULES.items())
        + ".",
        epilog="Suites. "
        + " ".join(f"{name}: {s.summary}." for name, s in suites.SUITES.items())
        + f" Not taken by {', '.join(_WHOLE)}: {_flags(_NOT_OF_WHOLE)}. Not taken by host: {_flags(_NOT_OF_HOST)}.",
    )
    parser.add_argument("--suite", choices=suites.SUITES, default="forward")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer repeats")
    parser.add_argument(
        "--filter",
        metavar="WORDS",
        default="",
        help='only the cases whose names have all these words, as in "dense D128 causal"; '
        f"or a figure alone, those that the suite has of {', '.join(_figure_names())}; the suites "
        f"{', '.join(_WHOLE)} are measured as a whole",
    )
    parser.add_argument(
        "--peers",
        type=_peers,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(grids.PEERS)}; none: rawattn alone",
    )
    parser.add_argument(
        "--repeats",
        type=arguments.count,
        metavar="N",
        help=f"bursts of each contender on a case (default {REPEATS}, quick {_QUICK_REPEATS}); of the suite "
        f"host turns of each call (default {host_suite.TURNS}, quick {_QUICK_TURNS})",
    )
    parser.add_argument(
        "--burst",
        type=duration,
        metavar="SECONDS",
        help=f"length of a burst (default {BURST_SECONDS:g}, in which all share one clock; in 0.3 or more "
        "each reaches the clock of its own power, as calls do that follow each other for long)",
    )
    parser.add_argument(
        "--budget",
        type=arguments.seconds,
        metavar="SECONDS",
        help=f"once spent, what remains runs without peers (default {_BUDGET:.0f})",
    )
    parser.add_argument("--list", action="store_true", help="list the cases; needs no GPU")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="JSON",
        help="show, write and plot what an earlier --json holds; needs no GPU",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything measured")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the table")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", help="write bars as PNG, SVG or PDF (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or load a report, then show and write it; status 1 if there is nothing to show."""
    suite = suites.SUITES[args.suite]
    chosen = cases.select(suite.cases(args.quick), args.filter)
    calls = host_suite.select(args.filter) if suite.host else []
    extras = [name for name in suite.figures if _wants(args, name)]
    try:
        if args.source is None:
            _check_options(args)
        if args.source is None and not (calls or chosen or extras):
            if suite.listed:
                raise ValueError(
                    f"--filter: got {args.filter!r}, but the suite {args.suite} is measured as a whole; leave it out"
                )
            raise ValueError(
                f"--filter: no case has the words {args.filter!r}; --list without it shows the names"
            )
        if args.list:
            names = [case.name for case in chosen] + [call.name for call in calls]
            print("\n".join(names + (list(suite.listed) or extras)))
            return 0
        _check_outputs(args)
        if args.source is not None:
            report = _load(args.source)
            if args.plot is not None and report.host:
                raise ValueError(_NO_PLOT)
        elif calls:
            report = _measure_host(args, calls)
            report.notes += _unused(args)
        else:
            report = _measure(args, chosen, extras)
            report.notes += _unused(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"rawattn bench: {error}", file=sys.stderr)
        return 1
    # Files are written first, so that a closed pipe or a missing matplotlib loses no measurement.
    if args.json is not None:
        report.save(args.json)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(render.markdown(report), encoding="utf-8")
    print(render.text(report))
    if args.plot is not None:
        try:
            render.plot(report, args.plot)
        except ImportError:
            print(f"rawattn bench: {_NO_MATPLOTLIB}", file=sys.stderr)
            return 1
    return 0


def _figure_names() -> list[str]:
    return list(dict.fromkeys(n for s in suites.SUITES.values() if not s.listed for n in s.figures))


def _flags(options: Sequence[str]) -> str:
    return ", ".join(f"--{option}" for option in options)


def _check_options(args: argparse.Namespace) -> None:
    """Raises for an option that would change what is measured, but does not in this suite."""
    suite = suites.SUITES[args.suite]
    for option in _NOT_OF_WHOLE if suite.listed else _NOT_OF_HOST if suite.host else ():
        if getattr(args, option) is not None:
            raise ValueError(f"--{option}: the suite {args.suite} does not take it; leave it out")
    if suite.listed and args.dtype == "float32":
        raise ValueError(
            f"--dtype: got float32, but the suite {args.suite} counts elements of 16 bits; "
            "expected bfloat16 or float16"
        )
    if args.peers and not set(args.peers) & {*(measured := _measured(args.suite))}:
        raise ValueError(
            f"--peers: got {', '.join(args.peers)}, but beside the suite {args.suite} "
            f"{', '.join(measured)} are measured; name one of these, or none"
        )


def _measured(suite: str) -> list[str]:
    """The peers that are measured beside a suite."""
    return [c.name for c in suites.contenders(suite) if not c.ours]


def _unused(args: argparse.Namespace) -> list[str]:
    """Notes on options that change nothing in this suite."""
    suite, found = suites.SUITES[args.suite], []
    if suite.listed and args.quick:
        found.append("--quick changes nothing: the suite is measured as a whole")
    if (suite.listed or suite.host) and args.budget is not None:
        found.append("--budget changes nothing: the suite is measured as a whole")
    if others := sorted({*(args.peers or ())} - {*_measured(args.suite)}):
        found.append(f"--peers: {', '.join(others)}: not measured beside this suite")
    return found


def _load(path: Path) -> Report:
    expected = "expected a file that --json has written"
    try:
        return Report.load(path)
    except OSError as error:
        raise OSError(f"--from {path}: {error.strerror}; {expected}") from None
    except ValueError as error:
        raise ValueError(f"--from {error}; {expected}") from None


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises if a file cannot be written, before anything is measured."""
    for option in ("json", "markdown", "plot"):
        if (path := getattr(args, option)) is not None:
            outputs.check(f"--{option}", path)
    if args.plot is not None:
        if args.source is None and suites.SUITES[args.suite].host:
            raise ValueError(_NO_PLOT)
        outputs.check_ending("--plot", args.plot, render.PLOT_ENDINGS)
        if args.source is None and importlib.util.find_spec("matplotlib") is None:
            raise ImportError(_NO_MATPLOTLIB)


def _measure_host(args: argparse.Namespace, calls: list[host_calls.HostCall]) -> Report:
    require_gpu()
    turns = args.repeats or (_QUICK_TURNS if args.quick else host_suite.TURNS)
    with Progress(len(calls)) as progress:
        return host_suite.run(calls, args.dtype, turns, progress.step)


def _measure(args: argparse.Namespace, chosen: list[cases.Case], extras: list[str]) -> Report:
    require_gpu()
    started = time.monotonic()
    names = grids.PEERS if args.peers is None else args.peers
    wanted = [c for c in suites.contenders(args.suite) if c.ours or c.name in names]
    suite = suites.SUITES[args.suite]
    quick = args.quick and not suite.listed
    repeats = args.repeats or (_QUICK_REPEATS if quick else REPEATS)
    budget = _BUDGET if args.budget is None else args.budget
    options = measure.Options(args.dtype, repeats, budget, args.burst or BURST_SECONDS)
    with Progress(len(chosen) + (len(suite.listed) or len(extras))) as progress:
        first = []
        for name in [name for name in extras if name in suite.alone]:
            first.append(_figures(suite, name, args.dtype, [], progress.step))
        report = measure.run(args.suite, chosen, wanted, options, progress.step)
        if suite.note and (chosen or not suite.cases(args.quick)):
            report.notes.append(suite.note)
        found = []
        for name in [name for name in extras if name not in suite.alone]:
            peers = report.peers
            if peers and not suite.listed and time.monotonic() - started > budget:
                peers = []
                report.notes.append(f"{name}: without peers, as the budget was spent")
            found.append(_figures(suite, name, args.dtype, peers, progress.step))
        for figures, notes in (*found, *first):
            report.figures += figures
            report.notes += notes
    return report


def _figures(
    suite: suites.Suite, name: str, dtype: str, peers: Sequence[str], step: Callable[[str], None]
) -> tuple[list[Figure], list[str]]:
    """A suite's figures of one name, or the note that says why there are none: the table is still shown."""
    found: list[Figure] = []
    notes: list[str] = []
    try:
        found = suite.figures[name](dtype, peers, *([step] if suite.listed else []))
    except Exception as error:
        notes = [f"{name} n/a: {measure.describe(error)}"]
    if not suite.listed:
        step(name)
    return found, notes


def _wants(args: argparse.Namespace, figure: str) -> bool:
    if args.filter:
        return bool(args.filter == figure)
    return not (args.quick and figure in ("compile", "dtypes"))


def require_gpu() -> None:
    why = why_no_gpu()
    if why is not None:
        raise RuntimeError(f"bench measures GPU kernels, and there is no usable GPU: {why}")


def duration(text: str) -> float:
    """The length of a burst in seconds, for argparse."""
    if not 0 < (value := arguments.number(text)) <= 10:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds, above 0 and up to 10")
    return value


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(name.strip() for name in text.split(","))
    if unknown := set(names) - set(grids.PEERS):
        raise argparse.ArgumentTypeError(
            f"got {', '.join(sorted(unknown)) or repr(text)}; accepted are {', '.join(grids.PEERS)}, or none"
        )
    return names
