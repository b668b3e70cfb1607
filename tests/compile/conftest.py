"""Fixtures of the compiler's tests: a cache and device sources of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import compiler
from rawattn._runtime import kernel
from tests.compile.sources import SCALE, write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    monkeypatch.setattr(compiler, "_in_memory", {})
    for memory in ("_functions", "_loading"):
        monkeypatch.setattr(kernel, memory, {})
    monkeypatch.setattr(compiler, "_compiler_version", [])
    return path


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device sources with only the header of SOURCE."""
    root = tmp_path / "kernels_cu"
    write(root, "tile/scale.cuh", SCALE)
    monkeypatch.setattr(compiler, "kernels_dir", lambda: root)
    return root


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the text of everything that NVRTC compiles."""
    texts: list[str] = []
    run_nvrtc = compiler._run_nvrtc

    def counting(request: Any) -> Any:
        texts.append(request.text)
        return run_nvrtc(request)

    monkeypatch.setattr(compiler, "_run_nvrtc", counting)
    return texts
