"""NVRTC runs in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rawattn._compile import compiler, nvrtc
from rawattn._compile.compiler import CompileError, Source, compile_source

from .sources import SOURCE

TEXT = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] += 1; }'


def program(text: str = TEXT, *options: str) -> nvrtc.Program:
    return nvrtc.Program(nvrtc.library(), text, {}, ("--gpu-architecture=sm_80", *options))


# A sum in memory, which the optimizer keeps in a register during the loop, except with the option below.
SUM = """extern "C" __global__ void k(float* __restrict__ sum, const float* __restrict__ x, int n) {
  for (int i = 0; i < n; i++) *sum += x[i];
}"""
_FIRST = """
import sys
from rawattn._compile import nvrtc
text = open(sys.argv[1]).read()
options = ["--gpu-architecture=sm_90a"]
def run(compile, *more):
    return compile(nvrtc.Program(nvrtc.library(), text, {}, [*options, *more]))
clean = run(nvrtc.compile_here)
leaving = ["-Xnvvm", "-Xopt", "-Xnvvm", "-disable-licm-promotion"]
if run(nvrtc.compile_here, *leaving).image is None:
    sys.exit("unknown option")
here, apart = run(nvrtc.compile_here), run(nvrtc.compile_apart)
print(here.image == clean.image, apart.image == clean.image)
"""


def test_options_of_others_do_not_reach_our_kernels(tmp_path: Path) -> None:
    """NVRTC keeps options of its optimizer for the programs that its process compiles later."""
    path = tmp_path / "sum.cu"
    path.write_text(SUM)
    environment = {**os.environ, "PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    command = [sys.executable, "-c", _FIRST, str(path)]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if "unknown option" in done.stderr:
        pytest.skip("this NVRTC does not have the option")
    assert done.returncode == 0, done.stderr
    here, apart = done.stdout.split()
    assert apart == "True"
    if here == "True":
        pytest.skip("this NVRTC does not keep the option")


def test_both_ways_give_the_same() -> None:
    assert nvrtc.compile_apart(program()) == nvrtc.compile_here(program())
    wrong = program("nonsense")
    assert nvrtc.compile_apart(wrong) == nvrtc.compile_here(wrong)
    assert "nonsense" in nvrtc.compile_here(wrong).log


@pytest.mark.parametrize("executable", ["", "/usr/bin/game", "/nowhere/python3"])
def test_without_an_interpreter_it_runs_here(
    monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert compile_source(SOURCE, "sm_80").image


def interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Makes a shell script the interpreter of other processes."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_what_other_tools_print_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter(tmp_path, monkeypatch, f'echo "== a tool"; exec {sys.executable} "$@"')
    assert compile_source(SOURCE, "sm_80").image


def test_a_process_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, monkeypatch, "kill -SEGV $$")
    with pytest.raises(CompileError, match=signal.SIGSEGV.name):
        compile_source(SOURCE, "sm_80")


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library", lambda: str(tmp_path / "libnvrtc.so.13"))
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.13: cannot open"):
        compile_source(Source("k", TEXT, "test"), "sm_80")
