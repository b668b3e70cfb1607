"""The CPU backend on small work: within a small factor of naive NumPy, and on no more threads than pay off.

Times are CPU time, and the two sides take turns, so that other work on the machine matters little. A comment beside each bound
gives the ratio measured on two cores, which is well below the bound.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn._call.layout import host_lengths
from rawattn._call.problem import describe
from rawattn._cpu import backward as cpu_backward
from rawattn._cpu import bundles, tiles
from rawattn._cpu import forward as cpu_forward
from rawattn._cpu import threads as cpu_threads
from rawattn._cpu.threads import WORK_OF_A_THREAD, Task, available_threads, run, threads_for
from tests import exhaustive

NHEADS, HEADDIM = 8, 64


class Call:
    """A call on packed float32 sequences, and the arrays that it writes."""

    def __init__(self, lens_q: list[int], lens_k: list[int] | None = None, **options: Any) -> None:
        lens_k = lens_q if lens_k is None else lens_k
        rng = np.random.default_rng(0)
        self.starts_q, self.starts_k = ([0, *np.cumsum(x).tolist()] for x in (lens_q, lens_k))
        self.q, self.dout = rng.standard_normal((2, sum(lens_q), NHEADS, HEADDIM), np.float32)
        self.k, self.v = rng.standard_normal((2, sum(lens_k), NHEADS, HEADDIM), np.float32)
        self.seqs = rawattn.SeqLayout(seqstart_q=self.starts_q, seqstart_k=self.starts_k)
        self.problem, bound = describe(self.q, self.k, self.v, seqs=self.seqs, **options)
        self.lengths = host_lengths(bound)
        self.out, self.lse = np.empty_like(self.q), np.empty((NHEADS, sum(lens_q)), np.float32)
        self.gradients = tuple(np.empty_like(x) for x in (self.q, self.k, self.v))

    def forward(self) -> None:
        arrays = (self.q, self.k, self.v, self.out, self.lse)
        cpu_forward.forward(self.problem, self.lengths, *arrays)

    def backward(self) -> None:
        arrays = (self.dout, self.q, self.k, self.v, self.out, self.lse, None, *self.gradients)
        cpu_backward.backward(self.problem, self.lengths, *arrays)

    def public(self) -> np.ndarray:
        return rawattn.attention(self.q, self.k, self.v, seqs=self.seqs, backend="cpu")

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        for b in range(len(self.starts_q) - 1):
            yield slice(*self.starts_q[b : b + 2]), slice(*self.starts_k[b : b + 2])

    def naive(self) -> np.ndarray:
        out = np.empty_like(self.q)
        for rows, keys in self.sequences():
            p = naive_probabilities(self.q[rows], self.k[keys])
            out[rows] = np.matmul(p, self.v[keys].swapaxes(0, 1)).swapaxes(0, 1)
        return out

    def naive_backward(self) -> tuple[np.ndarray, ...]:
        dq, dk, dv = (np.empty_like(x) for x in (self.q, self.k, self.v))
        scale = np.float32(HEADDIM**-0.5)
        for rows, keys in self.sequences():
            q, dout = (x[rows].swapaxes(0, 1) for x in (self.q, self.dout))
            k, v = (x[keys].swapaxes(0, 1) for x in (self.k, self.v))
            p = naive_probabilities(self.q[rows], self.k[keys])
            dp = dout @ v.swapaxes(1, 2)
            ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
            dq[rows] = (ds @ k).swapaxes(0, 1)
            dk[keys] = (ds.swapaxes(1, 2) @ q).swapaxes(0, 1)
            dv[keys] = (p.swapaxes(1, 2) @ dout).swapaxes(0, 1)
        return dq, dk, dv


def naive_probabilities(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    scores = np.matmul(q.swapaxes(0, 1), k.transpose(1, 2, 0)) * np.float32(HEADDIM**-0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def ratio(ours: Callable[[], Any], naive: Callable[[], Any], repeats: int, calls: int = 1) -> float:
    """Return our time divided by the time of `naive`: the least of four medians, as other processes share the caches."""
    return min(_ratio(ours, naive, repeats, calls) for _ in range(4))


def _ratio(ours: Callable[[], Any], naive: Callable[[], Any], repeats: int, calls: int) -> float:

    def seconds(function: Callable[[], Any]) -> float:
        started = time.process_time()
        for _ in range(calls):
            function()
        return time.process_time() - started

    ours(), naive()
    columns = zip(*((seconds(ours), seconds(naive)) for _ in range(repeats)), strict=True)
    mine, theirs = (statistics.median(column) for column in columns)
    print(f"{mine / calls * 1e6:.1f} us, naive NumPy {theirs / calls * 1e6:.1f} us")
    return mine / theirs


def several_lengths() -> list[int]:
    return np.random.default_rng(1).integers(1, 21, 500).tolist()


@pytest.mark.parametrize(
    ("lens", "bound"),
    exhaustive.thin([([5] * 500, 1.5), (several_lengths(), 2)], 2),  # 0.55, 1.05
    ids=["5", "1-20"],
)
def test_many_short_sequences(lens: list[int], bound: float) -> None:
    call = Call(lens)
    np.testing.assert_allclose(call.public(), call.naive(), atol=1e-5)
    assert ratio(call.forward, call.naive, 7) <= bound
    assert ratio(call.public, call.naive, 7) <= bound


@pytest.mark.parametrize(
    "lens", exhaustive.thin([[5] * 500, several_lengths()], 2), ids=["5", "1-20"]
)
def test_backward_of_many_short_sequences(lens: list[int]) -> None:
    call = Call(lens)
    call.forward()
    call.backward()
    for got, exact in zip(call.gradients, call.naive_backward(), strict=True):
        np.testing.assert_allclose(got, exact, atol=1e-4)
    assert ratio(call.backward, call.naive_backward, 7) <= 1.5  # 0.45, 0.8


def test_one_query_and_one_key() -> None:
    call = Call([1])
    assert ratio(call.forward, call.naive, 15, calls=100) <= 4  # 2.4
    dense = [x[None] for x in (call.q, call.k, call.v)]

    def public() -> np.ndarray:
        return rawattn.attention(*dense, backend="cpu")

    np.testing.assert_allclose(public()[0], call.naive(), atol=1e-6)
    assert ratio(public, call.naive, 15, calls=100) <= 5  # 3.2


def test_backward_of_one_query_and_one_key() -> None:
    call = Call([1])
    call.forward()
    assert ratio(call.backward, call.naive_backward, 15, calls=100) <= 3  # 1.8


def test_one_query_and_many_keys() -> None:
    """One query is within a small factor of naive NumPy, whose products use the BLAS's threads here."""
    call = Call([1], [1000])
    call.forward()
    np.testing.assert_allclose(call.out, call.naive(), atol=1e-6)
    assert ratio(call.forward, call.naive, 15, calls=10) <= 2.5  # 1.8
    assert ratio(call.backward, call.naive_backward, 7, calls=3) <= 2  # 1.3


@pytest.mark.parametrize("count", exhaustive.thin([1000, 16000], 2))
def test_memory_of_short_sequences_is_a_few_tiles(count: int) -> None:
    """Memory is a few tiles a thread, plus a few hundred bytes a sequence for its place."""
    call = Call([5] * count, causal=True)
    call.forward()
    for compute in (call.forward, call.backward):
        tracemalloc.start()
        try:
            compute()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 24 * tiles.ROWS * tiles.KEYS * available_threads() + 500 * count


@pytest.mark.parametrize("headdims", [(1, 1), (1, 64), (64, 1), (64, 64), (128, 96), (256, 256)])
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (9, 1)])
def test_products_of_bundles_stay_on_the_calling_thread(
    headdims: tuple[int, int], heads: tuple[int, int]
) -> None:
    """Products of bundles are small enough for OpenBLAS to compute them on the calling thread.

    The limits are 2**18 multiplications for a product of matrices, and 9216 for a matrix and a vector.
    """
    q, k, v = (
        np.zeros((1, 1, n, d), np.float32)
        for n, d in zip((heads[0], *heads[1:] * 2), (headdims[0], *headdims), strict=True)
    )
    problem, _ = describe(q, k, v)
    bundled = 0
    for len_q in (0, 1, 2, 5, 36, 72, 144, 500, 5000):
        for len_k in (0, 1, 2, 5, 36, 72, 144, 500, 5000):
            if not bundles.sequences_of_bundle(problem, len_q, len_k):
                continue
            bundled += 1
            rows = heads[0] // heads[1] * len_q
            for headdim in headdims:
                # Every product has these three sizes, in some order.
                sides = (rows, len_k, headdim)
                assert np.prod(sides) <= (9216 if 1 in sides else 1 << 18)
    assert bundled >= 9


def test_threads_are_chosen_by_the_work() -> None:
    enough = WORK_OF_A_THREAD
    assert threads_for([], 8) == 1
    assert threads_for([enough * 100], 8) == 1  # one task runs on one thread
    assert threads_for([enough // 1000] * 500, 8) == 1
    assert threads_for([enough // 2] * 3, 8) == 1
    assert threads_for([enough // 2] * 4, 8) == 2
    assert threads_for([enough] * 5, 8) == 5
    assert threads_for([enough] * 50, 8) == 8
    assert threads_for([enough] * 50, 1) == 1
    assert threads_for([enough * 9, 1, 1], 8) == 3


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Collects the threads that calls start."""
    threads: list[threading.Thread] = []

    class Counted(threading.Thread):
        def start(self) -> None:
            threads.append(self)
            super().start()

    monkeypatch.setattr(cpu_threads, "Thread", Counted)
    return threads


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Makes RAWATTN_NUM_THREADS be read again."""
    available_threads.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    available_threads.cache_clear()


def test_small_work_starts_no_thread(
    environment: pytest.MonkeyPatch, started: list[threading.Thread]
) -> None:
    environment.setenv("RAWATTN_NUM_THREADS", "8")
    for call in (Call([1]), Call([5] * 100), Call([100])):
        call.forward()
        call.backward()
    assert not started


def test_number_of_threads_is_honoured(
    environment: pytest.MonkeyPatch, started: list[threading.Thread]
) -> None:
    """The environment variable sets the number of threads and is read only once."""
    environment.setenv("RAWATTN_NUM_THREADS", "3")
    call = Call([1024])
    for _ in range(2):
        started.clear()
        call.forward()
        assert len(started) == 2  # besides the calling thread
        started.clear()
        call.backward()
        assert len(started) == 2
        environment.setenv("RAWATTN_NUM_THREADS", "1")
    assert not any(thread.is_alive() for thread in started)
    available_threads.cache_clear()
    started.clear()
    call.forward()
    assert not started


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "²", "9" * 5000])
def test_number_of_threads_is_refused(environment: pytest.MonkeyPatch, given: str) -> None:
    environment.setenv("RAWATTN_NUM_THREADS", given)
    q = np.zeros((1, 1, 1, 8), np.float32)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"RAWATTN_NUM_THREADS: got '.*', expected an int >= 1"
        ):
            rawattn.attention(q, q, q, backend="cpu")
    environment.setenv("RAWATTN_NUM_THREADS", " 2 ")
    assert available_threads() == 2


@pytest.mark.parametrize("given", [None, ""])
def test_default_is_the_cpus_of_the_process(
    environment: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is None:
        environment.delenv("RAWATTN_NUM_THREADS", raising=False)
    else:
        environment.setenv("RAWATTN_NUM_THREADS", given)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    assert available_threads() == len(usable)
    # As on systems without CPU affinity, and on Python 3.13.
    for known, expected in (
        ({"cpu_count": lambda: None}, 1),
        ({"process_cpu_count": lambda: 7}, 7),
    ):
        available_threads.cache_clear()
        environment.setattr(cpu_threads, "os", SimpleNamespace(environ=os.environ, **known))
        assert available_threads() == expected


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_task_runs_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(cpu_threads, "available_threads", lambda: threads)
    done: list[int] = []
    run([Task(WORK_OF_A_THREAD, lambda n=n: done.append(n)) for n in range(300)])
    assert sorted(done) == list(range(300))


@pytest.mark.parametrize("where", ["calling thread", "helper"])
def test_error_of_a_task_ends_the_call(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A task's exception is raised in the caller, and no thread is left running."""
    monkeypatch.setattr(cpu_threads, "available_threads", lambda: 3)
    caller, alive = threading.current_thread(), threading.active_count()
    done: list[int] = []

    def compute() -> None:
        time.sleep(0.002)
        if (threading.current_thread() is caller) == (where == "calling thread"):
            raise MemoryError(where)
        done.append(1)

    with pytest.raises(MemoryError, match=where):
        run([Task(WORK_OF_A_THREAD, compute)] * 1000)
    assert len(done) < 1000
    assert threading.active_count() == alive


def test_an_error_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arrays of a call that failed are freed with its exception, not later by the garbage collector."""
    monkeypatch.setattr(cpu_threads, "available_threads", lambda: 3)
    together = threading.Barrier(3, timeout=10)

    class Kept:
        pass

    def fail() -> weakref.ref[Kept]:
        kept = Kept()

        def compute() -> None:
            together.wait()
            raise MemoryError(kept)

        with contextlib.suppress(MemoryError):
            run([Task(WORK_OF_A_THREAD, compute)] * 3)
        return weakref.ref(kept)

    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def test_without_threads_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started while Python ends (since 3.12), or if the process has as many as it may."""

    class Refused(threading.Thread):
        starts = 0

        def start(self) -> None:
            Refused.starts += 1
            if Refused.starts == 2:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(cpu_threads, "Thread", Refused)
    monkeypatch.setattr(cpu_threads, "available_threads", lambda: 4)
    done: list[int] = []
    run([Task(WORK_OF_A_THREAD, lambda n=n: done.append(n)) for n in range(50)])
    assert sorted(done) == list(range(50))
