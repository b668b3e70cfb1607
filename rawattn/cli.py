"""The `rawattn` command. A sub-command is a module of rawattn/_cli, imported once it is invoked."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rawattn import __version__
from rawattn._console.pipes import ends_quietly

_INTERRUPTED = 128 + 2  # what a shell reports of a command that SIGINT ended

_COMMANDS = {
    "info": "devices, driver, versions of everything involved, kernel cache",
    "demo": "embed real sentences with a real model, attention by rawattn",
    "check": "compare the kernels of this machine with the reference",
    "bench": "measure speed against whatever peers are installed",
    "compile": "fill the kernel cache ahead of time",
    "cache": "list or clear the kernel cache",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status.

    It is 130 after an interruption by Ctrl-C, 141 when the reader of the output has gone (`rawattn info | head -1`), as
    a shell reports them of other commands.
    """
    with ends_quietly():
        try:
            return _run(list(sys.argv[1:] if argv is None else argv) or ["--help"])
        except KeyboardInterrupt:
            return _INTERRUPTED


def _run(argv: list[str]) -> int:
    invoked = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="rawattn", description="Exact attention for arrays of any framework."
    )
    parser.add_argument("--version", action="version", version=f"rawattn {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    command = None
    for name, summary in _COMMANDS.items():
        if name == invoked:
            command = importlib.import_module(f"rawattn._cli.{name}")
            command.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # told by the command itself, whose usage says what it takes
        subparsers.choices.get(invoked or "", parser).error(
            f"got {' '.join(unknown)}, which it does not take; --help tells what it takes"
        )
    assert command is not None, "argparse exits when the first word is no command"
    return int(command.run(args) or 0)
