from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rawattn
from rawattn import cli
from rawattn._cli import info
from rawattn._compile import cache as _cache
from tests.command import Output

KEY = "0123456789abcdef" * 4

pytestmark = pytest.mark.usefixtures("kernel_cache")


def publish(key: str = KEY, **meta: Any) -> _cache.Entry:
    default = {"summary": "portable forward", "arch": "sm_90a", "seconds": 1.25}
    files = {"kernel.cu": b"x" * 1000, "kernel.cubin": b"y" * 1048}
    entry = _cache.publish(key, files, {**default, **meta})
    assert entry is not None
    return entry


# The command itself


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0
        out = capsys.readouterr().out
        for name in ("info", "demo", "check", "bench", "compile", "cache"):
            assert f"    {name} " in out
    code = """
import sys
from rawattn import cli
try:
    cli.main(["--help"])
except SystemExit:
    sys.exit(any(name.startswith(("rawattn._cli", "cupy")) for name in sys.modules))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


@pytest.mark.parametrize("name", ["info", "demo", "check", "bench", "compile", "cache"])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"rawattn {name}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["inof"], ["--path"], ["info", "--path"], ["--", "inof"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: rawattn" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"rawattn {rawattn.__version__}\n"


def test_as_a_module() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-m", "rawattn", "--version"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert shown.stdout == f"rawattn {rawattn.__version__}\n"


def test_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert cli.main(["info"]) == 130


# info


@pytest.fixture(autouse=True)
def _gpus_asked_for_anew() -> Iterator[None]:
    info.devices._look.cache_clear()
    yield
    info.devices._look.cache_clear()


def facts(out: str) -> dict[str, str]:
    lines = [line for line in out.splitlines() if line]
    return {line[:13].strip(): line[14:].strip() for line in lines}


def test_info(rawattn_command: Output, kernel_cache: Path) -> None:
    publish()
    shown = facts(rawattn_command("info"))
    assert shown["rawattn"] == rawattn.__version__
    assert shown["kernel cache"] == f"1 kernel, 2.0 KiB in {kernel_cache}"
    assert shown["cache access"] == "writable"
    assert {"Python", "numpy", "ml_dtypes", "torch", "jax", "CuPy"} <= set(shown)


def test_info_lists_frameworks_without_importing_them(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"numpy": "2.4", "torch": "2.13.0+cpu", "jax": None}

    def version(distribution: str) -> str:
        if (found := versions.get(distribution)) is None:
            raise info.metadata.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(info.metadata, "version", version)
    before = {"torch", "jax"} & set(sys.modules)
    shown = facts(rawattn_command("info"))
    assert (shown["numpy"], shown["torch"]) == ("2.4", "2.13.0+cpu")
    assert shown["jax"] == shown["ml_dtypes"] == "not installed"
    assert {"torch", "jax"} & set(sys.modules) == before


@pytest.mark.parametrize(
    "broken",
    [
        "info.metadata.version",
        "info.platform.platform",
        "info.devices.why_no_gpu",
        "info.nvrtc.version",
        "info.cache.entries",
        "info.cache.why_unwritable",
    ],
)
def test_info_survives_each_of_its_parts(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch, runtime: Runtime, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("very\nbroken")

    names = set(facts(rawattn_command("info")))
    monkeypatch.setattr(f"rawattn._cli.{broken}", fail)
    shown = facts(rawattn_command("info"))
    unknown = {name for name, value in shown.items() if "ValueError: very broken" in value}
    assert unknown
    if broken == "info.devices.why_no_gpu":
        assert {"numpy", "GPU", "kernel cache", "cache access"} <= set(shown)
    else:
        assert set(shown) == names
        assert len(unknown) < len(names) - 3


@pytest.mark.parametrize("method", ["runtimeGetVersion", "driverGetVersion", "getDeviceProperties"])
def test_info_survives_each_question_to_cuda(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch, runtime: Runtime, method: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cudaErrorUnknown: unknown error")

    runtime.devices = ("NVIDIA H200",)
    monkeypatch.setattr(Runtime, method, fail)
    shown = facts(rawattn_command("info"))
    assert {"CUDA runtime", "NVRTC", "driver", "GPU 0", "kernel cache"} <= set(shown)
    assert sum("cudaErrorUnknown" in value for value in shown.values()) == 1


def test_info_where_cupy_cannot_be_imported(
    rawattn_command: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cupy":
                raise PermissionError(13, "Permission denied", "/home/me/.cupy")

    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    shown = facts(rawattn_command("info"))
    assert "Permission denied: '/home/me/.cupy'" in shown["CuPy"]
    assert "CUPY_CACHE_DIR" in shown["CuPy"]
    assert "CPU backend" in shown["GPU"]


def test_info_names_nvrtc(rawattn_command: Output) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    version, path = facts(rawattn_command("info"))["NVRTC"].split()
    assert version.replace(".", "").isdigit()
    assert Path(path).is_file()
    assert "libnvrtc.so" in path


def test_info_without_cupy(rawattn_command: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cupy":
                raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    shown = facts(rawattn_command("info"))
    assert "not installed" in shown["CuPy"]
    assert "pip install" in shown["CuPy"]
    assert "CPU backend" in shown["GPU"]


class Runtime(types.SimpleNamespace):
    """As much of cupy.cuda.runtime as `info` asks."""

    devices: tuple[str, ...] = ()
    driver = 13000

    def runtimeGetVersion(self) -> int:
        return 13020

    def driverGetVersion(self) -> int:
        return self.driver

    def getDeviceCount(self) -> int:
        if not self.driver:
            raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        if not self.devices:
            raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return len(self.devices)

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        name = self.devices[device].encode()
        return {"name": name, "multiProcessorCount": 132, "totalGlobalMem": 150 * 10**9}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    cuda = types.SimpleNamespace(runtime=fake)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    monkeypatch.setattr(info.nvrtc, "version", lambda: "13.2")
    monkeypatch.setattr(info.compiler, "device_arch", lambda device: "sm_90a")
    return fake


def test_info_with_gpus(rawattn_command: Output, runtime: Runtime) -> None:
    runtime.devices = ("NVIDIA H200", "NVIDIA H200 NVL")
    shown = facts(rawattn_command("info"))
    assert shown["GPU 0"] == "NVIDIA H200, sm_90a, 132 SMs, 139.7 GiB"
    assert shown["GPU 1"].startswith("NVIDIA H200 NVL, sm_90a")
    assert shown["CUDA runtime"] == "13.2"
    assert shown["driver"].endswith("CUDA up to 13.0")
    assert "GPU" not in shown


@pytest.mark.parametrize("driver", [0, 13000])
def test_info_without_gpu(rawattn_command: Output, runtime: Runtime, driver: int) -> None:
    runtime.driver = driver
    shown = facts(rawattn_command("info"))
    assert shown["GPU"].startswith("none")
    assert "CPU backend" in shown["GPU"]
    assert ("cudaErrorNoDevice" in shown["GPU"]) == bool(driver)
    assert ("no NVIDIA driver" in shown["driver"]) != bool(driver)


def test_info_without_nvrtc(
    rawattn_command: Output, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> str:
        raise RuntimeError("NVRTC was not found")

    monkeypatch.setattr(info.nvrtc, "version", absent)
    assert "NVRTC was not found" in facts(rawattn_command("info"))["NVRTC"]


@pytest.mark.gpu
def test_info_on_this_gpu(rawattn_command: Output) -> None:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert facts(rawattn_command("info"))["GPU 0"].startswith(name)


# cache


def test_cache_table(rawattn_command: Output, kernel_cache: Path) -> None:
    publish(registers=168, spills=2048)
    publish("f" * 64, summary="another compiler's log")
    damaged = publish("e" * 64)
    (damaged.path / "kernel.cu").unlink()
    for position, path in enumerate(
        (kernel_cache / KEY[:32], kernel_cache / ("f" * 32), damaged.path)
    ):
        os.utime(path, (1e9 - position, 1e9 - position))
    header, *rows, total = rawattn_command("cache").splitlines()
    assert header.split()[:4] == ["kernel", "arch", "registers", "spills"]
    first, second, third = (" ".join(row.split()) for row in rows)
    assert first.startswith("portable forward sm_90a 168 2.0 KiB 1.25 s 2.0 KiB ")
    assert first.endswith(KEY[:32])
    assert second.startswith("another compiler's log sm_90a - - 1.25 s")
    assert third.startswith("(damaged")
    assert total == f"3 kernels, 4.0 KiB in {kernel_cache}"


def test_cache_empty(rawattn_command: Output, kernel_cache: Path) -> None:
    assert rawattn_command("cache") == f"0 kernels, 0 B in {kernel_cache}\n"
    assert not kernel_cache.exists()


def test_cache_path(rawattn_command: Output, kernel_cache: Path) -> None:
    assert rawattn_command("cache", "--path") == f"{kernel_cache}\n"


def test_cache_clear(rawattn_command: Output, kernel_cache: Path) -> None:
    publish()
    assert rawattn_command("cache", "--clear") == f"1 kernel removed from {kernel_cache}\n"
    assert list(kernel_cache.iterdir()) == []


def test_cache_that_cannot_be_listed(rawattn_command: Output, kernel_cache: Path) -> None:
    kernel_cache.write_text("a file where the directory should be")
    for argv in (["cache"], ["cache", "--clear"]):
        assert rawattn_command(*argv, status=1) == ""
        assert "rawattn cache: " in rawattn_command.err
        assert str(kernel_cache) in rawattn_command.err
        assert "RAWATTN_CACHE_DIR" in rawattn_command.err
    shown = facts(rawattn_command("info"))
    assert str(kernel_cache) in shown["kernel cache"]
    assert f"not writable ({kernel_cache}: Not a directory)" in shown["cache access"]
    assert "RAWATTN_CACHE_DIR" in shown["cache access"]


@pytest.mark.parametrize("suffix", ["", ".failed"])
def test_cache_clear_leaves_the_folder_of_somebody_else(
    rawattn_command: Output, kernel_cache: Path, suffix: str
) -> None:
    publish("f" * 64)
    thesis = kernel_cache / f"{KEY[:32]}{suffix}" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("mine")
    assert rawattn_command("cache").endswith(f"\n1 kernel, 2.0 KiB in {kernel_cache}\n")
    assert rawattn_command("cache", "--clear") == f"1 kernel removed from {kernel_cache}\n"
    assert list(kernel_cache.rglob("*")) == [thesis.parent, thesis]
