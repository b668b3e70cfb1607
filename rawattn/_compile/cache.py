"""Compiled kernels on disk.

One directory per compiled kernel, named by the first digits of its key:

    kernel.cu      the translation unit
    kernel.cubin   what the driver loads
    log.txt        what the compiler said, when it said anything
    meta.json      summary, registers, spills, seconds, ..., and the SHA-256 of each file above

A directory is built beside its final name and renamed in one step, so a reader sees all of it or
none. Whatever does not match its SHA-256 counts as absent and is rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no lock between processes, which costs a second compile at worst
    fcntl = None  # type: ignore[assignment]

VARIABLE = "RAWATTN_CACHE_DIR"

_log = logging.getLogger("rawattn")
_LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.02
_NAME_DIGITS = 32
# Nothing else is ever deleted: the variable may name a directory that holds other files too.
_ENTRY = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}")
_FAILED = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.failed")
_WORKING = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.(lock|tmp-[0-9a-f]+)")
_NOTE = re.compile(r"compiler-[0-9a-f]{16}\.(json|tmp-[0-9a-f]+)")  # see _compiler_memo
_STALE_SECONDS = 600.0  # a process that works on an entry is done or dead by then

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One intact cached kernel: its directory, meta.json, and the other files by name."""

    path: Path
    meta: dict[str, Any]
    files: dict[str, bytes]


def directory() -> Path:
    """$RAWATTN_CACHE_DIR, else $XDG_CACHE_HOME/rawattn, else ~/.cache/rawattn.

    It need not exist yet. Raises OSError when none of them names a place (no home directory).
    """
    try:
        if chosen := os.environ.get(VARIABLE):
            return Path(chosen).expanduser().absolute()
        # The XDG specification says to ignore a relative path.
        if os.path.isabs(xdg := os.environ.get("XDG_CACHE_HOME", "")):
            return Path(xdg) / "rawattn"
        return Path.home() / ".cache" / "rawattn"
    except RuntimeError as error:
        raise OSError(f"{error} ({VARIABLE} can name the cache directory)") from error


def read(key: str) -> Entry | None:
    """The intact entry of a key, or None."""
    try:
        entry = _read(directory() / key[:_NAME_DIGITS])
    except OSError:
        return None
    return entry if entry is not None and entry.meta.get("key") == key else None


def publish(key: str, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> Entry | None:
    """Put an entry on disk. None when the directory cannot be written, after one warning about it.

    When another process has put the same entry there in the meantime, that one is returned.
    """
    digests = {name: _sha256(content) for name, content in files.items()}
    full = {**meta, "key": key, "files": digests}
    try:
        root = _ensure_directory()
        final = root / key[:_NAME_DIGITS]
        staging = _unused(final)
        try:
            staging.mkdir()
            for name, content in files.items():
                (staging / name).write_bytes(content)
            (staging / "meta.json").write_text(json.dumps(full, indent=1) + "\n")
            for _ in range(3):
                if _rename(staging, final):
                    return Entry(final, full, dict(files))
                if (winner := read(key)) is not None:
                    return winner
                _remove(final)  # damaged
            raise OSError(f"{final} cannot be replaced")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        _warn_unwritable(error)
        return None


def keep_failure(key: str, files: Mapping[str, bytes]) -> Path:
    """Keep what failed to compile for a person to look at; returns the directory.

    That is in the cache where possible, else a new temporary one.
    """
    try:
        kept = _ensure_directory() / f"{key[:_NAME_DIGITS]}.failed"
        return _write_all(kept, files)
    except OSError:
        return _write_all(Path(tempfile.mkdtemp(prefix="rawattn-failed-")), files)


@contextlib.contextmanager
def lock(key: str, timeout: float = _LOCK_SECONDS) -> Iterator[None]:
    """Keep other processes and threads from compiling the same key.

    It only saves work, so where it cannot be had (file system without locks, unwritable directory,
    a holder that does not finish in `timeout` seconds) the body runs without it.
    """
    try:
        path = _ensure_directory() / f"{key[:_NAME_DIGITS]}.lock"
        handle = _acquire(path, timeout)
    except OSError:
        handle = None
    try:
        yield
    finally:
        if handle is not None:
            # Whoever waits on the removed file finds the published entry next; whoever comes later
            # makes a new file.
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(handle)


def entries() -> list[tuple[Path, Entry | None]]:
    """Every entry directory, the newest first, with None for a damaged one."""
    root = directory()
    if not root.exists():
        return []
    found = [(path.stat().st_mtime, path) for path in root.iterdir() if _ENTRY.fullmatch(path.name)]
    return [(path, _read(path)) for _, path in sorted(found, reverse=True)]


def clear() -> int:
    """Remove entries, kept failures, notes and what dead processes left; returns how many entries."""
    root = directory()
    if not root.exists():
        return 0
    removed = 0
    for path in list(root.iterdir()):
        done = any(kind.fullmatch(path.name) for kind in (_ENTRY, _FAILED, _NOTE))
        if done or _is_stale(path):
            _remove(path)
            removed += _ENTRY.fullmatch(path.name) is not None
    return removed


def _read(path: Path) -> Entry | None:
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        files = {name: (path / name).read_bytes() for name in meta["files"]}
        intact = bool(files) and all(_sha256(files[name]) == meta["files"][name] for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(path, meta, files) if intact else None


def _is_stale(path: Path) -> bool:
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    return _WORKING.fullmatch(path.name) is not None and age > _STALE_SECONDS


def _acquire(path: Path, timeout: float) -> int | None:
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return handle
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _log.warning("waited %.0f s for %s; compiling without it", timeout, path)
                    os.close(handle)
                    return None
                time.sleep(_POLL_SECONDS)
    except OSError:
        os.close(handle)
        raise


def _ensure_directory() -> Path:
    root = directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _rename(staging: Path, final: Path) -> bool:
    """False when something already has the final name."""
    try:
        staging.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _remove(path: Path) -> None:
    """Remove a file or a directory. It leaves its name first, so that nobody reads half of it."""
    aside = _unused(path)
    try:
        path.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def _unused(path: Path) -> Path:
    return path.with_name(f"{path.name[:_NAME_DIGITS]}.tmp-{uuid.uuid4().hex}")


def _write_all(path: Path, files: Mapping[str, bytes]) -> Path:
    path.mkdir(exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def _warn_unwritable(error: OSError) -> None:
    try:
        place = str(directory())
    except OSError:
        place = "(none)"
    if place in _warned:
        return
    _warned.add(place)
    warnings.warn(
        f"rawattn cannot write its kernel cache {place}: {error}. Kernels stay in memory and every "
        f"process compiles them again; set {VARIABLE} to a writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
