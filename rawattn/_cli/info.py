"""`rawattn info`: what a bug report needs, and whether a GPU will be used."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rawattn import __version__
from rawattn._cli import table
from rawattn._cli.cache import contents
from rawattn._compile import cache, compiler

_NO_GPU = "so NumPy arrays are computed by the CPU backend"


def add_parser(subparsers: Any) -> None:
    """Describe the command line."""
    subparsers.add_parser(
        "info", description="Show devices, driver, CUDA, NVRTC, versions and the kernel cache."
    )


def run(args: argparse.Namespace) -> int:
    """Print one fact a line."""
    for name, value in _facts():
        print(f"{name:<13} {value}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "rawattn", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    for name in ("numpy", "ml_dtypes"):
        yield name, _version(name)
    yield from _cuda_facts()
    yield "kernel cache", _cache_fact()


def _cuda_facts() -> Iterator[tuple[str, str]]:
    try:
        import cupy
    except ImportError as error:
        # Absent, or present and broken: then the reason is worth more than the fact.
        reason = "not installed" if error.name == "cupy" else str(error).strip()
        yield "CuPy", f'{reason}; on a machine with a GPU: pip install "rawattn[cuda13]"'
        yield "GPU", f"not looked for without CuPy, {_NO_GPU}"
        return
    yield "CuPy", cupy.__version__
    yield "CUDA runtime", _dotted(cupy.cuda.runtime.runtimeGetVersion())
    try:
        yield "NVRTC", f"{compiler.nvrtc_version()} {_nvrtc_path()}"
    except RuntimeError as error:
        yield "NVRTC", str(error)
    supported = cupy.cuda.runtime.driverGetVersion()
    if not supported:
        yield "driver", "no NVIDIA driver on this machine"
        yield "GPU", f"none, {_NO_GPU}"
        return
    yield "driver", f"{_driver()}, CUDA up to {_dotted(supported)}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        yield "GPU", f"none usable ({error}), {_NO_GPU}"
        return
    for device in range(count):
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        yield (
            f"GPU {device}",
            f"{properties['name'].decode()}, {compiler.device_arch(device)}, "
            f"{properties['multiProcessorCount']} SMs, {table.size(properties['totalGlobalMem'])}",
        )


def _cache_fact() -> str:
    try:
        return contents(cache.entries())
    except OSError as error:
        return f"unreadable: {error}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _dotted(version: int) -> str:
    """13020 -> "13.2", the way CUDA counts."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver() -> str:
    """Version of the kernel driver, which CUDA's own API does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "version unknown"
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else "version unknown"


def _nvrtc_path() -> str:
    """Where the library that is loaded now came from; Linux alone tells."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ""
    match = re.search(r"/\S*/libnvrtc\.so\S*", maps)
    return match[0] if match else ""
