"""The lock of a key: one holder at a time, and never in the way for good."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from tests.cache.entries import FILES, KEY, META, key_of, names


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


def test_an_interrupted_wait_leaves_no_file_open(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], os.close

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    def counted(handle: int) -> None:
        closed.append(handle)
        close(handle)

    with _cache.lock(KEY):
        monkeypatch.setattr(_cache.time, "sleep", interrupted)
        monkeypatch.setattr(_cache.os, "close", counted)
        with pytest.raises(KeyboardInterrupt), _cache.lock(KEY):
            pass
        assert len(closed) == 1
    with _cache.lock(KEY, timeout=0.0):
        pass


def test_a_lock_ends_although_a_process_was_forked_inside(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A child of a fork shares the open file, here as by `os.dup`, and with it the lock."""
    acquire, copies = _cache._acquire, []

    def forked(path: Path, timeout: float) -> int | None:
        handle = acquire(path, timeout)
        assert handle is not None
        copies.append(os.dup(handle))
        return handle

    cache.mkdir()
    (cache / f"{KEY[:32]}.lock").write_text("of somebody else, so it stays")
    with monkeypatch.context() as patch:
        patch.setattr(_cache, "_acquire", forked)
        with _cache.lock(KEY):
            pass
    with _cache.lock(KEY, timeout=0.0):
        assert "compiling without it" not in caplog.text
    os.close(copies[0])
