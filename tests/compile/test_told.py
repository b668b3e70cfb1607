"""What users are told about a kernel that does not compile or takes long."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rawattn._compile import compiler, nvrtc
from rawattn._compile.compiler import CompileError, Source, compile_source
from tests.compile.sources import SCALE, SOURCE, kernel, write

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed")


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
    nvrtc.version.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r'pip install "rawattn\[cuda13\]"'):
        compile_source(SOURCE, "sm_80")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[int, int]:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    nvrtc.version.cache_clear()
    monkeypatch.setattr(nvrtc, "_of_cupy", lambda: types.SimpleNamespace(getVersion=absent))
    with pytest.raises(RuntimeError, match=r"libnvrtc\.so\.13.*nvidia-cuda-nvrtc"):
        compile_source(SOURCE, "sm_80")


def test_import_needs_no_cupy() -> None:
    code = "import sys, rawattn._compile.compiler; sys.exit('cupy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


def test_a_failure_is_told_where_its_source_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.cache, "keep_failure", lambda key, files: None)
    with pytest.raises(CompileError, match=r"source: not kept.*\n(.*\n)*.*undefined_0"):
        compile_source(kernel("undefined_0();"), "sm_80")
