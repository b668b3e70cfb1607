"""Compiles sources to cubins.

NVRTC (`nvrtc.py`) compiles the generated translation unit, with the headers in memory; this needs no GPU.
`cupy.RawModule` is used only to load cubins: as a compiler it always targets the plain `sm_XY` of the
device, never `sm_90a`, and its cache would not notice a changed header.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rawattn._compile import cache, memo, nvrtc

_log = logging.getLogger("rawattn")

# device-as-default: everything in a translation unit runs on the device, so helpers need no annotation. -v makes
# ptxas print registers and spills; no-cache, since NVRTC's own cache would return without that print. No
# fast-math: kernels choose approximate instructions explicitly.
_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
    "--no-cache",
)
_INCLUDE = re.compile(r'#[ \t]*include[ \t]*"([^"\n]+)"')
_SLOW_SECONDS = 1.0
_LOG_TAIL = 20


class CompileError(RuntimeError):
    """A kernel did not compile. The message names the kernel and the file in which its source was kept.

    log: the compiler's full log.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class TextError(CompileError, ValueError):
    """A kernel did not compile because of the caller's C++ text. The message names the argument and shows the text's lines."""


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel, ready to compile.

    entry: the name of its extern "C" __global__ function.
    text: the translation unit: generated constants, then the `#include` of a kernel file.
    summary: a human-readable line.
    """

    entry: str
    text: str
    summary: str

    def __post_init__(self) -> None:
        # An array scalar in the text would make a new kernel for every value, or for every call.
        for field in fields(self):
            if type(value := getattr(self, field.name)) is not str:
                raise TypeError(f"Source.{field.name}: got {type(value).__name__}, expected str")


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled kernel. `path` is None when the cache directory cannot be written.

    meta: summary, entry, arch, seconds, nvrtc, options, headers (their hashes), and what ptxas
    reported: registers, and in bytes spills (stores + loads), stack, smem (static shared memory).
    """

    path: Path | None
    image: bytes
    meta: dict[str, Any]
    log: str


@dataclass(frozen=True, slots=True)
class _Request:
    """Everything that reaches the compiler, and its hash."""

    text: str
    headers: dict[str, str]
    options: tuple[str, ...]
    nvrtc: str
    key: str


# Kernels whose cubin could not be written to disk, by key.
_in_memory: dict[str, Cubin] = {}

# The version of NVRTC, empty until it is known.
_compiler_version: list[str] = []


@functools.cache
def kernels_dir() -> Path:
    """The folder of the device sources: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"kernels_cu is neither in {package} nor beside it; reinstall rawattn")


def compile_source(source: Source, arch: str) -> Cubin:
    """Compile for an architecture such as "sm_90a", or find it in the disk cache. Needs no GPU.

    Raises CompileError when NVRTC refuses the source, ImportError without CuPy, RuntimeError
    without NVRTC.
    """
    request = _request(source, arch)
    if (cubin := _find(request.key)) is not None:
        return cubin
    if nvrtc.version() != request.nvrtc:
        _correct_compiler()
        request = _request(source, arch)
    with cache.lock(request.key):
        # Another process may have compiled it while this one waited for the lock.
        cubin = _find(request.key) or _compile(source, arch, request)
    return cubin


def find(source: Source, arch: str) -> Cubin | None:
    """The cached cubin that compile_source would return, or None."""
    return _find(_request(source, arch).key)


@functools.cache
def device_arch(device: int) -> str:
    """The architecture to compile for: "sm_90a" on compute capability 9.0 (for wgmma), else "sm_XY"."""
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def _compiler() -> str:
    """The version of NVRTC in the keys of kernels: the one that `memo` recalls, else that of the library."""
    if not _compiler_version:
        if (version := memo.recall()) is None:
            version = nvrtc.version()
            memo.remember(version)
        _compiler_version.append(version)
    return _compiler_version[0]


def _correct_compiler() -> None:
    """Replaces the recalled version by that of the library, which differs."""
    _compiler_version[:] = [nvrtc.version()]
    memo.remember(nvrtc.version())


def _request(source: Source, arch: str) -> _Request:
    headers = _headers(source)
    options = (f"--gpu-architecture={arch}", *_OPTIONS)
    everything = json.dumps([source.text, headers, options, _compiler()], sort_keys=True)
    key = hashlib.sha256(everything.encode()).hexdigest()
    return _Request(source.text, headers, options, _compiler(), key)


def _headers(source: Source) -> dict[str, str]:
    """Every header that the text includes, directly or indirectly, by the name in the `#include`."""
    root = kernels_dir()
    found: dict[str, str] = {}
    waiting = [(name, f"the source of {source.entry}") for name in _includes(source.text)]
    while waiting:
        name, includer = waiting.pop()
        if name in found:
            continue
        try:
            if name.startswith("/") or ".." in name.split("/"):
                raise FileNotFoundError(name)
            with open(f"{root}/{name}", encoding="utf-8") as file:
                text = found[name] = file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CompileError(
                f'{includer} includes "{name}", which is not in {root} ({source.summary})'
            ) from None
        waiting += [(inner, name) for inner in _includes(text)]
    return found


def _includes(text: str) -> list[str]:
    """The names in its `#include "..."` lines. A pattern with a literal first is found ten times as fast as a line's start."""
    return [
        match[1]
        for match in _INCLUDE.finditer(text)
        if not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip(" \t")
    ]


def _find(key: str) -> Cubin | None:
    if (entry := cache.read(key)) is None:
        return _in_memory.get(key)
    return _cubin(entry)


def _cubin(entry: cache.Entry) -> Cubin:
    log = entry.files.get("log.txt", b"").decode(errors="replace")
    return Cubin(entry.path / "kernel.cubin", entry.files["kernel.cubin"], entry.meta, log)


def _compile(source: Source, arch: str, request: _Request) -> Cubin:
    started = time.perf_counter()
    image, log = _run_nvrtc(request)
    seconds = time.perf_counter() - started
    if image is None:
        raise _failure(source, arch, request, log)
    if f".text.{source.entry}\0".encode() not in image:
        missing = f'no extern "C" __global__ function is named {source.entry}'
        raise _failure(source, arch, request, f"{log}\n{missing}".strip())

    meta = {
        "summary": source.summary,
        "entry": source.entry,
        "arch": arch,
        **_ptxas_report(log, source.entry),
        "seconds": round(seconds, 3),
        "nvrtc": request.nvrtc,
        "options": list(request.options),
        "headers": {
            name: hashlib.sha256(text.encode()).hexdigest()
            for name, text in request.headers.items()
        },
    }
    files = {"kernel.cu": source.text.encode(), "kernel.cubin": image}
    if log:
        files["log.txt"] = log.encode()
    # Kept before it is written: the warning that it cannot be written may be an error.
    cubin = _in_memory[request.key] = Cubin(None, image, meta, log)
    entry = cache.publish(request.key, files, meta)
    if entry is not None:
        cubin = _cubin(entry)
        _in_memory.pop(request.key, None)
    if seconds > _SLOW_SECONDS:
        where = "in memory" if cubin.path is None else cubin.path.parent
        _announce(f"compiled {source.summary} for {arch} in {seconds:.1f} s ({where})")
    return cubin


def _run_nvrtc(request: _Request) -> nvrtc.Compiled:
    program = nvrtc.Program(nvrtc.library(), request.text, request.headers, request.options)
    return nvrtc.compile_apart(program)


def _ptxas_report(log: str, entry: str) -> dict[str, int]:
    """What ptxas -v printed about one kernel; empty if the format is unknown."""
    report = log.partition(f"Compiling entry function '{entry}'")[2]
    report = report.partition("Compiling entry function")[0]
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", report
    )
    registers = re.search(r"Used (\d+) registers", report)
    if memory is None or registers is None:
        return {}
    stack, stores, loads = map(int, memory.groups())
    smem = re.search(r"(\d+) bytes smem", report)  # absent when there is none
    return {
        "registers": int(registers[1]),
        "spills": stores + loads,
        "stack": stack,
        "smem": int(smem[1]) if smem else 0,
    }


def _failure(source: Source, arch: str, request: _Request, log: str) -> CompileError:
    files = {"kernel.cu": source.text.encode(), "log.txt": log.encode()}
    kept = cache.keep_failure(request.key, files)
    place = "not kept, since no directory can be written" if kept is None else kept / "kernel.cu"
    tail = "\n".join(f"    {line}" for line in log.splitlines()[-_LOG_TAIL:])
    return CompileError(
        f"{source.entry} did not compile for {arch} (NVRTC {request.nvrtc})\n"
        f"  kernel: {source.summary}\n"
        f"  source: {place}\n"
        f"  headers: {kernels_dir()}\n"
        f"  last lines of the log:\n{tail}",
        log,
    )


def _announce(line: str) -> None:
    """Logs at INFO. If logging is not set up, prints to a terminal, to explain the pause."""
    _log.info(line)
    if not _log.hasHandlers() and sys.stderr.isatty():
        print(f"rawattn: {line}", file=sys.stderr)
