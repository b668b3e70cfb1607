"""Run the host side of tests/gpu without a GPU: everything up to the kernel launches.

    python -m tests.dry_gpu               # report the exceptions that the host code of rawattn raises
    python -m tests.dry_gpu --every 24    # the same for every 24th test of each file
    python -m tests.dry_gpu --compile     # also compile every kernel that .ci/gpu loads, into the kernel cache

More than half of the time of `.ci/gpu` is compilation. A kernel cache filled by `--compile` saves that time, if NVRTC has the
same version on both machines. So the calls of tests/sanitize.py are made, too.

CuPy's arrays are real objects, but their memory is never touched. Launches, streams and graphs do nothing. Results are zeros
and are not compared. A test may therefore fail because it checks a result, or because it calls CuPy itself; such failures are
ignored. Only exceptions that `rawattn` raises and no test expects are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import pytest

from rawattn._compile import compiler
from rawattn._compile.compiler import Source
from rawattn._console.progress import Progress
from rawattn._interop import native, streams
from rawattn._kernels.target import Target
from rawattn._masks.block_mask import BlockMask
from rawattn._runtime import driver, kernel
from rawattn._verbs import topk_mask
from tests import append, every_kernel, gpu_report, gradients, paged, tolerance, verify
from tests.cases import Case
from tests.frameworks import Framework

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
_ATTRIBUTES = {"MaxSharedMemoryPerBlockOptin": 232448, "MultiProcessorCount": 132}
_MEMORY = 1 << 37
# Parts of the messages of exceptions that only the missing GPU causes.
_MISSING = ("CUDARuntimeError", "CUDADriverError", "libcuda.so.1", "libcurand")


class _Nothing:
    """Stands for a device, stream, event or graph. Its methods do nothing."""

    ptr = id = graphExec = 0
    compute_capability = "90"
    attributes = _ATTRIBUTES
    mem_info = (_MEMORY // 2, _MEMORY)

    def __init__(self, *given: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __int__(self) -> int:
        return 0

    def use(self, *given: Any, **options: Any) -> _Nothing:
        return self

    begin_capture = end_capture = launch = record = synchronize = upload = wait_event = use


class _Kernel(kernel.Kernel):
    def __init__(self) -> None:
        super().__init__(SimpleNamespace(kernel=_Nothing(), max_dynamic_shared_size_bytes=0))


# The sources that were loaded, in order, each once.
loaded: dict[Source, None] = {}
_addresses = itertools.count(1 << 44, 1 << 24)


def _array(shape: Any, dtype: Any = np.float32, **options: Any) -> cupy.ndarray:
    shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(shape)
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return cupy.ndarray(shape, dtype, _allocate(nbytes))


def _allocate(nbytes: int, owner: np.ndarray | None = None) -> cupy.cuda.MemoryPointer:
    """owner: the host array that was copied to this memory, which lives as long as the memory."""
    memory = cupy.cuda.UnownedMemory(next(_addresses), max(int(nbytes), 1), owner, 0)
    return cupy.cuda.MemoryPointer(memory, 0)


def _copied(x: Any, dtype: Any = None, *given: Any, **options: Any) -> cupy.ndarray:
    if isinstance(x, cupy.ndarray):
        return x
    host = np.asarray(x, dtype)
    return cupy.ndarray(host.shape, host.dtype, _allocate(host.nbytes, host))


def _downloaded(array: cupy.ndarray, *given: Any, **options: Any) -> np.ndarray:
    host = array.data.mem._owner
    if host is not None and (host.shape, host.dtype) == (array.shape, array.dtype):
        return host.copy()
    return np.zeros(array.shape, array.dtype)


def _like(array: cupy.ndarray, dtype: Any = None, **options: Any) -> cupy.ndarray:
    return _array(array.shape, dtype or array.dtype)


def _set(module: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(module, name, value)


def stand_in_for_the_gpu() -> None:
    """Patch CuPy and rawattn for the rest of this process."""
    runtime = SimpleNamespace(
        **dict.fromkeys(
            ("graphLaunch", "memsetAsync", "setDevice", "streamSynchronize"), lambda *given: None
        ),
        **dict.fromkeys(("deviceSynchronize", "memGetInfo"), lambda: None),
        **dict.fromkeys(("driverGetVersion", "runtimeGetVersion"), lambda: 13000),
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda device: {
            **{"name": b"none", "major": 9, "minor": 0, "totalGlobalMem": _MEMORY}
        },
        streamCaptureModeRelaxed=2,
        streamIsCapturing=lambda stream: False,
    )
    _set(cupy.cuda, Device=_Nothing, Event=_Nothing, Stream=_Nothing, alloc=_allocate)
    _set(cupy.cuda, runtime=runtime, get_current_stream=lambda device=-1: _Nothing())
    cupy.cuda.driver.launchKernel = lambda *given: None
    _set(cupy, asarray=_copied, array=_copied, empty=_array, zeros=_array, ones=_array)
    _set(cupy, empty_like=_like, zeros_like=_like, ones_like=_like)
    cupy.full = lambda shape, value, dtype=np.float32: _array(shape, dtype)
    cupy.arange = lambda *given, **options: _copied(np.arange(*given, **options))
    cupy.ascontiguousarray = lambda x: x if x._c_contiguous else _like(x)
    _set(cupy.ndarray, get=_downloaded, copy=_like, astype=_like)
    nothing: Callable[..., None] = lambda *given: None  # noqa: E731
    _set(cupy.ndarray, set=nothing, fill=nothing, __setitem__=nothing)
    _set(
        driver,
        early_launcher=lambda: lambda *given: 0,
        encode_tensor_map=lambda *given: b"\0" * 128,
        outside_capture=contextlib.nullcontext,
    )
    target = Target(ARCH, *_ATTRIBUTES.values())
    _set(kernel, load=_load, load_all=lambda sources, device: None, target=lambda device: target)
    compiler.device_arch = lambda device: ARCH
    _set(streams, wait=nothing, order=nothing)
    arrays = native.native_of("cupy")
    assert arrays is not None
    _set(
        type(arrays),
        empty=lambda self, shape, dtype, beside: _array(shape, dtype),
        allocator_like=lambda self, shape, dtype, beside: functools.partial(_array, shape, dtype),
    )
    gpu_report.why_no_gpu = lambda: None
    _stand_in_for_lists_of_keys()


def _stand_in_for_lists_of_keys() -> None:
    """Patch the parts of `topk_mask` and `BlockMask.to_bool` for which CuPy itself asks the driver."""
    to_bool, largest, indices = BlockMask.to_bool, topk_mask._largest, topk_mask._indices

    def bools(mask: BlockMask) -> Any:
        return to_bool(mask) if mask.device is None else _array(mask.shape, bool)

    def best(scores: Any, count: int, last: Any, module: Any) -> Any:
        own = module is np
        return largest(scores, count, last, module) if own else _array(scores.shape, bool)

    def indices_of(keep: Any, count: int, module: Any) -> Any:
        own = module is np
        return indices(keep, count, module) if own else _array((*keep.shape[:3], count), np.int32)

    BlockMask.to_bool = bools  # type: ignore[method-assign]
    _set(topk_mask, _largest=best, _indices=indices_of)


def _load(source: Source, device: int) -> kernel.Kernel:
    loaded[source] = None
    return _Kernel()


def look_away() -> None:
    """Turn off all comparisons of results and the reference computations; the calls are still made."""

    def call(case: Case, framework: Framework, **options: Any) -> None:
        verify.run(case, framework)

    def call_backward(case: Case, framework: Framework, **options: Any) -> None:
        gradients.run(gradients.backward_of(case), framework, **options)

    def forward(self: gradients.Backward) -> tuple[np.ndarray, np.ndarray]:
        q, _, v = self._arrays
        *lead, rows, nheads, _ = q.shape
        return np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros((*lead, nheads, rows))

    nothing: Callable[..., None] = lambda *given, **options: None  # noqa: E731
    _set(tolerance, check=nothing, check_lse=nothing)
    verify.verify, gradients.verify, paged.verify = call, call_backward, nothing
    append.Appended.verify = nothing
    property_ = cached_property(forward)
    property_.__set_name__(gradients.Backward, "_forward")
    gradients.Backward._forward = property_


def _raised_by_us(where: Path, text: str) -> bool:
    """Whether an exception comes from `rawattn`, and not from the missing GPU. where: the file that raised it."""
    return ROOT / "rawattn" in where.parents and not any(word in text for word in _MISSING)


def make_sanitized_calls(every: int) -> dict[str, str]:
    """Make each `every`-th call of tests/sanitize.py; return the exceptions that `rawattn` raises, by a name of the call."""
    from tests import sanitize  # it binds the comparisons that look_away() turns off

    raised = {}
    for n, call in enumerate(sanitize.every_call()[::every]):
        try:
            call()
        except Exception as error:
            where = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            if _raised_by_us(where, repr(error)):
                raised[f"sanitized call {n * every}"] = repr(error)
    return raised


class Plugin:
    """pytest plugin: collects the exceptions that `rawattn` raises and replaces pytest's report by a progress bar."""

    def __init__(self, every: int) -> None:
        self.raised: dict[str, str] = {}
        self._every = every

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_file: Counter[str] = Counter()
        kept = []
        for item in items:
            file = item.nodeid.split("::", maxsplit=1)[0]
            if by_file[file] % self._every == 0:
                kept.append(item)
            by_file[file] += 1
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Any:
        self.left = Counter(item.nodeid.split("::", maxsplit=1)[0] for item in session.items)
        with Progress(len(self.left)) as self.progress:
            return (yield)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = nodeid.split("::", maxsplit=1)[0]
        self.left[file] -= 1
        if not self.left[file]:
            self.progress.step(file)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and call.excinfo is not None:
            where, text = Path(call.excinfo.traceback[-1].path), call.excinfo.exconly()
            if _raised_by_us(where, text):
                self.raised[item.nodeid] = text.splitlines()[0]
        return report


def main() -> int:
    """Return 1 if `rawattn` raised an unexpected exception or a kernel did not compile."""
    parser = argparse.ArgumentParser(prog="python -m tests.dry_gpu", description=main.__doc__)
    parser.add_argument("--compile", action="store_true", help="all kernels that were loaded")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="each N-th test of a file"
    )
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="files (%(default)s)")
    args = parser.parse_args()
    stand_in_for_the_gpu()
    look_away()
    plugin = Plugin(args.every)
    options = ["--exhaustive", "-m", "gpu", "-n", "0", "-W", "ignore", "-p", "no:cacheprovider"]
    # These tests would draw gigabytes of random numbers on the host for arrays that are never read.
    options += ["--ignore", "tests/gpu/test_large.py", "-p", "no:terminal", "-o", "addopts="]
    status = pytest.main([*options, *args.tests], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print(f"pytest did not reach its end: {status!r}", file=sys.stderr)
        return 1
    raised = plugin.raised
    if args.tests == parser.get_default("tests"):
        raised = {**raised, **make_sanitized_calls(args.every)}
    for name, text in raised.items():
        print(f"{name}: {text}", file=sys.stderr)
    print(f"{len(loaded)} kernels, {len(raised)} exceptions of rawattn", flush=True)
    failed = every_kernel.compile_all([(source, ARCH) for source in loaded]) if args.compile else 0
    return 1 if raised or failed else 0


if __name__ == "__main__":
    sys.exit(main())
