"""A compiled file is found again if and only if all its inputs are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.shim import store
from tests.shim.store import Store

TEXT = '#include "a.hpp"\nint two() { return one() + 1; }\n'
OPTIONS = ("-O1", "-c")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile with")


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "a.hpp").write_text('#pragma once\n  # include "b.hpp"  // one()\n')
    (folder / "b.hpp").write_text("inline int one() { return 1; }\n")
    return folder


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The g++ commands that compiled a unit."""
    runs: list[list[str]] = []
    run = subprocess.run

    def counting(command: list[str], **how: Any) -> Any:
        if "-o" in command:
            runs.append(command)
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", counting)
    return runs


def made(tmp_path: Path, headers: Path, text: str = TEXT, **knobs: Any) -> Path:
    """Compiles with a new Store, as another process would."""
    knobs = {"suffix": ".o", "options": OPTIONS, **knobs}
    return Store(tmp_path / "store", [headers]).compile(text, summary="two", **knobs)


def test_compiled_once(tmp_path: Path, headers: Path, runs: list[list[str]]) -> None:
    first = made(tmp_path, headers)
    assert first.read_bytes()[:4] == b"\x7fELF"
    (headers / "unrelated.hpp").write_text("")
    moved = headers.rename(tmp_path / "moved")
    assert made(tmp_path, moved) == first
    assert len(runs) == 1
    assert [path.name for path in (tmp_path / "store").iterdir()] == [first.name]


@pytest.mark.parametrize("change", ["text", "header", "option", "suffix", "object", "compiler"])
def test_what_reaches_the_compiler_is_compiled_anew(
    change: str, tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs: dict[str, Any] = {"options": ("-O1", "-shared"), "suffix": ".so"}
    before = made(tmp_path, headers, **knobs)
    text = TEXT
    if change == "text":
        text += " "
    elif change == "header":
        (headers / "b.hpp").write_text("inline int one() { return 11; }\n")
    elif change == "option":
        knobs["options"] = ("-O0", "-shared")
    elif change == "suffix":
        knobs["suffix"] = ".other"
    elif change == "object":
        knobs["objects"] = [made(tmp_path, headers, "int three() { return 3; }\n")]
    else:
        monkeypatch.setattr(store, "_compiler", lambda: "g++ of tomorrow")
    after = made(tmp_path, headers, text, **knobs)
    assert after != before
    assert after.is_file() and before.is_file()


def test_what_does_not_compile_is_told_and_not_kept(tmp_path: Path, headers: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)g\+\+.*\ntwo\n.*undeclared_name"):
        made(tmp_path, headers, "int two() { return undeclared_name; }\n")
    with pytest.raises(AssertionError, match=r'#include "none\.hpp": in none of'):
        made(tmp_path, headers, '#include "none.hpp"\n')
    assert not list((tmp_path / "store").iterdir())


def test_whoever_wants_it_at_once_compiles_once(
    tmp_path: Path, headers: Path, runs: list[list[str]]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: made(tmp_path, headers), range(4)))
    assert len(found) == len(runs) == 1


def test_least_recently_used_goes_first(tmp_path: Path, headers: Path) -> None:
    kept = Store(tmp_path / "store", [headers])
    paths = [made(tmp_path, headers, TEXT + " " * n) for n in range(4)]
    size = paths[0].stat().st_size
    for n, path in enumerate(paths):
        os.utime(path, (0, time.time() - 10_000 + n))
    made(tmp_path, headers, TEXT)  # uses the oldest again
    kept.prune(2 * size)
    assert [path.is_file() for path in paths] == [True, False, False, True]
    os.utime(paths[3])
    kept.prune(0)  # files that may be in use stay
    assert [path.is_file() for path in paths] == [True, False, False, True]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.directory() == tmp_path / "rawattn-tests"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.directory() == tmp_path / ".cache/rawattn-tests"
    monkeypatch.setenv(store.VARIABLE, "~/elsewhere")
    assert store.directory() == tmp_path / "elsewhere"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/store: no folder.*RAWATTN_TEST_CACHE"):
        Store(tmp_path / "file/store", [])
