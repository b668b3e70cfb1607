"""Checks that a file can be written, before the work whose result goes there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def check(option: str, path: Path) -> None:
    """Raises OSError, naming the option, if `path` cannot be created or replaced. Parent folders may be missing."""
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path}: is a directory, expected the name of a file")
    nearest = path if path.exists() else next(up for up in path.absolute().parents if up.exists())
    if nearest != path and not nearest.is_dir():
        raise NotADirectoryError(f"{option} {path}: {nearest} is no directory")
    if not os.access(nearest, os.W_OK):
        raise PermissionError(f"{option} {path}: {nearest} cannot be written")


def check_ending(option: str, path: Path, endings: Sequence[str]) -> None:
    """Raises ValueError, naming the option, if the file name does not have one of these endings."""
    if path.suffix.lower() not in endings:
        got = path.suffix or "no ending"
        raise ValueError(f"{option} {path}: got {got}, expected {', '.join(endings)}")
