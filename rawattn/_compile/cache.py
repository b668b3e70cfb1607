"""Compiled kernels on disk.

One directory per compiled kernel, named by the first digits of its key:

    kernel.cu      the translation unit
    kernel.cubin   what the driver loads
    log.txt        the compiler's log, if it is not empty
    meta.json      summary, registers, spills, seconds, ..., and the SHA-256 of each file above
    .rawattn       marks the directory as rawattn's

A directory is built under a temporary name and then renamed in one step, so a reader sees all of it or
nothing. A directory with a file that does not match its SHA-256 counts as absent and is rebuilt.

The cache directory may hold files of other programs, under any name. Nothing is removed or replaced by its
name alone: it must also carry rawattn's mark, or the meta.json of an entry of that name.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no lock between processes; at worst a kernel is compiled twice
    fcntl = None  # type: ignore[assignment]

VARIABLE = "RAWATTN_CACHE_DIR"

_log = logging.getLogger("rawattn")
_LOCK_SECONDS = 60.0
_POLL_SECONDS = 0.02
_NAME_DIGITS = 32
_ENTRY = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}")
_FAILED = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.failed")
_LOCK = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.lock")
_WORKING = re.compile(rf"[0-9a-f]{{{_NAME_DIGITS}}}\.tmp-[0-9a-f]+")
_NOTE = re.compile(r"compiler-[0-9a-f]{16}\.json")  # see memo.py
_NOTE_WORKING = re.compile(r"compiler-[0-9a-f]{16}\.tmp-[0-9a-f]+")
_STALE_SECONDS = 600.0  # the age at which temporary files are taken for those of dead processes
_TRIES = 10

# The mark of what rawattn made: in a directory, a file of this name with these bytes; a lock file holds the bytes itself.
_MARK_NAME = ".rawattn"
_MARK = b"rawattn: `rawattn cache --clear` removes this\n"

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One intact cached kernel: its directory, meta.json, and the other files by name."""

    path: Path
    meta: dict[str, Any]
    files: dict[str, bytes]


def directory() -> Path:
    """$RAWATTN_CACHE_DIR, else $XDG_CACHE_HOME/rawattn, else ~/.cache/rawattn.

    It need not exist yet. Raises OSError if there is neither a variable nor a home directory.
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
    """Put an entry on disk. If it cannot be written there, warns once and returns None.

    If another process has published the same entry in the meantime, that one is returned. Something with the
    entry's name that rawattn did not make is left alone.
    """
    digests = {name: _sha256(content) for name, content in files.items()}
    full = {**meta, "key": key, "files": digests}
    try:
        root = _ensure_directory()
        final = root / key[:_NAME_DIGITS]
        staging = _unused(final)
        try:
            staging.mkdir()
            _mark(staging)  # first, so that it can be removed later if this process dies
            _write_all(staging, files)
            (staging / "meta.json").write_text(json.dumps(full, indent=1) + "\n", "utf-8")
            for _ in range(_TRIES):
                if _rename(staging, final):
                    return Entry(final, full, dict(files))
                if (winner := read(key)) is not None:
                    return winner
                if _is_ours(final):  # it is damaged, since it could not be read
                    _remove(final)
            raise OSError(f"{final} is in the way, and rawattn did not put it there; move it")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        _warn_unwritable(error)
        return None


def keep_failure(key: str, files: Mapping[str, bytes]) -> Path | None:
    """Keep the files of a failed compilation for inspection; returns their directory.

    It is in the cache if possible, else a new temporary directory, else None.
    """
    try:
        kept = _ensure_directory() / f"{key[:_NAME_DIGITS]}.failed"
        with contextlib.suppress(FileExistsError):
            kept.mkdir()
            _mark(kept)
        if _is_ours(kept):
            return _write_all(kept, files)
    except OSError:
        pass
    try:
        return _write_all(Path(tempfile.mkdtemp(prefix="rawattn-failed-")), files)
    except OSError:
        return None


@contextlib.contextmanager
def lock(key: str, timeout: float = _LOCK_SECONDS) -> Iterator[None]:
    """Keep other processes and threads from compiling the same key.

    It only saves work. So if it cannot be acquired (a file system without locks, an unwritable directory, a
    holder that does not finish within `timeout` seconds), the body runs without it.
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
            # A process that waits on the removed file gets the lock and then finds the published entry. Later processes
            # make a new file.
            with contextlib.suppress(OSError):
                if _is_marked(path) and os.path.samestat(os.fstat(handle), path.lstat()):
                    path.unlink()
            # Closing alone leaves the lock to a process that another thread has forked meanwhile.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def entries() -> list[tuple[Path, Entry | None]]:
    """Every entry's directory, newest first, with its entry, or None if it is damaged."""
    root = directory()
    if not root.exists():
        return []
    ours = [path for path in root.iterdir() if _ENTRY.fullmatch(path.name) and _is_ours(path)]
    found = []
    for path in ours:
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            found.append((path.stat().st_mtime, path))
    return [(path, _read(path)) for _, path in sorted(found, reverse=True)]


def clear() -> int:
    """Remove entries, kept failures, notes, and temporary files of dead processes; returns the number of entries removed.

    Anything without rawattn's mark stays, whatever its name.
    """
    root = directory()
    if not root.exists():
        return 0
    removed = 0
    for path in list(root.iterdir()):
        for names, is_ours, at_work in _KINDS:
            if names.fullmatch(path.name) and is_ours(path) and (not at_work or _is_stale(path)):
                _remove(path)
                removed += names is _ENTRY
    return removed


def why_unwritable() -> str | None:
    """Why the cache directory cannot be written, or None if it can. Leaves nothing behind."""
    try:
        folder = directory()
    except OSError as error:
        return str(error)
    while not os.path.lexists(folder):  # a missing folder would be made in its parent
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_MARK)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return None


def is_note(path: Path) -> bool:
    """Whether a file is one of the notes that memo.py leaves."""
    try:
        note = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return (
        not path.is_symlink()
        and isinstance(note, dict)
        and note.keys() == {"library", "file", "version"}
    )


def _read(path: Path) -> Entry | None:
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        files = {name: (path / name).read_bytes() for name in meta["files"]}
        intact = bool(files) and all(_sha256(files[name]) == meta["files"][name] for name in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(path, meta, files) if intact else None


def _is_ours(path: Path) -> bool:
    """Whether rawattn made a directory: by its mark, or by its meta.json, as entries of older versions have no mark."""
    if path.is_symlink() or not path.is_dir():
        return False
    if _is_marked(path / _MARK_NAME):
        return True
    try:
        meta = json.loads((path / "meta.json").read_bytes())
    except (OSError, ValueError):
        return False
    return (
        isinstance(meta, dict)
        and isinstance(meta.get("files"), dict)
        and isinstance(key := meta.get("key"), str)
        and key[:_NAME_DIGITS] == path.name[:_NAME_DIGITS]
    )


def _is_marked(path: Path) -> bool:
    """Whether a file holds rawattn's mark."""
    try:
        return path.read_bytes() == _MARK and not path.is_symlink()
    except OSError:
        return False


# What `clear` removes. Columns: pattern of names, test whether rawattn made it, whether a running process may need it (it is
# then removed only if stale).
_KINDS: tuple[tuple[re.Pattern[str], Callable[[Path], bool], bool], ...] = (
    (_ENTRY, _is_ours, False),
    (_FAILED, _is_ours, False),
    (_WORKING, _is_ours, True),
    (_LOCK, _is_marked, True),
    (_NOTE, is_note, False),
    (_NOTE_WORKING, is_note, True),
)


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE_SECONDS
    except FileNotFoundError:
        return False


def _acquire(path: Path, timeout: float) -> int | None:
    if fcntl is None:
        return None
    handle, made = _open_lock(path)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if made:
                    os.write(handle, _MARK)
                return handle
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _log.warning("waited %.0f s for %s; compiling without it", timeout, path)
                    os.close(handle)
                    return None
                time.sleep(_POLL_SECONDS)
    except BaseException:  # KeyboardInterrupt too
        os.close(handle)
        raise


def _open_lock(path: Path) -> tuple[int, bool]:
    """A handle, and whether the file is new. A file that exists already is locked, but not written: it may not be rawattn's."""
    for _ in range(_TRIES):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), True
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # its holder removed it in between
                return os.open(path, os.O_RDWR), False
    raise OSError(f"{path} comes and goes")


def _ensure_directory() -> Path:
    root = directory()
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _rename(staging: Path, final: Path) -> bool:
    """Whether staging was renamed; False if something already has the final name."""
    if os.path.lexists(final):  # a rename would replace an empty directory
        return False
    try:
        staging.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def _remove(path: Path) -> None:
    """Remove a file or directory of rawattn's. It is renamed first, so that no process reads a half-removed one."""
    aside = _unused(path)
    try:
        path.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    if not aside.is_dir():
        aside.unlink(missing_ok=True)
        return
    # The mark is removed last, so that the rest can still be recognised if this process dies.
    with contextlib.suppress(OSError):
        _mark(aside)
        for child in list(aside.iterdir()):
            if child.name == _MARK_NAME:
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            else:
                child.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


def _unused(path: Path) -> Path:
    return path.with_name(f"{path.name[:_NAME_DIGITS]}.tmp-{uuid.uuid4().hex}")


def _mark(path: Path) -> None:
    (path / _MARK_NAME).write_bytes(_MARK)


def _write_all(path: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def _warn_unwritable(error: OSError) -> None:
    try:
        folder = str(directory())
    except OSError:
        folder = "(none)"
    if folder in _warned:
        return
    _warned.add(folder)
    warnings.warn(
        f"rawattn cannot write its kernel cache {folder}: {error}. Kernels stay in memory and every "
        f"process compiles them again; set {VARIABLE} to a writable directory.",
        RuntimeWarning,
        stacklevel=2,
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
