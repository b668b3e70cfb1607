"""How wide the terminal is."""

from __future__ import annotations

import os
from typing import TextIO

_UNKNOWN = 80  # of a terminal that does not tell


def columns(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream goes to; None where it goes to a file or a pipe. $COLUMNS decides if set."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN
    except OSError:
        return _UNKNOWN
