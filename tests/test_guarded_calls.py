"""What guarded calls keep: counters of each stream and of a captured graph, but no layout. Launches are counted, not run."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import SeqLayout
from rawattn._kernels.sm90.forward_config import MOST_ORDERED
from rawattn._runtime import graphs, guarded, on_gpu
from rawattn._runtime.runs import RunMemory, lone_of
from tests.counting_gpu import Gpu
from tests.fast_path_fakes import NBYTES, Array, fake_gpu, of_backward

CALLS = ["dense", "host lengths", "device lengths"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch, "sm_90a")


def repeated(gpu: Gpu, kind: str) -> Callable[[], Any]:
    """A call that has become a guarded call."""
    q, k, v = gpu.arrays()
    options: dict[str, Any] = {}
    if kind != "dense":
        q, k, v = (gpu.put(np.zeros((300, 4, 64), np.float16)) for _ in range(3))
        count = MOST_ORDERED + 1 if kind == "many host lengths" else 2
        starts: Any = np.linspace(0, 300, count + 1, dtype=np.int32)
        if kind == "device lengths":
            options = {"max_seqlen_q": 200, "max_seqlen_k": 200}
            starts = gpu.put(starts)
        options = {"seqs": SeqLayout(seqstart_q=starts, **options)}

    def call() -> Any:
        return rawattn.attention(q, k, v, **options)

    for _ in range(5):
        call()
    return call


def run_memory() -> Any:
    (call,) = on_gpu._prepared.values()
    return call.prepared.run_memory


@pytest.mark.parametrize("kind", CALLS)
def test_each_stream_has_counters(kind: str, gpu: Gpu) -> None:
    call = repeated(gpu, kind)
    for gpu.own.current in (0, 8, 1, 8, 0):
        before = len(gpu.device.launched)
        call()
        assert gpu.device.launched[before:] == ["rawattn_sm90_forward"]
    assert set(run_memory().counters) == {0, 1, 8}


@pytest.mark.parametrize("kind", CALLS)
def test_each_thread_has_counters_on_its_default_stream(kind: str, gpu: Gpu) -> None:
    call = repeated(gpu, kind)
    gpu.own.current = 2
    call()
    thread = threading.Thread(target=call)  # this thread lives on, so its identifier is not reused
    thread.start()
    thread.join()
    assert len(run_memory().counters) == 3


@pytest.mark.parametrize("kind", CALLS)
def test_a_graph_has_counters(kind: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call = repeated(gpu, kind)
    made: list[int] = []
    monkeypatch.setattr(graphs, "zeros", lambda nbytes, device: made.append(nbytes) or 1 << 20)
    gpu.own.current = 8
    for gpu.capturing in (True, False, True):
        call()
    assert len(made) == 2
    assert set(run_memory().counters) == {0, 8}


@pytest.mark.parametrize("kind", [*CALLS, "many host lengths"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_graph_keeps_its_memory_where_the_framework_does_not(
    kind: str, keeps: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = repeated(gpu, kind)
    monkeypatch.setattr(gpu.own, "keeps_captured", lambda: keeps)
    gpu.own.current = 8
    for gpu.capturing, held in ((False, 0), (True, 1), (True, 2)):
        call()
        assert len(graphs._held) == (0 if keeps else held)


@pytest.mark.parametrize("where", ["host", "device", "host, with lengths"])
def test_a_layout_is_freed_with_its_guarded_calls(where: str, gpu: Gpu) -> None:
    q, k, v = (gpu.put(np.zeros((300, 4, 64), np.float16)) for _ in range(3))
    starts: Any = np.array([0, 100, 300], np.int32)
    more: dict[str, Any] = {"seqlen_q": [90, 150], "seqlen_k": [90, 150]} if "with" in where else {}
    seqs = SeqLayout(
        seqstart_q=gpu.put(starts) if where == "device" else starts,
        max_seqlen_q=200,
        max_seqlen_k=200,
        **more,
    )
    gc.collect()
    gc.disable()  # what only the collector of cycles frees would keep memory of the GPU for longer
    try:
        for _ in range(5):
            rawattn.attention(q, k, v, seqs=seqs)
        assert any(callable(x) for x in seqs._calls.values())
        freed = weakref.ref(seqs)
        del seqs
        assert freed() is None
    finally:
        gc.enable()


class Block:
    """Fake memory of results that share it."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __add__(self, offset: int) -> Block:
        return Block(self.ptr + offset)


@pytest.mark.parametrize("shares", [True, False])
def test_gradients_share_a_block_where_they_are_small(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = []

    def allocate(nbytes: int) -> Block:
        blocks.append(nbytes)
        return Block(1 << 30)

    with fake_gpu() as gpu:
        names = {**gpu.attributes.names, "allocate": allocate}
        sharing = replace(gpu.attributes, block="allocate(nbytes)", names=names)
        monkeypatch.setattr(gpu, "attributes", sharing)

        def allocator_like(shape: tuple[int, ...], dtype: Any, beside: Any) -> Callable[..., Array]:
            return lambda block=None: Array(block.ptr if block else 64, shape)

        monkeypatch.setattr(gpu, "allocator_like", allocator_like)
        monkeypatch.setattr(guarded, "_MOST_SHARED", 3 * NBYTES if shares else 3 * NBYTES - 1)
        for _ in range(6):
            found = rawattn.attention_backward(*of_backward())
        made = [x.address for x in found[:3] if x is not None]
        assert gpu.launched[-1][-3:] == made
    expected = [(1 << 30) + n * guarded._ALIGNMENT for n in range(3)] if shares else [64] * 3
    assert made == expected
    assert set(blocks) == ({3 * guarded._ALIGNMENT} if shares else set())


def test_an_lse_does_not_keep_a_whole_output() -> None:
    assert guarded._places([2048, 64]) == ()
    assert guarded._places([2048, 0]) == ()
    assert guarded._places([0, 0]) == ()
    assert guarded._places([2048]) == ()
    assert guarded._places([700, 700, 300]) == (2560, 1024, 2048)


def test_threads_that_meet_on_a_stream_share_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may not launch with counters that another one has replaced: their memory is free for others."""
    runtime = SimpleNamespace(memsetAsync=lambda *_: None)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    together, addresses = threading.Barrier(2, timeout=10), itertools.count(512, 512)

    def keep(nbytes: int, device: int) -> tuple[Any, int]:
        together.wait()
        return object(), next(addresses)

    own, memory, found = RunMemory(0, (), (8,)), SimpleNamespace(keep=keep), []
    threads = [
        threading.Thread(target=lambda: found.append(own.counters_of(0, memory))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, kept = own.counters[0]
    assert found == [kept, kept]


def test_a_run_of_one_launch_without_scratch_is_simple() -> None:
    launch = (print, 3)
    plain, counted = RunMemory(0, [], []), RunMemory(0, [], [4])
    assert lone_of([launch], plain) == (*launch, None)
    lone = lone_of([launch], counted)
    assert lone is not None and lone.counters is counted.counters
    for launches, memory in (([], plain), ([launch] * 2, plain), ([launch], RunMemory(0, [8], []))):
        assert lone_of(launches, memory) is None
