"""From source to cubin: the input of NVRTC, what is cached of its result, and the cache key."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn._compile import compiler, nvrtc
from rawattn._compile.compiler import CompileError, Source, compile_source
from tests.compile.sources import SCALE, SOURCE, TEXT, kernel, write

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")


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
        monkeypatch.setattr(nvrtc, "version", lambda: "99.9")
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
