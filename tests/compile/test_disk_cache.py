"""Cubins on disk: which are found again, by which process, and which are built anew."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rawattn._compile import cache as _cache
from rawattn._compile import compiler
from rawattn._compile.compiler import compile_source
from tests.compile.sources import SOURCE, TEXT

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")


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
    """Compile in another process; return the cubin's path and whether NVRTC was loaded."""
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
    # A damaged note, or one about a library file that has changed, is replaced by a new look at the library.
    for wrong in ("{", kept.replace('"file": [', '"file": [1')):
        note.write_text(wrong)
        assert in_another_process(kernels) == first
        assert note.read_text() == kept


def test_another_compiler_is_noticed_when_it_compiles(cache: Path, kernels: Path) -> None:
    path, _ = in_another_process(kernels)
    (note,) = cache.glob("compiler-*.json")
    version = json.loads(note.read_text())["version"]
    note.write_text(note.read_text().replace(f'"{version}"', '"1.2"'))
    # Makes the cached kernel one of an older compiler.
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
compiler.nvrtc.version()
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
    compile_source(SOURCE, "sm_86")  # a second warning would be an error here
    assert cubin.path is None
    assert cubin.meta["registers"] > 0
    assert compile_source(SOURCE, "sm_80") == cubin == compiler.find(SOURCE, "sm_80")
    assert len(compiled) == 2


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_does_not_lose_the_kernel(
    cache: Path, compiled: list[str]
) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(RuntimeWarning, match="cannot write its kernel cache"):
        compile_source(SOURCE, "sm_80")
    assert compile_source(SOURCE, "sm_80").image
    assert len(compiled) == 1
