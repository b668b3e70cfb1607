from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rawattn._compile import cache
from rawattn._kernels import tile_tables as _tiles
from tests import exhaustive, gpu_report
from tests.command import Output

# The same examples on every run: a change is judged by its own effect. `--hypothesis-profile=search` looks for new ones.
# No deadline, since time per example says more about the machine than about the code.
settings.register_profile("rawattn", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("rawattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    exhaustive.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(gpu_report.GpuReport(config), "gpu-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive.leave_out(config, items)
    if reason := gpu_report.why_no_gpu():
        _skip_gpu_tests(config, items, reason)


def _skip_gpu_tests(config: pytest.Config, items: list[pytest.Item], reason: str) -> None:
    """One of each file is skipped and says why; the others, which are thousands, are left out."""
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
    """Output is as wide as where nobody says otherwise: in the workers of pytest-xdist $COLUMNS may be set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture
def tile_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A copy of the tile tables that a test may write, instead of the shipped ones."""
    for path in _tiles.DIRECTORY.glob("*.json"):
        shutil.copy(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_tiles, "DIRECTORY", tmp_path)
        _tiles.forget()
        yield tmp_path
    _tiles.forget()


@pytest.fixture
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; its folder is not there yet."""
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(cache, "_warned", set())
    return path


@pytest.fixture
def rawattn_command(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)
