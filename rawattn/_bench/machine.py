"""The machine that is measured: device, versions, clocks, and the rate of its matrix products."""

from __future__ import annotations

import contextlib
import functools
import importlib
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from statistics import NormalDist
from typing import Any

import ml_dtypes  # also registers the name "bfloat16" with NumPy
import numpy as np

from rawattn._bench.timing import Clock, Entrant, Timing, race

_PACKAGES = (
    *("rawattn", "numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "jax"),
    *("flash-attn-4", "flash-sparse-attn", "flashinfer-python"),
)
_PEAK_SIZE = 8192
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Random bits of an element, from its index (a hash from C. Wellons, "Prospecting for hash functions").
_HASH = """
unsigned x = (unsigned)i ^ (unsigned)(i >> 32) * 0x9e3779b9u ^ seed;
x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
out = codes[x & 255u];
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of the GPU's sensors. The power is NVML's average over about a second."""

    sm_mhz: float
    watts: float
    celsius: float


class Sensors:
    """Clock, power and temperature of the current device, from NVML or else from nvidia-smi."""

    def __init__(self) -> None:
        import cupy

        self._bus = cupy.cuda.Device().pci_bus_id
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # without NVML there is still nvidia-smi
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(self._bus.encode())
            self._nvml = nvml

    def read(self) -> Reading | None:
        """A reading; None if neither NVML nor nvidia-smi answers."""
        nvml = self._nvml
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                return Reading(
                    nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
                    nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU),
                )
        try:
            return Reading(
                *map(float, self._smi("clocks.sm,power.draw,temperature.gpu").split(","))
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None

    def driver(self) -> str:
        """The version of the driver, or "unknown"."""
        try:
            return self._smi("driver_version")
        except (OSError, subprocess.SubprocessError):
            return "unknown"

    def _smi(self, fields: str) -> str:
        command = ["nvidia-smi", "-i", self._bus, f"--query-gpu={fields}"]
        command.append("--format=csv,noheader,nounits")
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()


def facts(sensors: Sensors) -> dict[str, Any]:
    """The facts about the machine that a reader needs to compare figures."""
    import cupy

    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return {
        "device": properties["name"].decode(),
        "compute_capability": device.compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "memory_bytes": properties["totalGlobalMem"],
        "l2_bytes": properties["l2CacheSize"],
        "driver": sensors.driver(),
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The versions of rawattn, its dependencies and its peers, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch := sys.modules.get("torch"):
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return found


def random_array(shape: tuple[int, ...], dtype: str) -> Any:
    """Normally distributed data. On zeros a GPU takes less power and runs faster than on real data."""
    normal = _generator().standard_normal(shape, dtype=np.float32)
    return normal.astype(np.dtype(dtype), copy=False)


def random_float8(shape: tuple[int, ...]) -> Any:
    """Normally distributed data in float8_e4m3fn. CuPy has no arithmetic for it, so each element is one of 256 quantiles."""
    import cupy

    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((n + 0.5) / 256) for n in range(256)])
    codes = cupy.asarray(quantiles.astype(_FLOAT8).view(np.uint8))
    found = cupy.empty(shape, np.uint8)
    seed = int(_generator().integers(1 << 31, size=1).item())
    cupy.ElementwiseKernel("raw uint8 codes, uint32 seed", "uint8 out", _HASH, "random_float8")(
        codes, seed, found
    )
    return found.view(_FLOAT8)


@functools.cache
def _generator() -> Any:
    from cupy import random

    return random.Generator(random.Philox4x3210(0))


def matmul_flops(dtype: str, clock: Clock) -> float:
    """FLOP/s of a square matrix product: the 100 % of the reports."""
    import cupy

    size = _PEAK_SIZE
    a, b = (random_array((size, size), dtype) for _ in range(2))
    out = cupy.empty_like(a)
    timing = race({"": Entrant(lambda: cupy.matmul(a, b, out=out), clock)})[""]
    if not isinstance(timing, Timing):
        raise timing
    return 2 * size**3 / timing.seconds
