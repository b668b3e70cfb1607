"""The version of NVRTC, remembered on disk so that the library need not be loaded to learn it.

The version is part of every kernel's key, but loading the library, of a hundred megabytes, would be half of the time that a
process waits for its first cached kernel. So a process that has loaded it leaves a note in the cache directory: the library's
file and its version. The note is valid while that file is unchanged. It cannot notice another NVRTC that would now be found
first: then kernels are still taken from the cache by the old version, until one must be compiled, which corrects the note.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from pathlib import Path

from rawattn._compile import cache, nvrtc

# Environment variables that influence which library is found.
_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX", "PYTHONPATH")


def recall() -> str | None:
    """The version of the NVRTC that this environment loaded last; None if it is not known or the library's file has changed."""
    try:
        note = json.loads(_note().read_bytes())
        found = os.stat(note["library"])
        version = note["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = [found.st_size, found.st_mtime_ns] == note.get("file")
    return version if same and isinstance(version, str) else None


def remember(version: str) -> None:
    """Writes a note with the version of the library that this process has loaded, if the cache directory can be written."""
    libraries = nvrtc.loaded()
    if len(libraries) != 1:  # a framework loaded its own too: which one has the version is unknown
        return
    library = libraries.pop()
    with contextlib.suppress(OSError):
        found = os.stat(library)
        note = {
            "library": library,
            "file": [found.st_size, found.st_mtime_ns],
            "version": version,
        }
        path = _note()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        aside = path.with_name(f"{path.stem}.tmp-{uuid.uuid4().hex}")
        try:
            aside.write_text(json.dumps(note) + "\n", "utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _note() -> Path:
    environment = [sys.prefix, *(os.environ.get(name, "") for name in _VARIABLES)]
    digest = hashlib.sha256(os.fsencode("\0".join(environment))).hexdigest()
    return cache.directory() / f"compiler-{digest[:16]}.json"
