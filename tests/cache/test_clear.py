"""Listing and clearing: ours alone, whatever dead processes and others left."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import memo, nvrtc
from tests.cache.entries import FILES, KEY, META, STRANGERS, content, key_of, names, strangers


def test_entries_newest_first() -> None:
    for position, text in enumerate("abc"):
        entry = _cache.publish(key_of(text), FILES, {"summary": text})
        assert entry is not None
        os.utime(entry.path, (1000 + position, 1000 + position))
    listed = [entry.meta["summary"] for _, entry in _cache.entries() if entry]
    assert listed == ["c", "b", "a"]


def test_clear_removes_ours_alone(cache: Path) -> None:
    assert _cache.clear() == 0
    assert _cache.entries() == []
    for text in "ab":
        _cache.publish(key_of(text), FILES, META)
    _cache.keep_failure(key_of("c"), FILES)
    (cache / "thesis.txt").write_text("mine")
    (cache / "deadbeef").mkdir()
    (cache / f"{KEY[:32]}.backup").mkdir()
    kept = {"thesis.txt", "deadbeef", f"{KEY[:32]}.backup"}
    for stranger in kept:
        os.utime(cache / stranger, (1000, 1000))
    assert _cache.clear() == 2
    assert names(cache) == kept


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("suffix", ["", ".failed", ".lock", ".tmp-0123"])
def test_clear_leaves_what_only_has_a_name_like_ours(cache: Path, suffix: str, kind: str) -> None:
    cache.mkdir()
    path = cache / f"{KEY[:32]}{suffix}"
    strangers(path, kind)
    before = content(path)
    os.utime(path, (1000, 1000), follow_symlinks=False)
    _cache.clear()
    assert content(path) == before


@pytest.mark.parametrize("suffix", ["json", "tmp-0123"])
def test_clear_removes_notes_and_no_other_file_of_such_a_name(cache: Path, suffix: str) -> None:
    cache.mkdir()
    ours = cache / f"compiler-{KEY[:16]}.{suffix}"
    ours.write_text('{"library": "libnvrtc.so", "file": [1, 2], "version": "13.0"}')
    others = {"compiler-0123456789abcdef": "mine", "compiler-123456789abcdef0": '{"version": 1}'}
    for name, text in others.items():
        (cache / f"{name}.{suffix}").write_text(text)
    for path in cache.iterdir():
        os.utime(path, (1000, 1000))
    assert _cache.clear() == 0
    assert content(cache) == {f"{name}.{suffix}": text for name, text in others.items()}


@pytest.fixture
def _library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A library that stands for the loaded NVRTC."""
    library = tmp_path / "libnvrtc.so"
    library.touch()
    monkeypatch.setattr(nvrtc, "loaded", lambda: {str(library)})


@pytest.mark.usefixtures("_library")
def test_a_note_that_cannot_be_written_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("13.0", "13.1"):
        memo.remember(version)
        assert memo.recall() == version
    (path,) = cache.iterdir()
    path.unlink()
    path.mkdir()
    memo.remember("13.2")
    assert names(cache) == {path.name}


@pytest.mark.parametrize("old", [False, True])
def test_clear_removes_what_dead_processes_left(
    cache: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    published = _cache.publish(KEY, FILES, META)
    assert published is not None
    with monkeypatch.context() as patch:
        patch.setattr(_cache, "_rename", die)
        patch.setattr(_cache.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            _cache.publish(key_of("b"), FILES, META)
        patch.setattr(_cache.Path, "unlink", die)
        with pytest.raises(Killed):
            _cache.clear()  # dies with the entry aside
        with contextlib.suppress(Killed), _cache.lock(KEY):
            pass
    left = names(cache)
    assert sorted(name[32:37] for name in left) == [".lock", ".tmp-", ".tmp-"]
    if old:
        for name in left:
            os.utime(cache / name, (1000, 1000))
    assert _cache.clear() == 0
    assert names(cache) == (set() if old else left)


def test_clear_removes_entries_from_before_the_mark(cache: Path) -> None:
    for text in "ab":
        entry = _cache.publish(key_of(text), FILES, META)
        assert entry is not None
        (entry.path / ".rawattn").unlink()
    (entry.path / "kernel.cubin").write_bytes(b"damaged")
    assert len(_cache.entries()) == 2
    assert _cache.publish(key_of("b"), FILES, META) is not None
    assert _cache.clear() == 2
    assert names(cache) == set()


@pytest.mark.parametrize("text", ["", "3", "[]", "{}"])
def test_clear_removes_damaged_entries(cache: Path, text: str) -> None:
    entry = _cache.publish(KEY, FILES, META)
    assert entry is not None
    (entry.path / "meta.json").write_text(text)
    assert _cache.entries() == [(entry.path, None)]
    assert _cache.clear() == 1
    assert names(cache) == set()


@pytest.mark.usefixtures("cache", "_library")
def test_an_environment_that_is_no_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads other bytes in a variable as surrogates."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/\udce9")
    memo.remember("13.0")
    assert memo.recall() == "13.0"


def test_an_entry_that_goes_while_they_are_listed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("a", "b"):
        _cache.publish(key_of(text), FILES, META)
    is_ours, gone = _cache._is_ours, cache / key_of("b")[:32]

    def removing(path: Path) -> bool:
        found = is_ours(path)
        if path == gone:
            shutil.rmtree(path)
        return found

    monkeypatch.setattr(_cache, "_is_ours", removing)
    assert [path.name for path, _ in _cache.entries()] == [key_of("a")[:32]]
