"""Whether a GPU is used: when that is silent, when it warns, and which remedy the message names."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._runtime import devices


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    _forget()
    yield
    _forget()


def _forget() -> None:
    devices._look.cache_clear()
    devices.gpu_available.cache_clear()


class Runtime(types.SimpleNamespace):
    """A fake of cupy.cuda.runtime. `fails` is raised when the devices are counted."""

    count = 0
    driver: Any = 13000
    fails: Exception | None = None
    asked = 0

    def getDeviceCount(self) -> int:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return self.count

    def driverGetVersion(self) -> int:
        if isinstance(self.driver, Exception):
            raise self.driver
        return int(self.driver)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    cuda = types.SimpleNamespace(runtime=fake)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    return fake


class CudaError(RuntimeError):
    pass


class Importing:
    """A module finder under which `import cupy` raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == "cupy":
            raise self._error


def importing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Importing(error), *sys.meta_path])


def test_a_gpu(runtime: Runtime) -> None:
    runtime.count = 2
    assert devices.gpu_available() is True
    assert devices.why_no_gpu() is None
    assert runtime.asked == 1


def test_the_warning_is_about_the_line_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = devices._Found("CuPy is broken", "Mend it")
    monkeypatch.setattr(devices, "_look", lambda: broken)
    devices.gpu_available.cache_clear()
    q = np.ones((1, 4, 2, 16), np.float32)
    try:
        with pytest.warns(RuntimeWarning, match="CuPy is broken") as seen:
            rawattn.attention(q, q, q)
    finally:
        devices.gpu_available.cache_clear()
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.parametrize(
    ("fails", "driver", "says"),
    [
        pytest.param(None, 13000, "the driver sees no GPU", id="count-0"),
        pytest.param(
            CudaError("cudaErrorNoDevice: no CUDA-capable device is detected"),
            13000,
            "sees no GPU (cudaErrorNoDevice)",
            id="no-gpu",
        ),
        pytest.param(
            CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
            0,
            "no NVIDIA driver",
            id="no-driver",
        ),
    ],
)
def test_absence_is_silent(
    runtime: Runtime, fails: Exception | None, driver: int, says: str
) -> None:
    runtime.fails, runtime.driver = fails, driver
    assert devices.gpu_available() is False  # a warning would be an error here
    assert says in str(devices.why_no_gpu())


def test_no_cupy_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    importing(monkeypatch, ModuleNotFoundError("No module named 'cupy'", name="cupy"))
    assert devices.gpu_available() is False
    assert "CuPy is not installed" in str(devices.why_no_gpu())
    assert 'pip install "rawattn[cuda13]"' in str(devices.why_no_gpu())


def check_one_warning(*says: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert devices.gpu_available() is False
            why = str(devices.why_no_gpu())
    (one,) = seen
    assert one.category is RuntimeWarning
    for words in says:
        assert words in str(one.message)
        assert words in why
    assert "NumPy arrays are computed by the CPU" in str(one.message)
    assert "backend='cpu'" in str(one.message)


@pytest.mark.parametrize(
    ("fails", "driver", "says"),
    [
        pytest.param(
            CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
            11040,
            ["the NVIDIA driver is too old", "Update the driver", "older CUDA"],
            id="old-driver",
        ),
        pytest.param(
            CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient"),
            OSError("libcuda.so.1: file too short"),
            ["the driver cannot be asked (OSError: libcuda.so.1: file too short)", "nvidia-smi"],
            id="broken-driver",
        ),
        pytest.param(
            CudaError("cudaErrorSystemNotReady: system not yet initialized"),
            13000,
            ["CUDA does not start (CudaError: cudaErrorSystemNotReady: system not", "nvidia-smi"],
            id="not-ready",
        ),
    ],
)
def test_a_broken_driver_is_warned_of_once(
    runtime: Runtime, fails: Exception, driver: Any, says: list[str]
) -> None:
    runtime.fails, runtime.driver = fails, driver
    check_one_warning(*says)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        pytest.param(
            PermissionError(13, "Permission denied", "/home/me/.cupy"),
            ["importing it failed", "PermissionError", "/home/me/.cupy", "CUPY_CACHE_DIR"],
            id="home",
        ),
        pytest.param(
            ModuleNotFoundError("No module named 'cupy_backends'", name="cupy_backends"),
            ["No module named 'cupy_backends'", "pip install --force-reinstall"],
            id="half-installed",
        ),
        pytest.param(
            ImportError("libnvrtc.so.13: cannot open shared object file"),
            ["libnvrtc.so.13: cannot open shared object file", "pip install --force-reinstall"],
            id="library",
        ),
        pytest.param(ValueError("two\nlines"), ["(ValueError: two lines)"], id="lines"),
    ],
)
def test_a_broken_cupy_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: list[str]
) -> None:
    importing(monkeypatch, error)
    check_one_warning(*says)


def test_the_cause_of_cupys_own_import_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("=====\nFailed to import CuPy.\n" + "many words " * 50)
    error.__cause__ = ImportError("libcudart.so.13: version not found")
    importing(monkeypatch, error)
    why = str(devices.why_no_gpu())
    assert "libcudart.so.13" in why
    assert "many words" not in why


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="needs a file that is no directory")
def test_a_home_that_cannot_be_written() -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    code = """
import warnings
from rawattn._runtime.devices import gpu_available
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert not any(gpu_available() for _ in range(2))
(one,) = [each for each in seen if "rawattn" in str(each.message)]
print(one.message)
"""
    environment = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"}
    environment |= {"HOME": "/dev/null/home", "RAWATTN_CACHE_DIR": "/dev/null/cache"}
    environment["PYTHONPATH"] = str(Path(devices.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "/dev/null/home" in run.stdout
    assert "CUPY_CACHE_DIR" in run.stdout


def test_a_call_for_a_gpu_says_why_there_is_none(runtime: Runtime) -> None:
    runtime.fails, runtime.driver = RuntimeError("cudaErrorInsufficientDriver: old"), 0
    q = np.ones((1, 2, 1, 8), np.float32)
    with pytest.raises(RuntimeError, match=r"^backend: got 'cuda', .*: no NVIDIA driver on this"):
        rawattn.attention(q, q, q, backend="cuda")
