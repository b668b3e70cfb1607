from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import memo

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
    assert names(entry.path) == {*FILES, "meta.json", ".rawattn"}
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


@pytest.mark.parametrize("kind", STRANGERS)
def test_what_somebody_else_has_under_the_name_stays(cache: Path, kind: str) -> None:
    cache.mkdir()
    path = cache / KEY[:32]
    strangers(path, kind)
    before = content(path)
    assert _cache.read(KEY) is None
    assert path not in [listed for listed, _ in _cache.entries()]
    with pytest.warns(RuntimeWarning, match=f"{path} is in the way.*move it"):
        assert _cache.publish(KEY, FILES, META) is None
    assert content(path) == before
    assert not [name for name in names(cache) if ".tmp-" in name]


@pytest.mark.parametrize("kind", STRANGERS)
def test_failures_are_not_kept_in_the_directory_of_somebody_else(cache: Path, kind: str) -> None:
    cache.mkdir()
    path = cache / f"{KEY[:32]}.failed"
    strangers(path, kind)
    before = content(path)
    kept = _cache.keep_failure(KEY, {"kernel.cu": b"text"})
    assert kept.parent != cache
    assert content(kept) == {"kernel.cu": "text"}
    shutil.rmtree(kept)
    assert content(path) == before


@pytest.mark.parametrize("text", ["", "mine"])
def test_the_lock_file_of_somebody_else_stays(cache: Path, text: str) -> None:
    cache.mkdir()
    path = cache / f"{KEY[:32]}.lock"
    path.write_text(text)
    with _cache.lock(KEY):
        pass
    assert path.read_text() == text


def test_a_lock_removes_its_own_file_alone(cache: Path) -> None:
    path = cache / f"{KEY[:32]}.lock"
    with _cache.lock(KEY):
        path.unlink()
        with _cache.lock(KEY):  # a file of its own, which the first must leave
            os.utime(path, (1000, 1000))
            marked = path.read_bytes()
        path.write_bytes(marked)  # of a third process
    assert path.read_bytes() == marked


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
        "import time; from rawattn._compile import cache as _cache\n"
        f"with _cache.lock({KEY!r}): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(_cache.__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
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


def test_a_note_that_cannot_be_written_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "libnvrtc.so"
    library.touch()
    monkeypatch.setattr(memo, "_loaded", lambda: {str(library)})
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


# Whether it can be written


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
