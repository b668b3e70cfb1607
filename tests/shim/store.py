"""A cache of what g++ compiled for the simulator, kept from one run of the tests to the next.

A file is named by a hash of all its inputs: the text of its translation unit, every included header, the objects it
is linked with, the options and the compiler. It appears under its name by an atomic rename, so processes can share
a folder. The least recently used files are removed once the folder is too large.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

VARIABLE = "RAWATTN_TEST_CACHE"
LIMIT = 1 << 30  # bytes of all files
# Files used more recently than this may belong to runs that have not ended.
_IN_USE_SECONDS = 3600
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_COMMAND = ("g++", "-std=c++17", "-fPIC", "-fvisibility=hidden")


def directory() -> Path:
    """$RAWATTN_TEST_CACHE, else rawattn-tests in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser().absolute()
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(xdg := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(xdg) / "rawattn-tests"
    return Path.home() / ".cache" / "rawattn-tests"


class Store:
    """Compiles what the folder does not hold yet."""

    def __init__(self, folder: Path, includes: Sequence[Path]) -> None:
        """includes: the include folders, searched in this order."""
        self._folder, self._includes = folder, includes
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"{folder}: no folder for compiled kernels ({error}); "
                f"${VARIABLE} can name one that can be written"
            ) from error

    def compile(
        self,
        text: str,
        suffix: str,
        options: Sequence[str],
        objects: Sequence[Path] = (),
        *,
        summary: str,
    ) -> Path:
        """The path of the object (suffix ".o") or shared object (".so") of a translation unit.

        Raises AssertionError with what g++ said, and the unit's `summary`.
        """
        parts = [text, self._headers(text), [*_COMMAND, *options], suffix, _compiler()]
        everything = json.dumps([*parts, [path.name for path in objects]], sort_keys=True)
        target = self._folder / f"{hashlib.sha256(everything.encode()).hexdigest()}{suffix}"
        if not _used(target):
            with _lock(target):
                # Another process may have compiled it while this one waited.
                if not _used(target):
                    self._run(text, target, options, objects, summary)
        return target

    def prune(self, limit: int = LIMIT) -> None:
        """Removes the least recently used files until the rest has at most `limit` bytes, but none that may be in use."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process may have removed it
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for used, size, path in sorted(files):
            if total <= limit or time.time() - used < _IN_USE_SECONDS:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _headers(self, text: str) -> dict[str, str]:
        """The text of every header that `text` includes, directly or not, by the name in its #include."""
        found: dict[str, str] = {}
        waiting = _INCLUDE.findall(text)
        while waiting:
            if (name := waiting.pop()) not in found:
                found[name] = self._header(name)
                waiting += _INCLUDE.findall(found[name])
        return found

    def _header(self, name: str) -> str:
        for folder in self._includes:
            if (path := folder / name).is_file():
                return path.read_text("utf-8")
        raise AssertionError(f'#include "{name}": in none of {", ".join(map(str, self._includes))}')

    def _run(
        self,
        text: str,
        target: Path,
        options: Sequence[str],
        objects: Sequence[Path],
        summary: str,
    ) -> None:
        made = target.with_name(f"{target.stem}-{uuid.uuid4().hex}.tmp")
        with tempfile.TemporaryDirectory(prefix="rawattn-shim-") as folder:
            unit = Path(folder, "unit.cpp")
            unit.write_text(text, "utf-8")
            command = [*_COMMAND, *(f"-I{path}" for path in self._includes), str(unit)]
            command += [*map(str, objects), *options, "-o", str(made)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            made.unlink(missing_ok=True)
            raise AssertionError(f"{' '.join(command)}\n{summary}\n{done.stderr}")
        made.replace(target)


def _used(path: Path) -> bool:
    """Whether the file exists; sets its time of last use."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Keeps other processes from compiling the same file. The lock of a process that dies is released."""
    path = target.with_suffix(".lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # A process that waits on the removed lock file then finds the target; a later one creates a new lock file.
            path.unlink(missing_ok=True)


@functools.cache
def _compiler() -> str:
    done = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True)
    machine = subprocess.run(["g++", "-dumpmachine"], check=True, capture_output=True, text=True)
    return done.stdout + machine.stdout
