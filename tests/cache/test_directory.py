"""Where the cache lies, and what happens where it cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from tests.cache.entries import FILES, KEY, META, key_of, names


def test_directory_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _cache.directory() == tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "")
    assert _cache.directory() == tmp_path / "xdg" / "rawattn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert _cache.directory() == tmp_path / "home" / ".cache" / "rawattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("RAWATTN_CACHE_DIR")
    assert _cache.directory() == tmp_path / "home" / ".cache" / "rawattn"


def test_directory_expands_user_and_relative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "~/kernels")
    assert _cache.directory() == tmp_path / "kernels"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "kernels")
    assert _cache.directory() == tmp_path / "kernels"


def test_no_home_is_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("RAWATTN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_cache.Path, "home", no_home)
    assert _cache.read(KEY) is None
    with pytest.warns(RuntimeWarning, match=r"home directory.*RAWATTN_CACHE_DIR"):
        assert _cache.publish(KEY, FILES, META) is None
    with _cache.lock(KEY):
        pass


def test_unwritable_warns_once(cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match=f"{cache}.*RAWATTN_CACHE_DIR") as record:
        assert _cache.publish(KEY, FILES, META) is None
    assert len(record) == 1
    assert _cache.publish(key_of("b"), FILES, META) is None  # a second warning would be an error
    assert _cache.read(KEY) is None
    with _cache.lock(KEY):
        pass


def test_each_unwritable_directory_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in (cache, tmp_path / "second"):
        path.write_text("a file")
        monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
        with pytest.warns(RuntimeWarning, match=str(path)):
            _cache.publish(KEY, FILES, META)


def test_read_only_directory_still_serves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = _cache.publish(KEY, FILES, META)

    def read_only(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(_cache.Path, "mkdir", read_only)  # so that it also holds for root
    with _cache.lock(KEY):
        assert _cache.read(KEY) == published
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert _cache.publish(key_of("b"), FILES, META) is None


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_mode_bits_of_a_read_only_directory(cache: Path) -> None:
    published = _cache.publish(KEY, FILES, META)
    cache.chmod(0o500)
    try:
        assert _cache.read(KEY) == published
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert _cache.publish(key_of("b"), FILES, META) is None
    finally:
        cache.chmod(0o700)


def test_full_disk_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: str, encoding: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_cache.Path, "write_text", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert _cache.publish(KEY, FILES, META) is None
    assert names(cache) == set()


def test_keep_failure(cache: Path) -> None:
    kept = _cache.keep_failure(KEY, {"kernel.cu": b"first"})
    assert kept.parent == cache
    assert _cache.keep_failure(KEY, {"kernel.cu": b"second"}) == kept
    assert (kept / "kernel.cu").read_bytes() == b"second"
    assert _cache.read(KEY) is None
    assert _cache.entries() == []


def test_keep_failure_where_the_cache_is_unwritable(cache: Path) -> None:
    cache.write_text("a file")
    kept = _cache.keep_failure(KEY, {"kernel.cu": b"text"})
    assert (kept / "kernel.cu").read_bytes() == b"text"
    (kept / "kernel.cu").unlink()
    kept.rmdir()


def test_why_unwritable(cache: Path) -> None:
    assert _cache.why_unwritable() is None
    assert not cache.exists()
    cache.mkdir()
    assert _cache.why_unwritable() is None
    assert names(cache) == set()
    cache.rmdir()
    cache.write_text("a file where the directory should be")
    assert str(cache) in str(_cache.why_unwritable())


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_why_unwritable_by_mode_bits(cache: Path) -> None:
    cache.mkdir(mode=0o500)
    assert "Permission denied" in str(_cache.why_unwritable())


def test_a_failure_that_cannot_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    cache.write_text("a file")
    monkeypatch.setattr(_cache.tempfile, "mkdtemp", full)
    assert _cache.keep_failure(KEY, {"kernel.cu": b"text"}) is None
