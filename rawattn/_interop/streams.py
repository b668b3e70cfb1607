"""CUDA streams and memory shared with other frameworks.

CuPy and torch can be asked for their current stream. Work that crosses from one stream to another is
ordered with an event; if both are the same stream, nothing is done. Other frameworks are ordered by
DLPack's stream protocol when an array is imported, and their memory is held until the work that uses
it is done.

A stream that captures a graph is never ordered with one that does not. A graph cannot wait for work
outside it, so the code that launches the graph must order the launch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cupy

# The legacy default stream in DLPack; in CuPy and torch its handle is 0.
DLPACK_LEGACY = 1
# The handle of the per-thread default stream: the same number in each thread, but another stream.
PER_THREAD_DEFAULT = 2


def import_cupy() -> Any:
    """CuPy, or an ImportError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need CuPy: pip install 'rawattn[cuda13]', or [cuda12] for CUDA 12"
        ) from error
    return cupy


@functools.cache
def torch_stream() -> Callable[[int], int]:
    """A function that gives the handle of torch's current stream on a device. torch must be imported already."""
    torch = sys.modules["torch"]
    public = torch.cuda.current_stream  # slower: it makes two Python objects
    raw: Callable[[int], int] = getattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: int(public(device).cuda_stream)
    )
    return raw


def own_stream(stream: int) -> int | tuple[int, int]:
    """A key that identifies the calling thread's stream of this handle in the whole process."""
    return stream if stream != PER_THREAD_DEFAULT else (stream, threading.get_ident())


def current_stream(framework: str, device: int) -> int | None:
    """The handle of the current stream of `framework` on `device`; None if the framework cannot be asked."""
    if framework == "torch":
        return torch_stream()(device)
    if framework == "cupy":
        return int(_callers_stream(device).ptr)
    return None


def compute_stream(framework: str, device: int) -> cupy.cuda.Stream:
    """The stream for work on arrays of `framework`, as a CuPy stream: torch's current one for torch, else CuPy's."""
    cupy = import_cupy()
    try:
        current = cupy.cuda.get_current_stream(device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(
            f"got arrays on GPU {device}, which CuPy cannot use ({error}); `rawattn info` says what to do"
        ) from error
    wanted: int = torch_stream()(device) if framework == "torch" else current.ptr
    return current if wanted == current.ptr else external(wanted)


class _Foreign:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def external(handle: int) -> Any:
    """A stream that other code made on the current device, as a CuPy stream."""
    import cupy

    if not handle:
        return cupy.cuda.Stream.null
    return _external(handle, cupy.cuda.runtime.getDevice())


@functools.lru_cache(maxsize=64)
def _external(handle: int, device: int) -> Any:
    """device: the current one, which CuPy takes for the stream's. A handle such as `PER_THREAD_DEFAULT` is on every device."""
    import cupy

    return cupy.cuda.Stream.from_external(_Foreign(handle))


class _Replaced(threading.local):
    """The caller's current CuPy streams by device, while `on_torch_stream` replaces them."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


_replaced = _Replaced()


def _callers_stream(device: int) -> Any:
    if device in _replaced.streams:
        return _replaced.streams[device]
    import cupy

    return cupy.cuda.get_current_stream(device)


@contextlib.contextmanager
def on_torch_stream(device: int) -> Iterator[Any]:
    """A context in which CuPy works on torch's current stream of `device` and allocates from torch's memory."""
    cupy = import_cupy()
    with cupy.cuda.Device(device):
        stream = compute_stream("torch", device)
        before = cupy.cuda.get_current_stream()
        memory = _TorchMemory(device, stream.ptr, cupy.cuda.get_allocator())
        outermost = device not in _replaced.streams
        if outermost:
            _replaced.streams[device] = before
        try:
            with stream, cupy.cuda.using_allocator(memory):
                yield stream
        finally:
            if outermost:
                del _replaced.streams[device]


class _TorchMemory:
    """A CuPy allocator that takes memory from torch.

    Memory that a call allocates while torch captures a graph must come from torch, which keeps the block
    for replays of the graph after the last tensor is gone. CuPy's pool may not grow during a capture.
    """

    __slots__ = ("_device", "_fallback", "_handle", "_torch")

    def __init__(self, device: int, handle: int, fallback: Any) -> None:
        self._torch = sys.modules["torch"]
        self._device = device
        self._handle = handle
        self._fallback = fallback

    def __call__(self, nbytes: int) -> Any:
        import cupy

        # torch reuses freed memory in the order of its own stream, so the memory may be used on that stream only.
        if (
            cupy.cuda.runtime.getDevice() != self._device
            or cupy.cuda.get_current_stream().ptr != self._handle
        ):
            return self._fallback(nbytes)
        torch = self._torch
        block = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._device))
        memory = cupy.cuda.UnownedMemory(block.data_ptr(), nbytes, block, self._device)
        return cupy.cuda.MemoryPointer(memory, 0)


def is_capturing(handle: int) -> bool:
    """Whether a graph captures the stream."""
    if handle in (0, DLPACK_LEGACY):  # never captured; querying it fails while others capture
        return False
    import cupy

    return bool(cupy.cuda.runtime.streamIsCapturing(handle))


def wait(stream: int, device: int) -> None:
    """Blocks the host until all work on a stream is done."""
    import cupy

    with cupy.cuda.Device(device):
        cupy.cuda.runtime.streamSynchronize(stream)


def order(before: int, after: int, device: int) -> None:
    """Makes the stream `after` of `device` wait for all work enqueued so far on its stream `before`."""
    if before == after or is_capturing(before) != is_capturing(after):
        return
    import cupy

    with cupy.cuda.Device(device):  # handle 0 means the legacy stream of the current device
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, before)
        cupy.cuda.runtime.streamWaitEvent(after, event.ptr, 0)


class Borrowed:
    """The owner of memory that is used on another stream than its framework's.

    A framework reads a result in `out=`, and reuses freed memory, in the order of its own stream. So when the
    last view dies, that stream is made to wait for the stream that used the memory. If the framework cannot be
    asked for its stream, the memory is released only once that work is done.
    """

    __slots__ = ("_device", "_framework", "_owner", "_stream")

    def __init__(self, owner: object, framework: str, device: int, stream: Any) -> None:
        self._owner = owner
        self._framework = framework
        self._device = device
        self._stream = stream

    def __del__(self) -> None:
        if sys.is_finalizing():  # CUDA may be gone already
            return
        theirs = current_stream(self._framework, self._device)
        if theirs is not None:
            order(self._stream.ptr, theirs, self._device)
        elif not is_capturing(self._stream.ptr):  # the caller keeps a graph's inputs alive
            _free_after(self._stream, self._device, self._owner)


# Held while a capsule is made, and while `_free` releases one: jaxlib counts a buffer's capsules without a lock, and aborts the
# process if two threads have corrupted the count.
capsule_lock = threading.RLock()


def _renew_lock() -> None:
    """The thread that holds the lock may not be in a forked process."""
    global capsule_lock  # noqa: PLW0603
    capsule_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

_dying: queue.SimpleQueue[tuple[Any, object]] = queue.SimpleQueue()


def _free_after(stream: Any, device: int, owner: object) -> None:
    import cupy

    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(block=True, disable_timing=True)
        event.record(stream)
    _start_freeing()
    _dying.put((event, owner))


@functools.cache
def _start_freeing() -> None:
    threading.Thread(target=_free, name="rawattn-free", daemon=True).start()


def _free() -> None:
    while True:
        event, owner = _dying.get()
        with contextlib.suppress(Exception):  # in a failed context there is nothing to wait for
            event.synchronize()
        with capsule_lock:
            del event, owner
