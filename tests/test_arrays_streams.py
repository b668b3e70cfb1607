"""The streams on which arrays arrive and leave, as far as they are decided without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rawattn._interop import arrays as _arrays
from rawattn._interop import streams
from rawattn._interop.arrays import framework_of, import_array, on_stream_of
from tests.host_arrays import Elsewhere


def test_gpu_array_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    given = Elsewhere(np.zeros(3), device=(2, 0))
    with pytest.raises(ImportError, match="cuda13"):
        import_array("q", given)
    with pytest.raises(ImportError, match="cuda13"):
        on_stream_of(given, framework_of(given))


@pytest.mark.parametrize(
    ("framework", "handle", "capturing", "argument"),
    [
        ("jax", 0, False, 1),
        ("jax", 4096, False, 4096),
        ("jax", 4096, True, None),
        ("other", 4096, True, -1),
        ("tensorflow", 4096, False, None),
    ],
)
def test_stream_argument(
    monkeypatch: pytest.MonkeyPatch, framework: str, handle: int, capturing: bool, argument: Any
) -> None:
    monkeypatch.setattr(streams, "is_capturing", lambda handle: capturing)
    assert _arrays._wait_argument(framework, handle) == argument


def test_same_stream_is_not_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ordering is made for equal streams, nor between a capturing and a non-capturing one; neither case touches CUDA."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    streams.order(4096, 4096, 0)
    monkeypatch.setattr(streams, "is_capturing", lambda handle: handle == 4096)
    streams.order(4096, 8192, 0)
    streams.order(0, 4096, 0)
    with pytest.raises(ImportError):
        streams.order(0, 8192, 0)


def test_a_stream_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[Any, ...]] = []
    runtime = SimpleNamespace(
        eventRecord=lambda event, stream: done.append(("record", event, stream)),
        streamWaitEvent=lambda stream, event, flags: done.append(("wait", stream, event, flags)),
    )
    cuda = SimpleNamespace(
        Device=lambda device: nullcontext(done.append(("device", device))),
        Event=lambda **_: SimpleNamespace(ptr=7),
        runtime=runtime,
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(streams, "is_capturing", lambda handle: False)
    streams.order(4096, 8192, 1)
    assert done == [("device", 1), ("record", 7, 4096), ("wait", 8192, 7, 0)]


def test_legacy_stream_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not streams.is_capturing(0)
    assert not streams.is_capturing(1)


def test_no_capsule_is_let_go_of_while_another_is_made() -> None:
    """No capsule is freed while another is made.

    jaxlib counts the capsules of a buffer without a lock, and another thread may free one.
    """
    made, freed = threading.Event(), threading.Event()
    seen = []

    class Capsule:
        def __del__(self) -> None:
            seen.append(made.is_set())
            freed.set()

    class Array:
        def __dlpack__(self, **keywords: Any) -> object:
            streams._dying.put((SimpleNamespace(synchronize=lambda: None), Capsule()))
            time.sleep(0.1)  # gives the freeing thread the time to run
            made.set()
            return object()

    streams._start_freeing()
    _arrays._capsule(Array())
    assert freed.wait(10)
    assert seen == [True]


@pytest.mark.parametrize("handle", [2, 4096])
def test_a_stream_of_other_code_is_one_of_the_current_device(
    handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy enters a stream only on the device that was current when the stream was wrapped. One handle may be on several."""
    current = [0]

    class Stream:
        null = None

        @staticmethod
        def from_external(given: Any) -> tuple[int, int]:
            return given.__cuda_stream__()[1], current[0]

    runtime = SimpleNamespace(getDevice=lambda: current[0])
    cuda = SimpleNamespace(Stream=Stream, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    found = []
    for current[0] in (6, 7, 6):
        found.append(streams.external(handle))
    assert found == [(handle, 6), (handle, 7), (handle, 6)]
    assert found[0] is found[2]


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="there is no fork")
def test_a_forked_process_makes_capsules() -> None:
    """The lock may be held by a thread of the parent, which the child does not have."""
    code = """
import os, signal, threading, warnings
import numpy as np
from rawattn._interop import arrays, streams

warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
held, end = threading.Event(), threading.Event()

def hold():
    with streams.capsule_lock:
        held.set()
        end.wait()

threading.Thread(target=hold).start()
held.wait()
if not (child := os.fork()):
    signal.alarm(10)
    arrays._capsule(np.zeros(1))
    os._exit(0)
end.set()
assert os.waitpid(child, 0)[1] == 0, "the child waits for ever"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gpu_that_cupy_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def get_current_stream(device: int) -> None:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    cuda = SimpleNamespace(
        get_current_stream=get_current_stream,
        runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError),
    )
    monkeypatch.setattr(streams, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
    with pytest.raises(RuntimeError, match=r"GPU 3, which CuPy cannot use .*Driver.*rawattn info"):
        streams.compute_stream("jax", 3)
