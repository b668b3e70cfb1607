"""What g++ made for the CPU machine, kept from one run of the tests to the next.

A file is named by a hash of all that it is made of: the text of its unit, every header that is included,
the objects it is linked with, the options and the compiler. It appears under its name in one step, so
processes can share a folder. Files that were not used for longest go once the folder is too large.
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
LIMIT = 1 << 30  # bytes
# Younger files belong to runs that may not have ended.
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
        """includes: the folders of headers, the first that has one counts."""
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
        """The object (suffix ".o") or shared object (".so") of a unit.

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
        """Removes what was not used for longest, until the rest has at most `limit` bytes."""
        files = []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process prunes as well
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in files)
        for used, size, path in sorted(files):
            if total <= limit or time.time() - used < _IN_USE_SECONDS:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _headers(self, text: str) -> dict[str, str]:
        """Every header that the text includes, directly or not, by the name it is included by."""
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
    """Whether it is there; from now on it was used last."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Keeps other processes from compiling the same. One that dies lets go of it."""
    path = target.with_suffix(".lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Whoever waits on the removed file finds the target next; whoever comes later makes a new one.
            path.unlink(missing_ok=True)


@functools.cache
def _compiler() -> str:
    done = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True)
    machine = subprocess.run(["g++", "-dumpmachine"], check=True, capture_output=True, text=True)
    return done.stdout + machine.stdout
