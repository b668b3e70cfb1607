"""Whether there is a GPU to compute on, and if not, why."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, NamedTuple

__all__ = ["gpu_available", "why_no_gpu"]


_INSTALL = 'on a machine with a GPU: pip install "rawattn[cuda13]", or [cuda12] for CUDA 12'
_REPAIR = "See whether nvidia-smi finds a GPU"


class _Found(NamedTuple):
    """The answer of CuPy when it is asked for GPUs."""

    reason: str | None = None  # why no GPU can be used; None if one can
    cure: str | None = None  # what to do, if something is broken and not just absent


@functools.cache
def gpu_available() -> bool:
    """Whether CuPy is installed and sees a GPU. It is asked once in each process.

    Without CuPy, without a driver or without a GPU the answer is False. If anything else prevents an answer, there is a
    RuntimeWarning too, since arrays on the host would otherwise be computed by the CPU without notice.
    """
    found = _look()
    if found.cure is not None:
        warnings.warn(
            f"rawattn cannot use a GPU: {found.reason}. NumPy arrays are computed by the CPU. {found.cure}, or pass "
            "backend='cpu' where the CPU is meant.",
            RuntimeWarning,
            stacklevel=_level_of_caller(),
        )
    return found.reason is None


def _level_of_caller() -> int:
    """The `stacklevel` of the first frame outside of this package, for a warning in the function that calls this one."""
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "rawattn" and frame.f_back:
        level, frame = level + 1, frame.f_back
    return level


def why_no_gpu() -> str | None:
    """Why `gpu_available` is False, and what to do if something is broken; None if there is a GPU.

    It never warns and never raises.
    """
    found = _look()
    return found.reason if found.cure is None else f"{found.reason}. {found.cure}"


@functools.cache
def _look() -> _Found:
    try:
        import cupy
    except Exception as error:  # the import writes to the home directory and loads libraries
        return _without_cupy(error)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy's own exception type is in the runtime module
        return _without_devices(error, cupy)
    return _Found() if count else _Found("the driver sees no GPU")


def _without_cupy(error: Exception) -> _Found:
    if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
        return _Found(f"CuPy is not installed ({_INSTALL})")
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    reason = f"CuPy is installed, but importing it failed ({_described(cause)})"
    if isinstance(cause, OSError) and cause.filename is not None:
        return _Found(reason, "Set CUPY_CACHE_DIR to a writable directory")
    return _Found(reason, 'Reinstall it, as by pip install --force-reinstall "rawattn[cuda13]"')


def _without_devices(error: Exception, cupy: Any) -> _Found:
    kind = str(error).partition(":")[0]
    if kind == "cudaErrorNoDevice":
        return _Found("the driver sees no GPU (cudaErrorNoDevice)")
    if kind == "cudaErrorInsufficientDriver":
        try:
            driver = cupy.cuda.runtime.driverGetVersion()
        except Exception as unknown:
            return _Found(f"the driver cannot be asked ({_described(unknown)})", _REPAIR)
        if not driver:
            return _Found("no NVIDIA driver on this machine")
        return _Found(
            f"the NVIDIA driver is too old for this CuPy ({_described(error)})",
            "Update the driver, or install the CuPy of an older CUDA",
        )
    return _Found(f"CUDA does not start ({_described(error)})", _REPAIR)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
