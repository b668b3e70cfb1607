"""`rawattn info`: prints what a bug report needs, and whether a GPU will be used."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from rawattn import __version__
from rawattn._cli.cache import contents
from rawattn._compile import cache, compiler, nvrtc
from rawattn._console import table
from rawattn._runtime import devices

_NO_GPU = "so NumPy arrays are computed by the CPU backend"
_DISTRIBUTIONS = ("numpy", "ml_dtypes", "torch", "jax")


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    subparsers.add_parser(
        "info",
        description="Show devices, driver, CUDA, NVRTC, versions and the kernel cache.",
    )


def run(args: argparse.Namespace) -> int:
    """Print one fact a line, or why it is not known."""
    for name, fact in _facts():
        try:
            value = fact()
        except Exception as error:  # the other facts help to find what is broken
            value = _unknown(error)
        print(f"{name:<13} {value}")
    return 0


def _facts() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "rawattn", lambda: __version__
    yield "Python", lambda: f"{platform.python_version()} on {platform.platform()}"
    for name in _DISTRIBUTIONS:
        yield name, partial(_version, name)
    try:
        yield from _cuda_facts()
    except Exception as error:
        yield "GPU", partial(_unknown, error)
    yield "kernel cache", lambda: contents(cache.entries())
    yield "cache access", _cache_access


def _unknown(error: Exception) -> str:
    return f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"


def _cuda_facts() -> Iterator[tuple[str, Callable[[], str]]]:
    why = devices.why_no_gpu()
    cupy = sys.modules.get("cupy")  # `why_no_gpu` has imported it if that is possible
    if cupy is None:
        yield "CuPy", lambda: str(why)
        yield "GPU", lambda: f"not looked for without CuPy, {_NO_GPU}"
        return
    runtime = cupy.cuda.runtime
    yield "CuPy", lambda: str(cupy.__version__)
    yield "CUDA runtime", lambda: _dotted(runtime.runtimeGetVersion())
    yield "NVRTC", lambda: f"{nvrtc.version()} {nvrtc.library()}"
    yield "driver", lambda: _driver(runtime.driverGetVersion())
    if why is not None:
        yield "GPU", lambda: f"none: {why}, {_NO_GPU}"
        return
    for device in range(runtime.getDeviceCount()):
        yield f"GPU {device}", partial(_device, runtime, device)


def _device(runtime: Any, device: int) -> str:
    properties = runtime.getDeviceProperties(device)
    return (
        f"{properties['name'].decode()}, {compiler.device_arch(device)}, "
        f"{properties['multiProcessorCount']} SMs, {table.size(properties['totalGlobalMem'])}"
    )


def _cache_access() -> str:
    why = cache.why_unwritable()
    if why is None:
        return "writable"
    return (
        f"not writable ({why}), so every process compiles its kernels again; set {cache.VARIABLE} "
        "to a writable directory"
    )


def _version(distribution: str) -> str:
    """The version of an installed distribution, read without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _dotted(version: int) -> str:
    """CUDA's version number as text: 13020 -> "13.2"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver(supported: int) -> str:
    if not supported:
        return "no NVIDIA driver on this machine"
    return f"{_kernel_driver()}, CUDA up to {_dotted(supported)}"


def _kernel_driver() -> str:
    """The version of the kernel driver, which CUDA's API does not give."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "version unknown"
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else "version unknown"
