"""The width of the terminal."""

from __future__ import annotations

import os
from typing import TextIO

_UNKNOWN = 80  # columns of a terminal whose width is unknown


def columns(stream: TextIO) -> int | None:
    """The columns of a stream's terminal; None for a file or a pipe. $COLUMNS overrides both if it is set."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN
    except OSError:
        return _UNKNOWN
