from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import rawattn
from rawattn import _kernels, cli
from rawattn._cli import info, table
from rawattn._cli.progress import Progress
from rawattn._compile import cache as _cache
from rawattn._compile.compiler import Source

KEY = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    return path


def publish(key: str = KEY, **meta: Any) -> _cache.Entry:
    default = {"summary": "portable forward", "arch": "sm_90a", "seconds": 1.25}
    files = {"kernel.cu": b"x" * 1000, "kernel.cubin": b"y" * 1048}
    entry = _cache.publish(key, files, {**default, **meta})
    assert entry is not None
    return entry


class Output:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str, status: int = 0) -> str:
        assert cli.main(argv) == status
        out, self.err = self._capsys.readouterr()
        return out


@pytest.fixture
def rawattn_command(capsys: pytest.CaptureFixture[str]) -> Output:
    return Output(capsys)


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


def test_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "run", interrupt)
    assert cli.main(["info"]) == 130


# info


def facts(out: str) -> dict[str, str]:
    lines = [line for line in out.splitlines() if line]
    return {line[:13].strip(): line[14:].strip() for line in lines}


def test_info(rawattn_command: Output, cache: Path) -> None:
    publish()
    shown = facts(rawattn_command("info"))
    assert shown["rawattn"] == rawattn.__version__
    assert shown["kernel cache"] == f"1 kernel, 2.0 KiB in {cache}"
    assert {"Python", "numpy", "ml_dtypes", "CuPy"} <= set(shown)


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
    assert shown["CuPy"].startswith("not installed")
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
    monkeypatch.setattr(info.compiler, "nvrtc_version", lambda: "13.2")
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

    monkeypatch.setattr(info.compiler, "nvrtc_version", absent)
    assert facts(rawattn_command("info"))["NVRTC"] == "NVRTC was not found"


@pytest.mark.gpu
def test_info_on_this_gpu(rawattn_command: Output) -> None:
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert facts(rawattn_command("info"))["GPU 0"].startswith(name)


# cache


def test_cache_table(rawattn_command: Output, cache: Path) -> None:
    publish(registers=168, spills=2048)
    publish("f" * 64, summary="another compiler's log")
    damaged = publish("e" * 64)
    (damaged.path / "kernel.cu").unlink()
    for position, path in enumerate((cache / KEY[:32], cache / ("f" * 32), damaged.path)):
        os.utime(path, (1e9 - position, 1e9 - position))
    header, *rows, total = rawattn_command("cache").splitlines()
    assert header.split()[:4] == ["kernel", "arch", "registers", "spills"]
    first, second, third = (" ".join(row.split()) for row in rows)
    assert first.startswith("portable forward sm_90a 168 2.0 KiB 1.25 s 2.0 KiB ")
    assert first.endswith(KEY[:32])
    assert second.startswith("another compiler's log sm_90a - - 1.25 s")
    assert third.startswith("(damaged")
    assert total == f"3 kernels, 4.0 KiB in {cache}"


def test_cache_empty(rawattn_command: Output, cache: Path) -> None:
    assert rawattn_command("cache") == f"0 kernels, 0 B in {cache}\n"
    assert not cache.exists()


def test_cache_path(rawattn_command: Output, cache: Path) -> None:
    assert rawattn_command("cache", "--path") == f"{cache}\n"


def test_cache_clear(rawattn_command: Output, cache: Path) -> None:
    publish()
    assert rawattn_command("cache", "--clear") == f"1 kernel removed from {cache}\n"
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_listed(rawattn_command: Output, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    for argv in (["cache"], ["cache", "--clear"]):
        assert rawattn_command(*argv, status=1) == ""
        assert "rawattn cache: " in rawattn_command.err
        assert str(cache) in rawattn_command.err
    assert str(cache) in facts(rawattn_command("info"))["kernel cache"]


# compile


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")

    def source(name: str) -> Source:
        text = f'extern "C" __global__ void {name}(float* x) {{ *x = 1; }}'
        return Source(name, text, f"variant {name}")

    listed = [source("one"), source("two")]
    monkeypatch.setattr(
        _kernels,
        "common_variants",
        lambda arch, every=False: [*listed, *([source("rare")] if every else [])],
    )
    return listed


@pytest.mark.usefixtures("variants")
def test_compile_fills_the_cache(rawattn_command: Output, cache: Path) -> None:
    out = rawattn_command("compile", "--arch", "sm_80", "sm_90a", "--jobs", "1")
    assert out.startswith("4 compiled in ")
    assert out.endswith(f"0 were there, 0 failed: {cache}\n")
    assert "[4/4] " in rawattn_command.err
    assert "variant one: " in rawattn_command.err
    entries = [entry for _, entry in _cache.entries() if entry]
    compiled = {(entry.meta["entry"], entry.meta["arch"]) for entry in entries}
    assert compiled == {(k, arch) for k in ("one", "two") for arch in ("sm_80", "sm_90a")}

    out = rawattn_command("compile", "--arch", "sm_80", "--all-variants")
    assert out.startswith("1 compiled in ")
    assert ", 2 were there, 0 failed" in out


def test_compile_reports_every_failure(rawattn_command: Output, variants: list[Source]) -> None:
    variants.append(Source("bad", "int x = y;", "variant bad"))
    out = rawattn_command("compile", "--arch", "sm_80", status=1)
    assert out.startswith("2 compiled in ")
    assert ", 1 failed" in out
    assert 'identifier "y" is undefined' in rawattn_command.err
    assert "sm_80 variant bad: failed" in rawattn_command.err


@pytest.mark.usefixtures("variants")
def test_compile_into_an_unwritable_directory(rawattn_command: Output, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    out = rawattn_command("compile", "--arch", "sm_80", "--jobs", "1", status=1)
    assert out.startswith("0 compiled in ")
    assert "cannot be written" in rawattn_command.err


@pytest.mark.usefixtures("variants")
def test_compile_unknown_architecture(rawattn_command: Output) -> None:
    rawattn_command("compile", "--arch", "sm_42", status=1)
    assert "--arch: got sm_42, expected one of sm_80" in rawattn_command.err


@pytest.mark.usefixtures("variants")
def test_compile_for_the_gpus_here(
    rawattn_command: Output, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    rawattn_command("compile", status=1)
    assert "--arch sm_90a" in rawattn_command.err
    runtime.devices = ("NVIDIA H200", "NVIDIA H200")
    monkeypatch.setattr(info.compiler, "nvrtc_version", lambda: "13.2")
    monkeypatch.setattr("rawattn._cli.compile._compile_all", lambda jobs, processes: [])
    assert rawattn_command("compile").startswith("2 compiled")


@pytest.mark.parametrize("jobs", ["0", "-1", "many"])
def test_compile_jobs(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["compile", "--arch", "sm_80", "--jobs", jobs])
    assert stop.value.code == 2
    assert "--jobs" in capsys.readouterr().err


# Progress and tables


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_file() -> None:
    stream = io.StringIO()
    with Progress(2, stream) as progress:
        progress.step("first")
        assert stream.getvalue() == "[1/2] first\n"
        progress.step("second")
    assert stream.getvalue() == "[1/2] first\n[2/2] second\n"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with Progress(2, stream) as progress:
        progress.step("first")
        progress.step("second " + "x" * 100)
    start, *drawn = stream.getvalue().split("\r")
    assert start == ""
    assert [line.count("#") for line in drawn] == [0, 12, 24]
    assert "1/2" in drawn[1]
    assert "first" in drawn[1]
    assert all(len(line.partition("\x1b")[0]) < 60 for line in drawn)
    assert drawn[-1].endswith("\n")


def test_progress_of_nothing() -> None:
    with Progress(0, Terminal()):
        pass


def test_table() -> None:
    text = table.render(("name", "n"), [("a", "1"), ("longer", "100")])
    assert text == "name      n\na         1\nlonger  100"
    assert table.render(("name", "n"), []) == "name  n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5120.0 GiB"),
    ],
)
def test_size(nbytes: int, text: str) -> None:
    assert table.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-2, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (2e6, "23 d")]
)
def test_age(seconds: float, text: str) -> None:
    assert table.age(seconds) == text
