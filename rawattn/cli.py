"""The `rawattn` command. Each sub-command is a module of rawattn/_cli, imported only when it is invoked."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rawattn import __version__
from rawattn._console.pipes import ends_quietly

_INTERRUPTED = 128 + 2  # the exit status that a shell reports for a command ended by SIGINT

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

    The status is 130 after Ctrl-C, and 141 if the reader of the output has closed it (`rawattn info | head -1`), as a shell
    reports them for other commands.
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
    if unknown:  # reported by the sub-command's parser, whose usage lists what it takes
        subparsers.choices.get(invoked or "", parser).error(
            f"got {' '.join(unknown)}, which it does not take; --help tells what it takes"
        )
    assert command is not None, "argparse exits when the first word is no command"
    return int(command.run(args) or 0)
