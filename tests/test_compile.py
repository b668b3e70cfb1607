from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import compiler
from rawattn._compile.compiler import CompileError, Source, compile_source

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")

TEXT = '#include "tile/scale.cuh"\nextern "C" __global__ void k(float* x) { *x = scale(*x); }\n'
SCALE = "#pragma once\nconstexpr float scale(float x) { return 2.0f * x; }\n"
SOURCE = Source("k", TEXT, "test kernel k")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(path))
    monkeypatch.setattr(_cache, "_warned", set())
    for memory in ("_in_memory", "_functions", "_loading"):
        monkeypatch.setattr(compiler, memory, {})
    monkeypatch.setattr(compiler, "_compiler_version", [])
    return path


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device sources of our own, with the one header of SOURCE."""
    root = tmp_path / "kernels_cu"
    write(root, "tile/scale.cuh", SCALE)
    monkeypatch.setattr(compiler, "kernels_dir", lambda: root)
    return root


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The text of everything that NVRTC compiled."""
    texts: list[str] = []
    run_nvrtc = compiler._run_nvrtc

    def counting(request: Any) -> tuple[bytes | None, str]:
        texts.append(request.text)
        return run_nvrtc(request)

    monkeypatch.setattr(compiler, "_run_nvrtc", counting)
    return texts


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def kernel(body: str, before: str = "") -> Source:
    return Source("k", f'{before}\nextern "C" __global__ void k(float* x) {{ {body} }}\n', "test")


# The cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_without_a_gpu(arch: str, cache: Path) -> None:
    cubin = compile_source(SOURCE, arch)
    assert cubin.image[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", cubin.image, 18)[0] == 190  # EM_CUDA
    assert cubin.path is not None
    assert cubin.path.read_bytes() == cubin.image
    assert cubin.path.parent.parent == cache
    assert (cubin.path.parent / "kernel.cu").read_text() == TEXT
    assert (cubin.path.parent / "log.txt").read_text() == cubin.log
    assert json.loads((cubin.path.parent / "meta.json").read_text()) == cubin.meta
    assert cubin.meta["summary"] == "test kernel k"
    assert cubin.meta["entry"] == "k"
    assert cubin.meta["arch"] == arch
    assert list(cubin.meta["headers"]) == ["tile/scale.cuh"]
    assert 1 <= cubin.meta["registers"] <= 255
    assert cubin.meta["spills"] == cubin.meta["stack"] == cubin.meta["smem"] == 0
    assert cubin.meta["seconds"] >= 0
    assert f"'{arch}'" in cubin.log


def test_hopper_instructions_need_the_a() -> None:
    source = kernel('asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");')
    assert compile_source(source, "sm_90a").image
    with pytest.raises(CompileError, match="setmaxnreg"):
        compile_source(source, "sm_90")


def test_elf_is_whole() -> None:
    image = compile_source(SOURCE, "sm_90a").image
    segments, sections = struct.unpack_from("<QQ", image, 32)
    segment_size, nsegments, section_size, nsections = struct.unpack_from("<4H", image, 54)
    assert len(image) == max(
        segments + segment_size * nsegments, sections + section_size * nsections
    )
    assert compiler._whole_elf(image) == image  # as from a CuPy that drops nothing
    assert compiler._whole_elf(image[:-1]) == image


def test_meta_tells_spills_stack_and_shared_memory() -> None:
    body = """
      __shared__ float tile[256];
      tile[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      float live[96];
      for (int i = 0; i < 96; i++) live[i] = x[i * 32 + threadIdx.x];
      for (int round = 0; round < 1000; round++) {
        _Pragma("unroll") for (int i = 0; i < 96; i++) live[i] += live[(i * 7 + 1) % 96] * tile[i];
      }
      for (int i = 0; i < 96; i++) x[i * 32 + threadIdx.x] = live[i];
    """
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) k(float* x) {{ {body} }}'
    meta = compile_source(Source("k", text, "spills"), "sm_90a").meta
    assert meta["registers"] == 32
    assert meta["spills"] > 0
    assert meta["stack"] > 0
    assert meta["smem"] == 1024


def test_ptxas_report_is_that_of_the_entry() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     48 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 512 bytes smem"""
    assert compiler._ptxas_report(log, "second") == {
        "registers": 168,
        "spills": 44,
        "stack": 48,
        "smem": 512,
    }
    assert compiler._ptxas_report(log, "first")["registers"] == 8
    assert compiler._ptxas_report("another format", "first") == {}


# Headers


def test_headers_are_found_through_headers(kernels: Path) -> None:
    write(kernels, "attn/a.cuh", '#pragma once\n  #  include  "attn/b.cuh"  // and why\nint one();')
    write(kernels, "attn/b.cuh", '#pragma once\n#include "attn/a.cuh"\nconstexpr int two = 2;')
    source = kernel("x[two] = 1;", '#include "attn/a.cuh"')
    assert set(compile_source(source, "sm_80").meta["headers"]) == {"attn/a.cuh", "attn/b.cuh"}


@pytest.mark.parametrize("name", ["attn/none.cuh", "attn", "../secret.cuh", "/etc/passwd"])
def test_unknown_include(name: str, kernels: Path) -> None:
    write(kernels, "attn/a.cuh", f'#include "{name}"')
    (kernels.parent / "secret.cuh").write_text("")
    with pytest.raises(CompileError) as error:
        compile_source(Source("k", '#include "attn/a.cuh"', "test kernel k"), "sm_80")
    for part in ("attn/a.cuh", name, str(kernels), "test kernel k"):
        assert part in str(error.value)


def test_every_shipped_kernel_finds_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    root = compiler.kernels_dir()
    files = [path for path in root.rglob("*") if path.suffix in (".cu", ".cuh")]
    assert files
    for path in files:
        compiler._headers(Source("k", path.read_text(), str(path)))


# The key


@pytest.mark.parametrize("change", ["text", "header", "arch", "nvrtc", "options"])
def test_what_reaches_the_compiler_changes_the_key(
    change: str, kernels: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compile_source(SOURCE, "sm_80")
    source, arch = SOURCE, "sm_80"
    if change == "text":
        source = Source("k", TEXT + " ", SOURCE.summary)
    elif change == "header":
        write(kernels, "tile/scale.cuh", SCALE.replace("2.0f", "3.0f"))
    elif change == "arch":
        arch = "sm_86"
    elif change == "nvrtc":
        monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9")
        monkeypatch.setattr(compiler, "_compiler_version", ["99.9"])
    else:
        monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "--fmad=false"))
    after = compile_source(source, arch)
    assert len(compiled) == 2
    assert after.path != before.path
    if change == "header":
        assert after.image != before.image


def test_nothing_else_changes_the_key(
    kernels: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = compile_source(SOURCE, "sm_80")
    write(kernels, "tile/unrelated.cuh", "// a comment")
    (kernels / "tile/scale.cuh").touch()
    moved = kernels.rename(tmp_path / "moved")
    monkeypatch.setattr(compiler, "kernels_dir", lambda: moved)
    assert compile_source(SOURCE, "sm_80") == before
    assert compile_source(Source("k", TEXT, "in other words"), "sm_80") == before
    assert len(compiled) == 1


@pytest.mark.parametrize("value", [np.array("k"), np.str_("k"), b"k", 1, None])
@pytest.mark.parametrize("field", ["entry", "text", "summary"])
def test_source_is_plain_strings(field: str, value: object) -> None:
    fields: dict[str, Any] = {"entry": "k", "text": TEXT, "summary": "test", field: value}
    with pytest.raises(TypeError, match=f"Source.{field}: got {type(value).__name__}"):
        Source(**fields)


# The disk cache


def test_hit_runs_no_nvrtc_and_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_source(SOURCE, "sm_90a")
    monkeypatch.setattr(compiler, "_run_nvrtc", None)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        assert compile_source(SOURCE, "sm_90a") == first
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.030


IN_ANOTHER_PROCESS = """
from pathlib import Path
from rawattn._compile import compiler
compiler.kernels_dir = lambda: Path({kernels!r})
source = compiler.Source("k", {text!r}, "test")
cubin = compiler.compile_source(source, "sm_80")
print(cubin.path, "libnvrtc" in Path("/proc/self/maps").read_text())
"""


def in_another_process(kernels: Path, text: str = TEXT) -> tuple[str, bool]:
    """Where the cubin is, and whether NVRTC was loaded for it."""
    script = IN_ANOTHER_PROCESS.format(kernels=str(kernels), text=text)
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    path, loaded = done.stdout.split()
    return path, loaded == "True"


def test_hit_does_not_load_the_compiler(cache: Path, kernels: Path) -> None:
    first = in_another_process(kernels)
    assert first[1]
    assert in_another_process(kernels) == (first[0], False)
    (note,) = cache.glob("compiler-*.json")
    kept = note.read_text()
    # What is damaged, or of a library that changed since, is looked up anew.
    for wrong in ("{", kept.replace('"file": [', '"file": [1')):
        note.write_text(wrong)
        assert in_another_process(kernels) == first
        assert note.read_text() == kept


def test_another_compiler_is_noticed_when_it_compiles(cache: Path, kernels: Path) -> None:
    path, _ = in_another_process(kernels)
    (note,) = cache.glob("compiler-*.json")
    version = json.loads(note.read_text())["version"]
    note.write_text(note.read_text().replace(f'"{version}"', '"1.2"'))
    # As if the kernel in the cache were of this older compiler.
    other = f"// another\n{TEXT}"
    compiled, loaded = in_another_process(kernels, other)
    assert loaded
    assert json.loads((Path(compiled).parent / "meta.json").read_text())["nvrtc"] == version
    assert json.loads(note.read_text())["version"] == version
    assert in_another_process(kernels) == (path, False)
    assert in_another_process(kernels, other) == (compiled, False)


def test_clear_removes_the_note(cache: Path, kernels: Path) -> None:
    in_another_process(kernels)
    assert _cache.clear() == 1
    assert not list(cache.iterdir())


def test_find_compiles_nothing(compiled: list[str]) -> None:
    assert compiler.find(SOURCE, "sm_80") is None
    cubin = compile_source(SOURCE, "sm_80")
    assert compiler.find(SOURCE, "sm_80") == cubin
    assert len(compiled) == 1


@pytest.mark.parametrize("name", ["kernel.cu", "kernel.cubin", "log.txt", "meta.json"])
def test_truncated_entry_is_rebuilt(name: str, compiled: list[str]) -> None:
    first = compile_source(SOURCE, "sm_80")
    assert first.path is not None
    damaged = first.path.parent / name
    damaged.write_bytes(damaged.read_bytes()[:-3])
    again = compile_source(SOURCE, "sm_80")
    assert len(compiled) == 2
    assert again.image == first.image == again.path.read_bytes()
    assert compile_source(SOURCE, "sm_80") == again
    assert len(compiled) == 2


def test_processes_that_start_at_once_compile_once(
    tmp_path: Path, cache: Path, kernels: Path
) -> None:
    script = f"""
import sys, time
from pathlib import Path
from rawattn._compile import compiler
compiler.kernels_dir = lambda: Path({str(kernels)!r})
run_nvrtc = compiler._run_nvrtc
def counting(request):
    with open({str(tmp_path / "compiled")!r}, "a") as file: file.write("x")
    time.sleep(0.3)
    return run_nvrtc(request)
compiler._run_nvrtc = counting
compiler.nvrtc_version()
print("ready", flush=True)
sys.stdin.readline()
cubin = compiler.compile_source(compiler.Source("k", {TEXT!r}, "test"), "sm_80")
print(cubin.path)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", script],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                )
            )
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        paths = set()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            paths.add(process.communicate(timeout=60)[0].strip())
            assert process.returncode == 0
    assert len(paths) == 1
    assert Path(paths.pop()).is_file()
    assert (tmp_path / "compiled").read_text() == "x"
    (note,) = (path.name for path in cache.iterdir() if not path.is_dir())
    assert note.startswith("compiler-")


def test_unwritable_directory_keeps_kernels_in_memory(cache: Path, compiled: list[str]) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match="RAWATTN_CACHE_DIR") as record:
        cubin = compile_source(SOURCE, "sm_80")
    assert len(record) == 1
    compile_source(SOURCE, "sm_86")  # a second warning would be an error
    assert cubin.path is None
    assert cubin.meta["registers"] > 0
    assert compile_source(SOURCE, "sm_80") == cubin == compiler.find(SOURCE, "sm_80")
    assert len(compiled) == 2


# What a person is told


def test_failure_shows_kernel_summary_log_and_source(cache: Path) -> None:
    lines = "\n".join(f"int a{i} = undefined_{i};" for i in range(40))
    with pytest.raises(CompileError) as error:
        compile_source(Source("forward", lines, "portable forward bfloat16 D=128"), "sm_90a")
    message = str(error.value)
    assert "forward did not compile for sm_90a" in message
    assert "portable forward bfloat16 D=128" in message
    assert "undefined_39" in message
    assert "undefined_20" not in message
    head, tail = message.split("last lines of the log:\n")
    assert len(tail.splitlines()) == 20
    kept = Path(head.partition("source: ")[2].splitlines()[0])
    assert kept.is_relative_to(cache)
    assert kept.read_text() == lines
    assert "undefined_0" in (kept.parent / "log.txt").read_text()


def test_failure_is_not_cached(kernels: Path) -> None:
    write(kernels, "tile/scale.cuh", "#error not yet")
    with pytest.raises(CompileError, match="not yet"):
        compile_source(SOURCE, "sm_80")
    write(kernels, "tile/scale.cuh", SCALE)
    assert compile_source(SOURCE, "sm_80").image


def test_error_in_a_header_names_it(kernels: Path) -> None:
    write(kernels, "tile/scale.cuh", SCALE.replace("return", "retrun"))
    with pytest.raises(CompileError, match=r"tile/scale\.cuh\(2\): error"):
        compile_source(SOURCE, "sm_80")


def test_missing_entry() -> None:
    text = kernel("*x = 1;").text
    with pytest.raises(CompileError, match='no extern "C" __global__ function is named forward'):
        compile_source(Source("forward", text, "test"), "sm_80")
    mangled = Source("k", text.replace('extern "C" ', ""), "test")
    with pytest.raises(CompileError, match="named k"):
        compile_source(mangled, "sm_80")


def test_unknown_architecture() -> None:
    with pytest.raises(CompileError, match="sm_999") as error:
        compile_source(SOURCE, "sm_999")
    assert "--gpu-architecture" in str(error.value)


def test_a_slow_compile_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rawattn"):
        compile_source(SOURCE, "sm_80")
        assert caplog.records == []
        monkeypatch.setattr(compiler, "_SLOW_SECONDS", 0.0)
        compile_source(SOURCE, "sm_86")
        compile_source(SOURCE, "sm_86")
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "test kernel k for sm_86" in record.getMessage()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_slow_compile_without_logging(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(compiler, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(logging.getLogger("rawattn"), "propagate", False)  # past pytest's handlers
    compile_source(SOURCE, "sm_80")
    assert stderr.getvalue().count("\n") == terminal
    assert ("compiled test kernel k for sm_80" in stderr.getvalue()) == terminal


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r'pip install "rawattn\[cuda13\]"'):
        compile_source(SOURCE, "sm_80")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[int, int]:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    compiler.nvrtc_version.cache_clear()
    monkeypatch.setattr(compiler, "_nvrtc", lambda: types.SimpleNamespace(getVersion=absent))
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.13.*nvidia-cuda-nvrtc"):
        compile_source(SOURCE, "sm_80")


def test_import_needs_no_cupy() -> None:
    code = "import sys, rawattn._compile.compiler; sys.exit('cupy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


# Loading


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

    monkeypatch.setattr(compiler, "_load", fake_load)
    monkeypatch.setattr(compiler, "device_arch", lambda device: "sm_80")
    functions: list[tuple[int, object]] = []

    def load(device: int) -> None:
        functions.append((device, compiler.load(SOURCE, device)))

    threads = [threading.Thread(target=load, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loaded) == [("k", 0), ("k", 1)]
    assert len(set(functions)) == 2
    assert len(functions) == 8
    assert len(compiled) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_loaded_kernel_runs(place: str, cache: Path) -> None:
    import cupy

    if place == "memory":
        cache.write_text("a file where the directory should be")
        with pytest.warns(RuntimeWarning):
            function = compiler.load(SOURCE, 0)
    else:
        function = compiler.load(SOURCE, 0)
        _cache.clear()  # a loaded kernel needs its file no more
    with cupy.cuda.Device(0):
        x = cupy.full(1, 21.0, np.float32)
        function(1, 1, struct.pack("<Q", x.data.ptr))
        assert x.get()[0] == 42.0
        function.allow_shared_memory(64 * 1024)
    assert compiler.load(SOURCE, 0) is function


@pytest.mark.gpu
def test_load_from_disk_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [Source("k", f"{TEXT}// {i}", "test") for i in range(4)]
    for source in sources:
        compile_source(source, compiler.device_arch(0))
    monkeypatch.setattr(compiler, "_run_nvrtc", None)
    seconds = []
    for source in sources:
        started = time.perf_counter()
        compiler.load(source, 0)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.030
