"""Runs NVRTC, for each program in a process of its own.

NVRTC keeps options that reach its optimizer (`-Xnvvm`) for all later programs of a process, whoever compiles them, and no
option sets them back. cuDNN passes such options. A kernel that was compiled after them, in the same process, took up to 1.3
times as long, and stayed so in the disk cache.

That process runs this file as a script, so the file imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# What comes before the result of the other process in its output, where tools that watch processes may write too.
_MARK = b"\0compiled\0"
_LIBRARY = re.compile(r"libnvrtc(\.alt)?\.so[.\d]*")


class Program(NamedTuple):
    """What NVRTC compiles. library: the path of the NVRTC to run. headers: by the name in the `#include`."""

    library: str
    text: str
    headers: Mapping[str, str]
    options: Sequence[str]


class Compiled(NamedTuple):
    """image: the cubin, None if the program did not compile."""

    image: bytes | None
    log: str


@functools.cache
def version() -> str:
    """Version of the NVRTC library that CuPy finds and loads, such as "13.0"."""
    try:
        return _dotted(_of_cupy().getVersion())
    except RuntimeError as error:
        raise RuntimeError(
            f"CUDA's run-time compiler NVRTC was not found: {error}. Install the CUDA toolkit, or "
            "pip install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12 (CUDA 12)."
        ) from error


@functools.cache
def library() -> str:
    """The path of that library."""
    wanted = _dotted(_of_cupy().getVersion())
    for path in sorted(loaded()):
        if _version(ctypes.CDLL(path)) == wanted:
            return path
    return f"libnvrtc.so.{wanted.partition('.')[0]}"


def loaded() -> set[str]:
    """The paths of the NVRTC libraries loaded in this process."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libnvrtc" in line}
    return {path for path in paths if _LIBRARY.fullmatch(Path(path).name)}


def compile_apart(program: Program) -> Compiled:
    """Compiles a program in another process, or in this one where none can be started: it may start none, or Python is embedded
    in another program.
    """
    import subprocess

    if not Path(sys.executable or "").name.startswith("python"):
        return compile_here(program)
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
    asked = pickle.dumps(program._asdict())
    try:
        done = subprocess.run(command, check=False, input=asked, capture_output=True)
    except OSError:
        return compile_here(program)
    if done.returncode == 0:
        return Compiled(*pickle.loads(done.stdout.partition(_MARK)[2]))
    told = done.stderr.decode(errors="replace").strip()
    if done.returncode < 0:
        told += f"\nNVRTC ended by {signal.Signals(-done.returncode).name}"
    return Compiled(None, told.strip())


def compile_here(program: Program) -> Compiled:
    """Compiles a program in this process."""
    nvrtc = _load(program.library)
    names, texts = list(program.headers), list(program.headers.values())
    handle = ctypes.c_void_p()
    headers = len(names), _strings(texts), _strings(names)
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(handle), program.text.encode(), b"kernel.cu", *headers
    )
    if status:
        return Compiled(None, _error(nvrtc, status))
    try:
        options = _strings(program.options)
        status = nvrtc.nvrtcCompileProgram(handle, len(program.options), options)
        log = _result(nvrtc, "ProgramLog", handle).rstrip(b"\0").decode(errors="replace").strip()
        if status:
            return Compiled(None, f"{log}\n{_error(nvrtc, status)}".strip())
        return Compiled(_result(nvrtc, "CUBIN", handle), log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _of_cupy() -> Any:
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise ImportError(
            'compiling a kernel needs CuPy: pip install "rawattn[cuda13]" (or [cuda12] on CUDA 12)'
        ) from error
    return nvrtc


def _load(path: str) -> ctypes.CDLL:
    """The library, after a second one that it opens by name, which lies beside it but not where the loader looks."""
    nvrtc = ctypes.CDLL(path)
    folder, name = os.path.split(path)
    kind = name.removeprefix("libnvrtc").partition(".so")[0]
    builtins = os.path.join(folder, f"libnvrtc-builtins{kind}.so.{_version(nvrtc)}")
    if os.path.exists(builtins):
        ctypes.CDLL(builtins)
    return nvrtc


def _version(nvrtc: ctypes.CDLL) -> str:
    numbers = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(*map(ctypes.byref, numbers))
    return _dotted(number.value for number in numbers)


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _result(nvrtc: ctypes.CDLL, name: str, handle: ctypes.c_void_p) -> bytes:
    """A result of a program, by the name that NVRTC's functions have for it."""
    size = ctypes.c_size_t()
    status = getattr(nvrtc, f"nvrtcGet{name}Size")(handle, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    if status or getattr(nvrtc, f"nvrtcGet{name}")(handle, found):
        raise RuntimeError(f"NVRTC gives no {name}")
    return found.raw


def _error(nvrtc: ctypes.CDLL, status: int) -> str:
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    text: bytes = nvrtc.nvrtcGetErrorString(status)
    return f"{text.decode()} ({status})"


if __name__ == "__main__":
    asked = Program(**pickle.load(sys.stdin.buffer))
    sys.stdout.buffer.write(_MARK + pickle.dumps(tuple(compile_here(asked))))
