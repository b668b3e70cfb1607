"""What every test of the cache has: one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rawattn._compile import cache as _cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    return path
