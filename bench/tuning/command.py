"""The command line of bench/tune.py."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.tuning import candidates, racing, record, searching, tables
from bench.tuning.candidates import label
from bench.tuning.kernels import KERNELS, Kernel
from rawattn._bench import peers
from rawattn._bench.timing import BURST_SECONDS
from rawattn._call import outputs
from rawattn._cli.bench import duration, require_gpu
from rawattn._compile import compiler
from rawattn._kernels import tile_tables
from rawattn._kernels.sm90 import forward as sm90_forward
from rawattn._kernels.target import SHARED_LIMIT
from rawattn._runtime.devices import gpu_available

_NOTES = Path(__file__).resolve().parents[2] / "docs" / "notes"
_PEERS = ("cuDNN", "FA2", "FA4")


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    result = argparse.ArgumentParser(
        prog="bench/tune.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Searches the tiles of one kernel: candidates that fit are compiled, those that do not spill or serialise\n"
        "are compared with the present choice (result and time, all in turns, the slower half leaving after each\n"
        "round), and the fastest can be written into rawattn/_kernels/tiles/.",
        epilog="A search on a machine whose files do not last: --json there, then --from here with --note and --write.\n\n"
        "To look at one candidate with a profiler; nothing is timed, and kernels are named rawattn_*:\n"
        "  ncu -k regex:rawattn_sm90 --launch-skip 1 --set full \\\n"
        '    python bench/tune.py sm90_forward --headdim 128 --only tile_k=128,consumers=2 --filter "S4096 causal" --profile',
    )
    add = result.add_argument
    add("kernel", nargs="?", choices=KERNELS, help="the kernel; needed unless --from is given")
    add("--headdim", nargs="+", type=_headdim, default=(64, 128, 256), metavar="D")
    add("--tables", nargs="+", metavar="NAME", help="of the kernel's; default: those of --dtype")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add(
        "--only",
        type=_only,
        metavar="FIELD=N,...",
        help="candidates with these fields; with --profile the one most like the present choice",
    )
    add("--filter", metavar="WORDS", default="", help="only cases whose names have all these words")
    add(
        "--budget",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="of timing for each row; the round under way is finished (default %(default).0f)",
    )
    add(
        "--burst",
        type=duration,
        default=BURST_SECONDS,
        metavar="SECONDS",
        help="length of a turn (default %(default)g; 0.3 where power decides, as in long calls)",
    )
    add(
        "--spills",
        type=int,
        default=0,
        metavar="BYTES",
        help="that a portable candidate may spill beyond the present choice (default 0)",
    )
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compiling processes")
    add("--peers", type=_peers, default=_PEERS, metavar="NAMES", help="of cuDNN,FA2,FA4, or none")
    add("--arch", choices=SHARED_LIMIT, help="for --compile-only; default: this GPU's, or sm_90a")
    add("--compile-only", action="store_true", help="list candidates and verdicts; needs no GPU")
    add("--profile", action="store_true", help="run one candidate for a profiler")
    add("--from", dest="source", type=Path, metavar="JSON", help="take searches from a file")
    add("--json", type=Path, metavar="PATH", help="write every figure, after each search")
    add("--note", action="store_true", help="append one line a candidate to docs/notes")
    add("--write", action="store_true", help="put winners into rawattn/_kernels/tiles")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 1, after one line on stderr, if something is missing or refused."""
    args = parser().parse_args(arguments)
    try:
        return _run(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"bench/tune.py: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.source is not None:
        for search in record.load(args.source):
            print(record.timed_table(search))
            _keep(search, args)
        return 0
    if args.kernel is None:
        raise ValueError("name a kernel, or a file after --from")
    kernel = KERNELS[args.kernel]
    if args.json is not None:
        outputs.check("--json", args.json)
    if not args.compile_only:
        require_gpu()
    arch = _arch(args, kernel)
    options = searching.Options(
        dtype=args.dtype,
        only=args.only,
        words=args.filter,
        spills=args.spills,
        jobs=args.jobs,
        budget=args.budget,
        burst_seconds=args.burst,
        peers=[peer for peer in peers.peers(kernel.verb) if peer.name in args.peers],
    )
    _check_fields(kernel, args.only or {})
    done: list[record.Search] = []
    for headdim in args.headdim:
        for table in _tables(args, kernel):
            where = searching.searched_row(kernel, table, headdim, arch, args.dtype)
            if args.profile:
                _profile(where, options)
                continue
            search, rows = searching.compile_candidates(where, options)
            if args.compile_only:
                print(record.compiled_table(search))
                continue
            print(f"{search.name}: {len(rows)} candidates; {record.refusals(search)}")
            searching.measure(where, search, rows, options)
            done.append(search)
            # Write after each search, so that results survive if the machine is lost during a later one.
            if args.json is not None:
                record.save(done, args.json)
            print(record.timed_table(search))
            _keep(search, args)
    return 0


def _keep(search: record.Search, args: argparse.Namespace) -> None:
    kernel = KERNELS[search.kernel]
    if args.note:
        with (_NOTES / kernel.note).open("a", encoding="utf-8") as page:
            page.write(record.note(search))
    if args.write:
        where = searching.searched_row(
            kernel, search.table, search.headdim, search.arch, search.dtype
        )
        print(tables.write(search, where, args.jobs))


def _profile(where: candidates.SearchedRow, options: searching.Options) -> None:
    rows, _ = candidates.generate(where, options.only or {})
    row = candidates.nearest(rows, options.only or {})
    cases = searching.chosen_cases(where, options)
    racing.profile(where, label(row.fields), row, cases, options.dtype)


def _arch(args: argparse.Namespace, kernel: Kernel) -> str:
    arch = args.arch if args.compile_only else None
    if arch is None:
        arch = compiler.device_arch(0) if gpu_available() else sm90_forward.ARCH
    if kernel.family == "sm90" and (arch != sm90_forward.ARCH or args.dtype == "float32"):
        raise ValueError(f"{kernel.name} is for {sm90_forward.ARCH} in 16 bits, not for {arch}")
    return str(arch)


def _tables(args: argparse.Namespace, kernel: Kernel) -> list[str]:
    there = kernel.tables(args.dtype)
    for name in args.tables or ():
        if name not in there:
            raise ValueError(f"--tables: got {name}; {args.dtype} has {', '.join(there)}")
    return list(args.tables or there)


def _check_fields(kernel: Kernel, only: dict[str, int]) -> None:
    fields = tile_tables.SCHEMAS[kernel.name].fields
    if unknown := sorted(set(only) - set(fields)):
        raise ValueError(f"--only: got {', '.join(unknown)}; fields are {', '.join(fields)}")


def _only(text: str) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text}, expected tile_k=128,stages=2") from error


def _headdim(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= tile_tables.LARGEST or int(text) % 16:
        raise argparse.ArgumentTypeError(f"got {text}, expected a multiple of 16 up to 256")
    return int(text)


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if unknown := set(names) - set(_PEERS):
        raise argparse.ArgumentTypeError(f"got {', '.join(sorted(unknown))}; {', '.join(_PEERS)}")
    return names
