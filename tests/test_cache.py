from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache

FILES = {"kernel.cu": b"source", "kernel.cubin": b"\x7fELF cubin", "log.txt": b"said"}
META = {"summary": "a kernel", "registers": 8}


def key_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


KEY = key_of("a")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    return path


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


# Where it lies


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


# What an entry is


def test_round_trip(cache: Path) -> None:
    assert _cache.read(KEY) is None
    published = _cache.publish(KEY, FILES, META)
    assert published is not None
    entry = _cache.read(KEY)
    assert entry == published
    assert entry.files == FILES
    assert entry.meta["summary"] == "a kernel"
    assert entry.path == cache / KEY[:32]
    assert names(cache) == {KEY[:32]}
    assert names(entry.path) == {*FILES, "meta.json"}
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [*FILES, "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "missing"])
def test_damaged_entry_is_absent_then_rebuilt(name: str, damage: str) -> None:
    entry = _cache.publish(KEY, FILES, META)
    assert entry is not None
    path = entry.path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    assert _cache.read(KEY) is None
    assert [intact for _, intact in _cache.entries()] == [None]
    rebuilt = _cache.publish(KEY, FILES, META)
    assert rebuilt is not None
    assert rebuilt == _cache.read(KEY)
    assert names(entry.path.parent) == {KEY[:32]}


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", "{}", '{"files": {}}', '{"files": ["kernel.cu"]}', '{"files": 3}', "\xff"],
)
def test_nonsense_meta_is_damage(text: str) -> None:
    entry = _cache.publish(KEY, FILES, META)
    assert entry is not None
    (entry.path / "meta.json").write_text(text, encoding="latin-1")
    assert _cache.read(KEY) is None
    assert _cache.publish(KEY, FILES, META) is not None


@pytest.mark.parametrize("kind", ["file", "empty directory", "directory of a stranger"])
def test_name_taken_by_something_else(cache: Path, kind: str) -> None:
    cache.mkdir()
    path = cache / KEY[:32]
    if kind == "file":
        path.write_text("in the way")
    else:
        path.mkdir()
        if kind != "empty directory":
            (path / "notes").write_text("in the way")
    assert _cache.read(KEY) is None
    assert _cache.publish(KEY, FILES, META) is not None
    assert _cache.read(KEY) is not None


def test_another_key_with_the_same_first_digits_is_not_ours() -> None:
    assert _cache.publish(KEY, FILES, META) is not None
    assert _cache.read(KEY[:-1] + ("0" if KEY[-1] != "0" else "1")) is None


def test_the_first_of_two_publishers_wins() -> None:
    first = _cache.publish(KEY, FILES, META)
    second = _cache.publish(KEY, {**FILES, "kernel.cubin": b"other"}, META)
    assert second == first == _cache.read(KEY)


def test_reader_sees_all_or_nothing(cache: Path) -> None:
    stop = threading.Event()
    seen: list[_cache.Entry | None] = []
    failures: list[Exception] = []

    def repeat(action: str) -> None:
        try:
            while not stop.is_set():
                if action == "publish":
                    assert _cache.publish(KEY, FILES, META) is not None
                elif action == "read":
                    seen.append(_cache.read(KEY))
                else:
                    _cache.clear()
        except Exception as error:  # warnings are errors too
            failures.append(error)

    actions = ["publish", "publish", "read", "clear"]
    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert any(seen)
    assert all(entry.files == FILES for entry in seen if entry is not None)


# Where it cannot be written


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
    def full(self: Path, content: str) -> int:
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


# The lock


def test_lock_excludes_threads_and_leaves_no_file(cache: Path) -> None:
    inside = 0
    most = 0

    def enter() -> None:
        nonlocal inside, most
        with _cache.lock(KEY):
            inside += 1
            most = max(most, inside)
            # A published entry is what makes the removal of the lock file safe.
            if _cache.read(KEY) is None:
                time.sleep(0.05)
                _cache.publish(KEY, FILES, META)
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert names(cache) == {KEY[:32]}


def test_locks_of_two_keys_are_independent() -> None:
    with _cache.lock(KEY), _cache.lock(key_of("b"), timeout=0.0):
        pass


def test_lock_is_released_by_an_error() -> None:
    with pytest.raises(ZeroDivisionError), _cache.lock(KEY):
        _ = 1 / 0
    started = time.monotonic()
    with _cache.lock(KEY):
        assert time.monotonic() - started < 5


def test_lock_times_out(caplog: pytest.LogCaptureFixture) -> None:
    with _cache.lock(KEY):
        started = time.monotonic()
        with _cache.lock(KEY, timeout=0.1):
            assert 0.1 <= time.monotonic() - started < 5
    assert "compiling without it" in caplog.text


def test_lock_of_a_killed_process_is_free(cache: Path) -> None:
    code = (
        "import sys, time; from rawattn import _cache\n"
        f"with _cache.lock({KEY!r}): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(_cache.__file__).parents[1])},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    started = time.monotonic()
    with _cache.lock(KEY):
        assert time.monotonic() - started < 5


def test_without_file_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "fcntl", None)
    with _cache.lock(KEY), _cache.lock(KEY):
        pass


# Listing and clearing


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
    (cache / f"{KEY[:32]}.tmp-0123").mkdir()
    (cache / f"{KEY[:32]}.lock").touch()
    for left_behind in (f"{KEY[:32]}.tmp-0123", f"{KEY[:32]}.lock"):
        os.utime(cache / left_behind, (1000, 1000))
    (cache / f"{KEY[:32]}.tmp-4567").mkdir()  # another process is at work
    (cache / "thesis.txt").write_text("mine")
    (cache / "deadbeef").mkdir()
    (cache / f"{KEY[:32]}.backup").mkdir()
    kept = {"thesis.txt", "deadbeef", f"{KEY[:32]}.backup"}
    for stranger in kept:
        os.utime(cache / stranger, (1000, 1000))
    assert _cache.clear() == 2
    assert names(cache) == {*kept, f"{KEY[:32]}.tmp-4567"}
