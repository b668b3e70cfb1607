"""From cubin to a function on a device."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import compiler
from rawattn._compile.compiler import Source, compile_source
from rawattn._runtime import kernel
from tests.compile.sources import SOURCE, TEXT

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")


@pytest.mark.parametrize(
    ("capability", "arch"), [("80", "sm_80"), ("89", "sm_89"), ("90", "sm_90a"), ("120", "sm_120")]
)
def test_device_arch(capability: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(cupy.cuda, "Device", lambda ordinal: device)
    assert compiler.device_arch.__wrapped__(0) == arch


def test_threads_load_once(monkeypatch: pytest.MonkeyPatch, compiled: list[str]) -> None:
    loaded = []

    def fake_load(cubin: compiler.Cubin, entry: str, device: int) -> object:
        loaded.append((entry, device))
        time.sleep(0.05)
        return object()

    monkeypatch.setattr(kernel, "_load", fake_load)
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_80")
    functions: list[tuple[int, object]] = []

    def load(device: int) -> None:
        functions.append((device, kernel.load(SOURCE, device)))

    threads = [threading.Thread(target=load, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == [("k", 0), ("k", 1)]
    assert len(set(functions)) == 2
    assert len(functions) == 8
    assert len(compiled) == 1


def test_kernels_of_a_call_are_compiled_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [Source("k", f"{TEXT}// {i}", "test") for i in range(3)]
    together = threading.Barrier(len(sources), timeout=10)
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_80")
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: together.wait())
    monkeypatch.setattr(kernel, "_load", lambda cubin, entry, device: object())
    kernel.load_all([*sources, sources[0]], 7)
    assert len({id(kernel.load(source, 7)) for source in sources}) == 3
    kernel.load_all(sources, 7)  # which would wait in vain for others
    for source in sources:
        del kernel._functions[source, 7]


def test_a_kernel_of_several_that_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_80")
    monkeypatch.setattr(kernel, "_load", lambda cubin, entry, device: object())
    wrong = Source("k", "this is not a kernel", "test")
    with pytest.raises(compiler.CompileError, match="test"):
        kernel.load_all([SOURCE, wrong], 8)
    assert not [key for key in kernel._functions if key[1] == 8]


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["disk", "memory"])
def test_loaded_kernel_runs(source: str, cache: Path) -> None:
    import cupy

    if source == "memory":
        cache.write_text("a file where the directory should be")
        with pytest.warns(RuntimeWarning):
            function = kernel.load(SOURCE, 0)
    else:
        function = kernel.load(SOURCE, 0)
        _cache.clear()  # a loaded kernel no longer needs its file
    with cupy.cuda.Device(0):
        x = cupy.full(1, 21.0, np.float32)
        arguments = kernel.Arguments([struct.pack("<Q", x.data.ptr)])
        function.launch(1, 1, 0, cupy.cuda.get_current_stream().ptr, arguments)
        assert x.get()[0] == 42.0
        function.allow_shared_memory(64 * 1024)
    assert kernel.load(SOURCE, 0) is function


@pytest.mark.gpu
def test_load_from_disk_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [Source("k", f"{TEXT}// {i}", "test") for i in range(4)]
    for source in sources:
        compile_source(source, compiler.device_arch(0))
    monkeypatch.setattr(compiler, "_run_nvrtc", None)
    seconds = []
    for source in sources:
        started = time.perf_counter()
        kernel.load(source, 0)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.030


@pytest.mark.parametrize("why", ["removed", "no UTF-8"])
def test_a_kernel_whose_file_cannot_be_loaded(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another process may clear the cache after the kernel was read. CuPy takes no path with other bytes than UTF-8."""
    import cupy

    def loaded(path: str) -> Any:
        return types.SimpleNamespace(get_function=lambda entry: Path(path.encode().decode()))

    monkeypatch.setattr(cupy.cuda, "Device", contextlib.nullcontext)
    monkeypatch.setattr(cupy, "RawModule", loaded)
    monkeypatch.setattr(kernel, "Kernel", lambda path: path.read_bytes())
    path = tmp_path / ("kernel.cubin" if why == "removed" else "\udce9.cubin")
    if why != "removed":
        path.write_bytes(b"never read")
    assert kernel._load(compiler.Cubin(path, b"image", {}, ""), "k", 0) == b"image"


def test_a_file_that_does_not_load_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import cupy

    def refused(path: str) -> Any:
        raise RuntimeError("no kernel image for this device")

    monkeypatch.setattr(cupy.cuda, "Device", contextlib.nullcontext)
    monkeypatch.setattr(cupy, "RawModule", refused)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(b"image")
    with pytest.raises(RuntimeError, match="no kernel image"):
        kernel._load(compiler.Cubin(path, b"image", {}, ""), "k", 0)


def test_without_threads_kernels_are_compiled_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread can be started while Python ends, or if the process has as many as it may."""

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    sources = [Source("k", f"{TEXT}// {i}", "test") for i in range(2)]
    compiled: list[Source] = []
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_80")
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: compiled.append(source))
    monkeypatch.setattr(kernel, "_load", lambda cubin, entry, device: object())
    monkeypatch.setattr(kernel.ThreadPoolExecutor, "submit", refused)
    kernel.load_all(sources, 7)
    for source in sources:
        kernel.load(source, 7)
    assert compiled == sources
