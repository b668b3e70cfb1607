"""What an entry of the cache is: whole, its own key's, and in nobody's way."""

from __future__ import annotations

import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from tests.cache.entries import FILES, KEY, META, STRANGERS, content, names, strangers


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
