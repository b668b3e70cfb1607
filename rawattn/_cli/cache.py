"""`rawattn cache`: list or clear the kernels on disk."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rawattn._compile import cache
from rawattn._console import table

_HEADER = ("kernel", "arch", "registers", "spills", "compiled in", "size", "age", "directory")


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    parser = subparsers.add_parser(
        "cache",
        description="List the compiled kernels on disk, or remove them. Each is a directory with "
        "the source, the cubin, the compiler's log and meta.json.",
        epilog=f"${cache.VARIABLE} names another directory.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--path", action="store_true", help="print the directory and nothing else")
    action.add_argument(
        "--clear", action="store_true", help="remove every compiled kernel, and nothing else"
    )


def run(args: argparse.Namespace) -> int:
    """List, clear or print the path."""
    try:
        if args.path:
            print(cache.directory())
        elif args.clear:
            print(f"{_kernels(cache.clear())} removed from {cache.directory()}")
        else:
            _list()
    except OSError as error:
        print(f"rawattn cache: {error}; RAWATTN_CACHE_DIR names the directory", file=sys.stderr)
        return 1
    return 0


def contents(entries: list[tuple[Path, cache.Entry | None]]) -> str:
    """The number of kernels, their size and their directory, as text."""
    nbytes = sum(_size(entry) for _, entry in entries if entry is not None)
    return f"{_kernels(len(entries))}, {table.size(nbytes)} in {cache.directory()}"


def _list() -> None:
    now = time.time()
    rows = []
    entries = cache.entries()
    for path, entry in entries:
        age = table.age(now - path.stat().st_mtime)
        if entry is None:
            rows.append(["(damaged: rebuilt when needed)", *"-----", age, path.name])
            continue
        meta = entry.meta
        rows.append(
            [
                meta["summary"],
                meta["arch"],
                str(meta.get("registers", "-")),
                table.size(meta["spills"]) if "spills" in meta else "-",
                f"{meta['seconds']:.2f} s",
                table.size(_size(entry)),
                age,
                path.name,
            ]
        )
    if rows:
        print(table.render(_HEADER, rows, left=2))
    print(contents(entries))


def _size(entry: cache.Entry) -> int:
    return sum(map(len, entry.files.values()))


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"
