from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rawattn._compile import cache
from rawattn._kernels import tile_tables as _tiles
from tests import exhaustive, gpu_report
from tests.command import Output

# derandomize: every run tries the same examples, so that a failure points at the change under test.
# `--hypothesis-profile=search` looks for new examples. No deadline: the time of an example depends mostly on the load.
settings.register_profile("rawattn", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("rawattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    exhaustive.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpu_report.GpuReport(config), "gpu-report")
    # What collecting makes for thousands of cases stays, so looking for garbage among it, then and later, is in vain.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive.leave_out(config, items)
    if reason := gpu_report.why_no_gpu():
        _skip_gpu_tests(config, items, reason)


def _skip_gpu_tests(config: pytest.Config, items: list[pytest.Item], reason: str) -> None:
    """Skip one GPU test of each file, with the reason, and deselect the others, which are thousands."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    shown = {item.path: item for item in reversed(marked)}
    for item in shown.values():
        item.add_marker(pytest.mark.skip(reason=f"{reason}; and all of its kind in this file"))
    if beyond := [item for item in marked if shown[item.path] is not item]:
        config.hook.pytest_deselected(items=beyond)
        left_out = {*beyond}
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def _no_width() -> Iterator[None]:
    """Unset $COLUMNS, which pytest-xdist may set in its workers, so that output has its default width."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture
def tile_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A writable copy of the tile tables, used instead of the shipped ones."""
    for path in _tiles.DIRECTORY.glob("*.json"):
        shutil.copy(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_tiles, "DIRECTORY", tmp_path)
        _tiles.forget()
        yield tmp_path
    _tiles.forget()


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache whose folder does not exist yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(cache, "_warned", set())
    return path


@pytest.fixture
def rawattn_command(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)


@pytest.fixture
def gpu() -> Iterator[Any]:
    """A fake framework and its GPU, in place of CuPy."""
    from tests.fast_path_fakes import fake_gpu

    with fake_gpu() as found:
        yield found
