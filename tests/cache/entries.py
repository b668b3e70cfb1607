"""Entries of a cache, and what somebody else may have put there."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rawattn._compile import cache as _cache

FILES = {"kernel.cu": b"source", "kernel.cubin": b"\x7fELF cubin", "log.txt": b"said"}
META = {"summary": "a kernel", "registers": 8}


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


KEY = key_of("a")


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


def strangers(path: Path, kind: str) -> None:
    """Puts something of somebody else's there."""
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        ours = _cache.publish(key_of("target of the link"), FILES, META)
        assert ours is not None
        path.symlink_to(ours.path, target_is_directory=True)
    else:
        path.mkdir()
        if kind != "empty directory":
            (path / "kernel.cu").write_text("mine")
        if kind == "directory with a meta.json":
            (path / "meta.json").write_text('{"key": "mine", "files": {}}')


def content(path: Path) -> object:
    if path.is_symlink():
        return path.readlink()
    if path.is_dir():
        return {child.name: content(child) for child in path.iterdir()}
    return path.read_text()


STRANGERS = ["file", "link", "empty directory", "directory", "directory with a meta.json"]
